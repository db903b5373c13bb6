"""Summaries and differences as Markdown for a pull request comment.

The top, at most twelve lines, holds what a reviewer needs; detailed changes are folded below. The same files always
give the same text. Names come from untrusted model files: they are put in code spans, where nothing is read as
Markdown, HTML or a mention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxtool.cli.stats_blocks import (
    ABSENT,
    MAX_ROWS,
    Section,
    counts_of,
    difference_sections,
    initializers_of,
    interface_notes,
    last_verification,
    license_of,
    needs,
    replaced,
    summary_sections,
)
from onnxtool.errors import shorten
from onnxtool.reports import code_span, html_entity, printable
from onnxtool.summary.figures import Difference, Stats

# GitHub refuses comments of more than 65,536 characters.
_MAX_LENGTH = 60_000
_MAX_CELL_LENGTH = 100
_MAX_GATES = 3
_TOP = ("Number of nodes", "Parameters", "Size", "Fused attentions")  # of the figures


def summary_comment(stats: Stats, gates: Sequence[str] = ()) -> str:
    """Write one model as Markdown."""
    sections = summary_sections(stats)
    rows = [row for row in sections[0].rows if row[0] in _TOP]
    rows += [("Needs", needs(stats)), ("License", license_of(stats))]
    top = [f"### {code_span(stats.path)}", "| | |", "|---|---|", *map(_row, rows), ""]
    return _document([*top, *_last_lines(stats, gates)], sections)


def difference_comment(difference: Difference, gates: Sequence[str] = ()) -> str:
    """Write the difference between two models as Markdown."""
    base, model, delta = difference.base, difference.model, difference.delta
    sections = difference_sections(difference)
    rows = [row for row in sections[0].rows if row[0] in _TOP]
    top = [
        f"### {code_span(model.path)} against {code_span(base.path)}",
        "| | base | model | change |",
        "|---|---:|---:|---:|",
        *map(_row, [*rows, replaced("Needs", needs(model), needs(base))]),
    ]
    parts = {"Operators": counts_of(delta.ops), "Initializers": initializers_of(delta)}
    parts["Metadata"] = counts_of(delta.metadata)
    told = [f"**{name}:** {changes or 'unchanged'}" for name, changes in parts.items()]
    notes = interface_notes(base, model, delta.inputs, delta.outputs)
    interface = f"⚠ {'; '.join(notes)}" if notes else "inputs and outputs unchanged"
    top += ["", f"**Interface:** {interface}. {' · '.join(told)}", *_last_lines(model, gates)]
    return _document(top, sections)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_text(shorten(cell, _MAX_CELL_LENGTH * 3)) for cell in cells)} |"


def _last_lines(stats: Stats, gates: Sequence[str]) -> list[str]:
    """Return lines naming the failed gates and how the file was made, if there is anything to report."""
    parts = []
    if gates:
        more = f" and {len(gates) - _MAX_GATES} more" if len(gates) > _MAX_GATES else ""
        parts.append(f"❌ **Failed gates:** {'; '.join(code_span(gate) for gate in gates[:_MAX_GATES])}{more}.")
    if verified := last_verification(stats):
        parts.append(f"**Made by** {_text(shorten(verified, _MAX_CELL_LENGTH * 3))}.")
    return [" ".join(parts)] if parts else []


def _document(top: Sequence[str], sections: Sequence[Section]) -> str:
    text = "\n".join(top).rstrip() + "\n"
    for section in sections:
        folded = _folded(section)
        if len(text) + len(folded) > _MAX_LENGTH:
            folded = f"\n{section.title}: {len(section.rows)}, left out for their length; `--format json` has them.\n"
        text += folded
    return text


def _folded(section: Section) -> str:
    rule = "|".join("---:" if column in section.numbers else "---" for column in section.columns)
    lines = [_row(section.columns), f"|{rule}|"]
    for row in section.rows[:MAX_ROWS]:
        cells = [
            _cell(cell, is_name=column in section.names) for column, cell in zip(section.columns, row, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    more = len(section.rows) - MAX_ROWS
    note = f"\n\nand {more} more; `--format json` has them all" if more > 0 else ""
    summary = f"<summary>{section.title} ({len(section.rows)})</summary>"
    return f"\n<details>{summary}\n\n" + "\n".join(lines) + f"{note}\n\n</details>\n"


def _cell(text: str, *, is_name: bool) -> str:
    text = shorten(text, _MAX_CELL_LENGTH)
    return code_span(text) if is_name and text != ABSENT else _text(text)


def _text(text: str) -> str:
    """Escape Markdown and HTML; mentions of people or issues, and links, become code."""
    if any(mark in text.lower() for mark in ("@", "#", "://", "www.")):
        return code_span(text)
    text = "".join(html_entity(character) if character in "\\`*|<>[]&~" else character for character in printable(text))
    # Inside a word, an underscore has no special meaning.
    return " ".join(
        word.replace("_", "&#95;") if word[:1] == "_" or word[-1:] == "_" else word for word in text.split(" ")
    )
