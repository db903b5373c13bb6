"""An evaluation as one HTML page: its tables, and a chart of quality against time and size."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from onnxtool.cli.evaluate_blocks import evaluation_blocks
from onnxtool.cli.page import blocks_page
from onnxtool.cli.render import format_bytes, format_duration
from onnxtool.cli.streams import printable

if TYPE_CHECKING:
    from onnxtool.evaluation.report import EvaluationReport

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 240, 56, 28, 44
_MARGIN = 0.25  # of the range, around what is drawn


class _Point(NamedTuple):
    """A system: its name, what it costs, its quality with the interval, and its color."""

    name: str
    cost: float
    cost_text: str
    mean: float
    low: float
    high: float
    color: str


def evaluation_page(report: EvaluationReport) -> str:
    """Write an evaluation as an HTML page."""
    gates = [gate.text for gate in report.gates if gate.met]
    title = f"{report.model.name} on {report.data}"
    return blocks_page(title, evaluation_blocks(report), gates, _charts(report))


def _charts(report: EvaluationReport) -> str:
    """Draw the first measure against the time of a query, and against the size of the file."""
    measure, ours = next(iter(report.measures.items()))
    systems = [(report.model, ours.mean, ours.low, ours.high, "var(--model)")]
    if report.against is not None:
        base = report.against.measures[measure].base
        systems.append((report.against.base, base, base, base, "var(--base)"))
    times, sizes = [], []
    for system, mean, low, high, color in systems:
        if system.query_ms is not None:
            text = format_duration(system.query_ms)
            times.append(_Point(system.name, system.query_ms, text, mean, low, high, color))
        if system.size_bytes is not None:
            text = format_bytes(system.size_bytes)
            sizes.append(_Point(system.name, system.size_bytes, text, mean, low, high, color))
    drawn = [(times, f"{measure} and the time of a query"), (sizes, f"{measure} and the size of the file")]
    return "\n".join(_chart(points, title) for points, title in drawn if points)


def _chart(points: Sequence[_Point], title: str) -> str:
    """Draw points with their intervals; the same figures are in the tables, so a reader of the screen is told where."""
    most = max(point.cost for point in points) * (1 + _MARGIN)
    low, high = min(point.low for point in points), max(point.high for point in points)
    span = (high - low) or 0.1
    low, high = low - _MARGIN * span, high + _MARGIN * span

    def across(cost: float) -> float:
        return _LEFT + cost / most * (_WIDTH - _LEFT)

    def down(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    bottom = _HEIGHT - _BOTTOM
    label = f"{escape(title)}; the tables have the figures"
    style = "max-width:26rem;width:100%;font-size:12px;fill:currentColor"
    lines = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" style="{style}">',
        f'<text x="0" y="14">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH}" fill="none" stroke="var(--line)"/>',
        *(
            f'<text x="{_LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>'
            for value in (low, (low + high) / 2, high)
        ),
    ]
    for number, point in enumerate(points):
        x, y, color = across(point.cost), down(point.mean), point.color
        anchor = "end" if x > _WIDTH * 0.6 else "start"
        aside, beside = x - 9 if anchor == "end" else x + 9, y + (-8 if number else 16)
        name, cost = escape(printable(_short(point.name))), escape(point.cost_text)
        lines += [
            f'<path d="M{x:.1f} {down(point.low):.1f}V{down(point.high):.1f}" stroke="{color}" stroke-width="2"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" style="fill:{color}"/>',
            f'<text x="{aside:.1f}" y="{beside:.1f}" text-anchor="{anchor}">{name}</text>',
            f'<text x="{x:.1f}" y="{bottom + 16 + 14 * number}" text-anchor="middle">{cost}</text>',
        ]
    return "\n".join([*lines, "</svg>"])


def _short(name: str) -> str:
    """Return the last part of a path."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2][-40:]
