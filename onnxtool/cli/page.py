"""An HTML page of tables: text is escaped, and numbers may have bars.

The page loads nothing and runs nothing, and says so to the browser: names come from files, which are untrusted. Bars
are boxes whose width is a number of our own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from onnxtool.cli.render import Block, Facts, Heading, Note, Table
from onnxtool.cli.stats_blocks import Section, shown_rows
from onnxtool.cli.streams import printable

# Colors have a contrast of 4.5 as text and of 3 as bars. On a narrow page the name of a row stands above its cells.
_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --back: #fff; --line: #d1d9e0; --track: #eaeef2;
  --model: #2f6feb; --base: #818b98; --note: #9a6700; --gate: #cf222e; }
@media screen and (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa5b1; --back: #0d1117;
  --line: #3d444d; --track: #21262d; --note: #d29922; --gate: #f85149; } }
body { font: 1rem/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 64rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
h1, h2, p, th, td, dd { overflow-wrap: break-word; } .long { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; }
thead th, dt { color: var(--soft); font-weight: normal; } tbody th { font-weight: normal; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem 1rem .25rem 0; } tr > :last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bars, .facts { table-layout: fixed; } .bars th:first-child { width: 40%; } .facts .number { white-space: normal; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0; } dd { margin: 0; }
.note { border-left: .25rem solid var(--note); padding: .2rem .8rem; } .gate { border-left-color: var(--gate); }
.track { background: var(--track); height: .4rem; margin: .15rem 0 .25rem; }
.bar { height: 100%; min-width: 1px; background: var(--model); } .bar.base { background: var(--base); }
.track, .bar { print-color-adjust: exact; }
@media (forced-colors: active) { .bar { background: CanvasText; forced-color-adjust: none; } }
@media (max-width: 38rem) {
  table, thead, tbody { display: block; }
  tr { display: flex; flex-wrap: wrap; column-gap: .8rem; border-bottom: 1px solid var(--line); padding: .3rem 0; }
  tr > * { border: 0; padding: 0; flex: 1 1 0; min-width: 0; font-size: .9rem; }
  tr > :first-child { flex: 0 0 100%; font-size: 1rem; } .number { white-space: normal; min-width: min-content; }
  dl { display: block; } dd { margin-bottom: .3rem; }
}
@media print { :root { color-scheme: light; } body { margin: 0; max-width: none; font-size: 10pt; }
  tr, dt, .note { break-inside: avoid; } h2, thead, dt { break-after: avoid; } }
"""

_LONG = re.compile(r"[^\s&;]{25,}")  # entities stay whole


def blocks_page(title: str, blocks: Sequence[Block], gates: Sequence[str] = (), chart: str = "") -> str:
    """Write the blocks of a report as an HTML page.

    Args:
        title: of the page, and of what stands before the first heading.
        blocks: what text and Markdown show.
        gates: what each gate that is met says.
        chart: markup of our own, shown before the tables.
    """
    heading, sections, notes = "Summary", [], []
    for block in blocks:
        match block:
            case Heading(text):
                heading = text
            case Note(text):
                notes.append(text)
            case Facts(rows):
                sections.append(Section(heading, ("", ""), rows, is_whole=True, is_facts=True))
            case Table(columns, rows, numbers):
                sections.append(Section(heading, columns, rows, numbers=tuple(numbers), is_whole=True))
    return sections_page(title, sections, gates, notes, chart)


def sections_page(
    title: str, sections: Sequence[Section], gates: Sequence[str], notes: Sequence[str] = (), chart: str = ""
) -> str:
    """Write sections as an HTML page, below the gates that are met, the notes and a chart."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(printable(title))}</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{_words(title)}</h1>",
        *(f'<p class="note gate">gate {_words(gate)}</p>' for gate in gates),
        *(f'<p class="note">{_words(note)}</p>' for note in notes),
        *([chart] if chart else []),
        *(_section(section, f"section{number}") for number, section in enumerate(sections, 1)),
        "</main></body></html>",
    ]
    return "\n".join(lines) + "\n"


def _section(section: Section, name: str) -> str:
    """Write a section as a list of names and values, or as a table of which the first column names the row."""
    rows, left_out = shown_rows(section)
    heading = f'<section aria-labelledby="{name}"><h2 id="{name}">{_words(section.title)}</h2>'
    after = f'<p class="note">{_words(left_out)}</p>' if left_out else ""
    if len(section.columns) == 2 and section.is_facts:
        facts = "\n".join(f"<dt>{_words(name)}</dt><dd>{_words(value)}</dd>" for name, value in rows)
        return f"{heading}\n<dl>{facts}</dl>{after}</section>"
    kinds = [' class="number"' if column in section.numbers else "" for column in section.columns]
    layout = ' class="bars"' if section.bars else ' class="facts"' if section.is_facts else ""
    heads = zip(section.columns, kinds, strict=True)
    head = "".join(f'<th scope="col" role="columnheader"{kind}>{_words(column)}</th>' for column, kind in heads)
    lines = [
        # The roles are those of the elements, which browsers may forget where a style sheet lays them out.
        f'{heading}<table role="table" aria-labelledby="{name}"{layout}>',
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">',
    ]
    for number, row in enumerate(rows):
        name, *cells = map(_words, row)
        drawn = [_bar(section, column, number) for column in section.columns[1:]]
        values = "".join(
            f'<td role="cell"{kind}>{cell}{bar}</td>' for kind, cell, bar in zip(kinds[1:], cells, drawn, strict=True)
        )
        lines.append(f'<tr role="row"><th scope="row" role="rowheader">{name}</th>{values}</tr>')
    return "\n".join([*lines, f"</tbody></table>{after}</section>"])


def _bar(section: Section, column: str, row: int) -> str:
    """Draw a number as a bar; nothing in a column without bars."""
    if column not in section.bars:
        return ""
    kind = "bar base" if column == "Base" else "bar"
    percent = 100 * section.bars[column][row]
    bar = f'<div class="{kind}" style="width:{percent:.2f}%"></div>' if percent else ""
    return f'<div class="track">{bar}</div>'


def _words(text: str) -> str:
    """Escape a text whose names break after their separators; words that are longer break anywhere, where they must."""
    # Short pieces stay where they are: `.onnx` at the end of a file's name.
    pieces = re.split(r"(?<=[./:])(?=[A-Za-z]\w{5})", printable(text))
    return "<wbr>".join(_LONG.sub(r'<span class="long">\g<0></span>', escape(piece)) for piece in pieces)
