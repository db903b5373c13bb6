"""`onnxtool stats`: summarize a model or its difference from a base, with gates on either.

`--format markdown` writes a pull request comment. The top, at most twelve lines, holds what a reviewer needs; detailed
changes are folded below. The same files always give the same text. Names come from untrusted model files: they are put
in code spans, where nothing is read as Markdown, HTML or a mention.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxtool.cli.choices import PathType
from onnxtool.cli.configuration import all_of
from onnxtool.cli.options import FORMATS, Result, derived_options, refuse, refused_gates, result_options
from onnxtool.cli.stats_blocks import (
    ABSENT,
    MAX_ROWS,
    Section,
    counts_of,
    difference_blocks,
    difference_notes,
    difference_sections,
    edges_of,
    initializers_of,
    interface_notes,
    last_verification,
    license_of,
    needs,
    replaced,
    summary_sections,
)
from onnxtool.cli.stats_blocks import summary_blocks as summary_blocks
from onnxtool.cli.streams import say
from onnxtool.errors import shorten
from onnxtool.reports import code_span, html_entity, printable, to_json
from onnxtool.stats import Settings, compare_models, summarize_model
from onnxtool.summary.figures import Difference, Stats

if TYPE_CHECKING:
    from onnxtool.summary.gates import Gate, TextGate

_LOGGER = logging.getLogger(__name__)


@click.command(
    "stats",
    epilog="\b\nExample: onnxtool stats models/all-MiniLM-L6-v2.onnx --fail_if 'num_nodes>500'",
)
@click.argument("model", type=PathType())
@click.argument("base", type=PathType(), required=False)
@derived_options(settings=Settings)
@result_options([*FORMATS, "html"], "; markdown is for a review comment, html is one page with charts and the graph")
def command(settings: Settings, *, model: Path, base: Path | None, result: Result) -> int:
    """Summarize the ONNX file MODEL, or show how it differs from the ONNX file BASE.

    A summary reads the structure and hardly any weights, so large files take no longer; a difference reads all weights
    once, unless --no_weights is given. Nodes inside If, Loop and Scan count.
    """
    _LOGGER.info("reading %s", " and ".join(str(path) for path in (model, base) if path is not None))
    gates = _parse_gates(settings.fail_if, has_base=base is not None)
    if base is None:
        refuse({"weights"}, "there is no BASE to compare weights with;")
        report: Stats | Difference = summarize_model(model)
    else:
        report = compare_models(model, base, weights=settings.weights)
    met = [*_met_gates(gates, report), *_refused_license(settings.allowed_licenses, report)]
    if result.format_name == "markdown":
        if isinstance(report, Difference):
            result.write(difference_comment(report, met))
        else:
            result.write(summary_comment(report, met))
    elif result.format_name == "html":
        result.write(_page(report, met))
    else:
        blocks = (
            difference_blocks(report)
            if isinstance(report, Difference)
            else summary_blocks(report, report.path, details=True)
        )
        result.emit(report, blocks)
    for gate in met:
        say(f"gate failed: {gate}")
    return 1 if met else 0


def _parse_gates(expressions: Sequence[str], *, has_base: bool) -> list[Gate | TextGate]:
    """Parse gates from the command line and the configuration; configured relative gates apply only with a base.

    Raises:
        UsageError: an expression is malformed.
    """
    if not expressions:
        return []
    from onnxtool.errors import GateError
    from onnxtool.summary.gates import Gate, parse_any_gate

    gates = []
    # The command line adds to a repository's gates.
    of_file = next((setting for setting in all_of(click.get_current_context()) if setting.option == "fail_if"), None)
    source, fixed = ("", ()) if of_file is None else (of_file.source, of_file.value)
    if expressions == fixed:
        expressions = ()
    for place, texts in (("--fail_if", expressions), (source, fixed)):
        for text in texts:
            try:
                gate = parse_any_gate(text)
            except GateError as error:
                raise click.UsageError(f"{place}: {error.message}\n{error.hint}") from error
            is_relative = isinstance(gate, Gate) and gate.sign != 0
            needs_base = is_relative or gate.figure.removeprefix("count(").startswith(("delta.", "edges."))
            if has_base or not needs_base or texts is expressions:
                gates.append(gate)
    return gates


def _met_gates(gates: Sequence[Gate | TextGate], report: Stats | Difference) -> list[str]:
    """Return the message of each failed gate.

    Raises:
        UsageError: a gate names a figure that the report does not have.
    """
    if not gates:
        return []
    from onnxtool.summary.gates import check_any_gates

    figures, base = to_json(report), None
    if isinstance(report, Difference) and isinstance(figures, dict) and isinstance(figures["model"], dict):
        delta: Any = figures["delta"]
        figures, base = {**figures["model"], "delta": delta, "edges": delta["edges"]}, figures["base"]
    with refused_gates():
        results = check_any_gates(gates, figures, base)
    for result in results:
        _LOGGER.info("gate %s: %s", "failed" if result.met else "passed", result)
    return [str(result) for result in results if result.met]


def _refused_license(allowed: Sequence[str], report: Stats | Difference) -> list[str]:
    """Report a model license that is not among the allowed ones, if any are configured."""
    from onnxtool.model_file.metadata import License

    stats = report.model if isinstance(report, Difference) else report
    model_license = License(stats.license, stats.license_name)
    if not allowed or model_license.is_among(allowed):
        return []
    return [f"the license is {model_license}, and allowed_licenses are {', '.join(allowed)}"]


def _page(report: Stats | Difference, gates: Sequence[str]) -> str:
    from onnxtool.cli.graph_drawing import graph_drawing, sections_page

    if isinstance(report, Stats):
        return sections_page(report.path, summary_sections(report), gates, drawing=graph_drawing(report))
    title, notes = f"{report.model.path} against {report.base.path}", difference_notes(report)
    return sections_page(title, difference_sections(report), gates, notes, drawing=graph_drawing(report))


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
    parts |= {"Edges": edges_of(delta.edges), "Metadata": counts_of(delta.metadata)}
    summary = [f"**{name}:** {changes or 'unchanged'}" for name, changes in parts.items()]
    notes = interface_notes(base, model, delta.inputs, delta.outputs)
    interface = f"⚠ {'; '.join(notes)}" if notes else "inputs and outputs unchanged"
    top += ["", f"**Interface:** {interface}. {' · '.join(summary)}", *_last_lines(model, gates)]
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
