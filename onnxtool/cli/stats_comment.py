"""Summaries and differences as Markdown for a pull request comment.

The top, at most twelve lines, holds what a reviewer needs; detailed changes are folded below. The same files always
give the same text. Names come from untrusted model files: they are put in code spans, where nothing is read as
Markdown, HTML or a mention.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxtool.cli.render import format_bytes
from onnxtool.cli.stats_blocks import MAX_ROWS, Section, difference_sections, summary_sections
from onnxtool.cli.stats_wording import (
    ABSENT,
    counts_of,
    format_count,
    growth,
    interface_notes,
    last_verification,
    license_of,
    needs,
    shape_of,
    shorten,
)
from onnxtool.reports import code_span, html_entity, printable
from onnxtool.summary.figures import Difference, Stats

# GitHub refuses comments of more than 65,536 characters.
_MAX_LENGTH = 60_000
_MAX_CELL_LENGTH = 100
_MAX_GATES = 3


def summary_comment(stats: Stats, gates: Sequence[str] = ()) -> str:
    """Write one model as Markdown."""
    figures = [
        ("Number of nodes", f"{stats.num_nodes:,}"),
        ("Fused attentions", str(stats.num_attentions)),
        ("Parameters", f"{stats.num_parameters:,} in {stats.num_initializers:,} initializers"),
        (
            "Size",
            f"{format_bytes(stats.size_bytes)}, {format_bytes(stats.duplicate_bytes)} of it stored more than once",
        ),
        ("Needs", _text(needs(stats))),
        ("License", _text(license_of(stats))),
    ]
    if stats.cost is not None:
        cost = (
            f"{format_count(stats.cost.macs)}, {format_bytes(stats.cost.peak_activation_bytes)} of activations at once"
        )
        figures.insert(4, (f"MACs of {shape_of(stats.cost)}", cost))
    top = [
        f"### {code_span(stats.path)}",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in figures),
        "",
    ]
    top += _last_lines(stats, gates)
    return _document(top, summary_sections(stats))


def difference_comment(difference: Difference, gates: Sequence[str] = ()) -> str:
    """Write the difference between two models as Markdown."""
    base, model, delta = difference.base, difference.model, difference.delta
    rows = [
        _figure("Number of nodes", model.num_nodes, base.num_nodes),
        _figure("Fused attentions", model.num_attentions, base.num_attentions),
        _figure("Parameters", model.num_parameters, base.num_parameters),
        (
            "Size",
            *map(format_bytes, (base.size_bytes, model.size_bytes)),
            growth(model.size_bytes, base.size_bytes, format_bytes),
        ),
    ]
    if model.cost is not None and base.cost is not None:
        macs = model.cost.macs, base.cost.macs
        label = f"MACs of {shape_of(model.cost)}"
        rows.append((label, *map(format_count, reversed(macs)), growth(*macs, format_count)))
    same = needs(model) == needs(base)
    rows.append(("Needs", _text(needs(base)), _text(needs(model)), "unchanged" if same else ""))
    top = [
        f"### {code_span(model.path)} against {code_span(base.path)}",
        "| | base | model | change |",
        "|---|---:|---:|---:|",
    ]
    top += [f"| {' | '.join(row)} |" for row in rows]
    parts = [("Operators", delta.ops), ("Initializers", delta.weights), ("Metadata", delta.metadata)]
    told = [f"**{name}:** {counts_of(changes) or 'unchanged'}" for name, changes in parts]
    notes = interface_notes(base, model, delta.inputs, delta.outputs)
    interface = f"⚠ {'; '.join(notes)}" if notes else "inputs and outputs unchanged"
    top += ["", f"**Interface:** {interface}. {' · '.join(told)}", *_last_lines(model, gates)]
    return _document(top, difference_sections(difference))


def _figure(name: str, after: int, before: int) -> tuple[str, str, str, str]:
    return name, f"{before:,}", f"{after:,}", growth(after, before)


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
    lines = [f"| {' | '.join(map(_text, section.columns))} |", f"|{rule}|"]
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
