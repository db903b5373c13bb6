"""A summary and a difference as one HTML page: figures, and bars of operators and of bytes by part.

The page loads nothing and runs nothing, and says so to the browser: names come from model files, which are untrusted.
Every text is escaped, and bars are boxes whose width is a number of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from onnxtool.cli.render import Block, Facts, Heading, Note, Table, format_bytes
from onnxtool.cli.stats_blocks import difference_blocks, summary_blocks
from onnxtool.cli.stats_wording import names_of, shorten
from onnxtool.cli.streams import printable
from onnxtool.summary.figures import Difference, Stats

_MAX_BARS = 60
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --base: #9aa5b1; --model: #2f6feb; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .6rem .2rem 0; overflow-wrap: anywhere; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; }
dt { opacity: .75; } dd { margin: 0; overflow-wrap: anywhere; }
.note { border-left: 4px solid #d29922; background: var(--soft); padding: .4rem .8rem; }
.gate { border-left-color: #da3633; }
.bars { display: grid; grid-template-columns: minmax(8rem, 18rem) 1fr max-content; gap: .25rem .8rem; }
.bars > .name { overflow-wrap: anywhere; } .bars > .value { text-align: right; font-variant-numeric: tabular-nums; }
.track { align-self: center; background: var(--soft); }
.bar { height: .7rem; min-width: 1px; background: var(--model); } .bar.base { background: var(--base); }
.key { display: inline-block; width: .8rem; height: .8rem; background: var(--model); }
.key.base { background: var(--base); }
summary { cursor: pointer; margin-top: 2rem; font-weight: 600; }
"""


class _Bar(NamedTuple):
    """A row of a chart; `base` is None in a chart of one model."""

    name: str
    model: int
    base: int | None = None


def summary_page(stats: Stats, gates: Sequence[str] = ()) -> str:
    """Write one model as an HTML page."""
    blocks = summary_blocks(stats, stats.path, details=True)
    charts = [
        _chart("Operators", [_Bar(op, count) for op, count in stats.ops.items()], str),
        _chart("Bytes by part", [_Bar(name, layer.size_bytes) for name, layer in stats.layers.items()], format_bytes),
        _chart("Bytes by dtype", [_Bar(dtype, size) for dtype, size in stats.initializer_bytes.items()], format_bytes),
    ]
    return _page(stats.path, blocks, charts, gates)


def difference_page(difference: Difference, gates: Sequence[str] = ()) -> str:
    """Write what separates two models as an HTML page."""
    base, model, delta = difference.base, difference.model, difference.delta
    ops = sorted(names_of(delta.ops), key=lambda op: (-abs(model.ops.get(op, 0) - base.ops.get(op, 0)), op))
    layers = [*base.layers, *(name for name in model.layers if name not in base.layers)]
    charts = [
        _chart("Operators that differ", [_Bar(op, model.ops.get(op, 0), base.ops.get(op, 0)) for op in ops], str),
        _chart("Nodes by part", [_Bar(name, _nodes(model, name), _nodes(base, name)) for name in layers], str),
        _chart("Bytes by part", [_Bar(name, _bytes(model, name), _bytes(base, name)) for name in layers], format_bytes),
        _chart("Operators", [_Bar(op, count, base.ops.get(op, 0)) for op, count in model.ops.items()], str),
    ]
    return _page(f"{model.path} against {base.path}", difference_blocks(difference), charts, gates)


def _nodes(stats: Stats, name: str) -> int:
    return stats.layers[name].num_nodes if name in stats.layers else 0


def _bytes(stats: Stats, name: str) -> int:
    return stats.layers[name].size_bytes if name in stats.layers else 0


def _page(title: str, blocks: Sequence[Block], charts: Iterable[str], gates: Sequence[str]) -> str:
    figures = [_block(block) for block in blocks[1:2]]
    details = [_block(block) for block in blocks[2:]]
    alarms = [f'<p class="note gate">gate {_text(gate)}</p>' for gate in gates]
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        *alarms,
        *figures,
        *filter(None, charts),
        "<details><summary>Tables</summary>",
        *details,
        "</details></body></html>",
    ]
    return "\n".join(lines) + "\n"


def _chart(title: str, bars: Sequence[_Bar], show: Callable[[int], str]) -> str:
    """Draw bars whose lengths are relative to the longest of them; nothing where all are 0."""
    longest = max((max(bar.model, bar.base or 0) for bar in bars), default=0)
    if not longest:
        return ""
    compares = any(bar.base is not None for bar in bars)
    key = '<p><span class="key base"></span> base <span class="key"></span> model</p>' if compares else ""
    lines = [f"<section><h2>{_text(title)}</h2>{key}", '<div class="bars">']
    for bar in bars[:_MAX_BARS]:
        tracks = "" if bar.base is None else _box("bar base", bar.base, longest)
        shown = show(bar.model) if bar.base in (None, bar.model) else f"{show(bar.base or 0)} → {show(bar.model)}"
        lines += [
            f'<div class="name">{_text(shorten(bar.name))}</div>',
            f'<div class="track">{tracks}{_box("bar", bar.model, longest)}</div>',
            f'<div class="value">{_text(shown)}</div>',
        ]
    more = len(bars) - _MAX_BARS
    lines.append(f"</div>{f'<p>and {more} more</p>' if more > 0 else ''}</section>")
    return "\n".join(lines)


def _box(kind: str, amount: int, longest: int) -> str:
    return f'<div class="{kind}" style="width:{100 * amount / longest:.2f}%"></div>' if amount else ""


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{_text(text)}</h2>"
        case Note(text):
            return f'<p class="note">{_text(text)}</p>'
        case Facts(rows):
            return f"<dl>{''.join(f'<dt>{_text(name)}</dt><dd>{_text(value)}</dd>' for name, value in rows)}</dl>"
        case Table(columns, rows, numbers):
            kinds = [' class="number"' if column in numbers else "" for column in columns]
            head = "".join(f"<th{kind}>{_text(column)}</th>" for column, kind in zip(columns, kinds, strict=True))
            body = "\n".join(
                f"<tr>{''.join(f'<td{kind}>{_text(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
                for row in rows
            )
            return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(text: str) -> str:
    return escape(printable(text))
