"""An evaluation as an HTML page: its tables, and with smaller vectors a curve for each measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxtool.cli.graph_drawing import render_template, sections_page
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_bytes
from onnxtool.cli.stats_blocks import Section
from onnxtool.evaluation.report import EvaluationReport, PrunedResult

_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 410, 10, 200  # of the axes


def evaluation_page(report: EvaluationReport, blocks: Sequence[Block]) -> str:
    """Write the blocks of an evaluation as a page."""
    title, sections, notes = "Summary", list[Section](), list[str]()
    for block in blocks:
        match block:
            case Heading(text):
                title = text
            case Note(text):
                notes.append(text)
            case Facts(rows):
                sections.append(Section(title, ("", "value"), rows, is_facts=True, is_whole=True))
            case Table(columns, rows, numbers):
                sections.append(Section(title, columns, rows, numbers=tuple(numbers), is_whole=True))
    drawing = ""
    if report.pruned:
        charts = [_chart(name, report.pruned) for name in report.measures]
        drawing = render_template("curve.html.jinja", {}, charts=charts)
    met = [gate.text for gate in report.gates if gate.met]
    return sections_page(f"Evaluation of {report.model.name}", sections, met, notes, drawing)


def _chart(name: str, results: Sequence[PrunedResult]) -> dict[str, Any]:
    """Return the places of a measure's points in a drawing of 420 by 230."""
    whole = results[0].measures[name].mean
    ends = [(one.measures[name].mean, one.changes.get(name)) for one in results]
    values = [
        value
        for mean, change in ends
        for value in (mean, *((whole + change.low, whole + change.high) if change else ()))
    ]
    low, high, largest = min(values), max(values), max(one.sizes.index_bytes for one in results)

    def across(size: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * size / max(1, largest), 1)

    def down(value: float) -> float:
        return float(round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low or 1), 1))

    rules = list(dict.fromkeys(_rule(one) for one in results[1:]))
    points: list[dict[str, Any]] = []
    places: dict[str, list[tuple[float, float]]] = {rule: [] for rule in rules}
    for one, (mean, change) in zip(results, ends, strict=True):
        x, y, rule, whisker = across(one.sizes.index_bytes), down(mean), 0, ""
        if change:
            whisker = f"M{x} {down(whole + change.low)}V{down(whole + change.high)}"
            places[_rule(one)].append((x, y))
            rule = 1 + rules.index(_rule(one))
        title = f"{one.prune}: {mean:.4f}, {format_bytes(one.sizes.index_bytes)}"
        points.append({"x": x, "y": y, "whisker": whisker, "title": title, "chosen": one.chosen, "rule": rule})
    lines = [{"name": rule, "points": [f"{x} {y}" for x, y in sorted(of_rule)]} for rule, of_rule in places.items()]
    ends_of_axes = {"low": f"{low:.3f}", "high": f"{high:.3f}", "largest": format_bytes(largest), "whole": down(whole)}
    return {
        "name": name,
        "lines": lines,
        "points": points,
        "has_chosen": any(one.chosen for one in results),
    } | ends_of_axes


def _rule(one: PrunedResult) -> str:
    """Return the name of the rule for documents, or else of the one for queries."""
    documents, _, queries = one.prune.partition("/")
    return (documents or f"/{queries}").partition(":")[0]
