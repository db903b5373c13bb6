"""`onnxtool stats`: summarize a model or its difference from a base, with gates on either."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.cli.choices import PathType
from onnxtool.cli.configuration import all_of
from onnxtool.cli.options import FORMATS, Result, derived_options, refuse, result_options
from onnxtool.cli.stats_blocks import difference_blocks, difference_notes, difference_sections, summary_sections
from onnxtool.cli.stats_blocks import summary_blocks as summary_blocks
from onnxtool.cli.streams import say
from onnxtool.reports import to_json
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
@derived_options(asked=Settings)
@result_options([*FORMATS, "html"], "; markdown is for a review comment, html is one page with charts and the graph")
def command(asked: Settings, *, model: Path, base: Path | None, result: Result) -> int:
    """Summarize the ONNX file MODEL, or show how it differs from the ONNX file BASE.

    A summary reads the structure and hardly any weights, so large files take no longer; a difference reads all weights
    once, unless --no_weights is given. Nodes inside If, Loop and Scan count.
    """
    _LOGGER.info("reading %s", " and ".join(str(path) for path in (model, base) if path is not None))
    gates = _parse_gates(asked.fail_if, has_base=base is not None)
    if base is None:
        refuse({"weights"}, "there is no BASE to compare weights with;")
        report: Stats | Difference = summarize_model(model)
    else:
        report = compare_models(model, base, weights=asked.weights)
    met = [*_met_gates(gates, report), *_refused_license(asked.allowed_licenses, report)]
    if result.format_name == "markdown":
        result.write(_comment(report, met))
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
    of_file = next((one for one in all_of(click.get_current_context()) if one.option == "fail_if"), None)
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
            needs_base = is_relative or gate.figure.removeprefix("count(").startswith("delta.")
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
    from onnxtool.errors import GateError
    from onnxtool.summary.gates import check_any_gates

    figures, base = to_json(report), None
    if isinstance(report, Difference) and isinstance(figures, dict) and isinstance(figures["model"], dict):
        figures, base = {**figures["model"], "delta": figures["delta"]}, figures["base"]
    try:
        results = check_any_gates(gates, figures, base)
    except GateError as error:
        raise click.UsageError(f"{error.message}\n{error.hint}") from error
    for result in results:
        _LOGGER.info("gate %s: %s", "failed" if result.met else "passed", result)
    return [str(result) for result in results if result.met]


def _refused_license(allowed: Sequence[str], report: Stats | Difference) -> list[str]:
    """Report a model license that is not among the allowed ones, if any are configured."""
    from onnxtool.model_file.metadata import License

    stats = report.model if isinstance(report, Difference) else report
    found = License(stats.license, stats.license_name)
    if not allowed or found.is_among(allowed):
        return []
    return [f"the license is {found}, and allowed_licenses are {', '.join(allowed)}"]


def _comment(report: Stats | Difference, gates: Sequence[str]) -> str:
    from onnxtool.cli.stats_comment import difference_comment, summary_comment

    return difference_comment(report, gates) if isinstance(report, Difference) else summary_comment(report, gates)


def _page(report: Stats | Difference, gates: Sequence[str]) -> str:
    from onnxtool.cli.graph_drawing import graph_drawing
    from onnxtool.cli.page import sections_page

    if isinstance(report, Stats):
        return sections_page(report.path, summary_sections(report), gates, drawing=graph_drawing(report))
    title, notes = f"{report.model.path} against {report.base.path}", difference_notes(report)
    return sections_page(title, difference_sections(report), gates, notes, drawing=graph_drawing(report))
