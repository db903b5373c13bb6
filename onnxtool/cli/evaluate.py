"""`onnxtool evaluate`: measure retrieval quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from onnxtool.cli.choices import PathType
from onnxtool.cli.graph_drawing import render_template, sections_page
from onnxtool.cli.options import (
    FORMATS,
    Result,
    derived_options,
    dry_run_option,
    model_argument,
    refused_gates,
    result_options,
)
from onnxtool.cli.progress import progress
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit_plan, format_bytes, format_duration
from onnxtool.cli.stats_blocks import Section
from onnxtool.cli.streams import say
from onnxtool.evaluation.options import EvaluateOptions
from onnxtool.evaluation.report import EvaluationReport, GateCheck, PrunedResult, SystemComparison, SystemReport
from onnxtool.model_file import check_writable
from onnxtool.reports import WritePlan, planned_files


@click.command(epilog="Example: onnxtool evaluate --model_path models/all-MiniLM-L6-v2.onnx --data models/collection")
@model_argument("model_path")
@click.option("--model_path", type=PathType(), required=True, help="The ONNX file.")
@click.option(
    "--data",
    type=PathType(),
    required=True,
    metavar="DIR",
    help="A collection in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv), or TREC's topics.tsv and "
    "qrels.txt.",
)
@derived_options(options=EvaluateOptions)
@click.option("--save_run", type=PathType("file"), metavar="FILE", help="Write the ranked results in TREC run format.")
@dry_run_option
@result_options([*FORMATS, "html"], "; html is one page, with a curve for --prune")
def command(
    options: EvaluateOptions,
    *,
    model_path: Path,
    data: Path,
    save_run: Path | None,
    dry_run: bool,
    result: Result,
) -> int:
    """Search a test collection with an ONNX file, and measure its retrieval quality.

    Documents and queries are encoded with the checkpoint's own prompts, every document is compared with every query,
    and the measures follow trec_eval. Rerankers reorder the results of BM25 or --candidates. With --against, another
    file or the checkpoint itself answers the same queries, and the difference is reported with a significance test and
    a confidence interval.
    """
    written = [path for path in (result.output, save_run) if path is not None]
    for path in written:
        check_writable(path, force=result.force)
    from onnxtool.evaluation.run import check_evaluation, evaluate_model

    if dry_run:
        with refused_gates():
            check_evaluation(model_path, data, options, writes_run=save_run is not None)
        notes = (f"vectors of documents would be kept in {options.cache_folder}",)
        emit_plan(WritePlan("evaluate", planned_files(written), notes), result.format_name)
        return 0
    with progress(quiet=result.quiet), refused_gates():
        report = evaluate_model(model_path, data, options, run_path=save_run, force=result.force)
    blocks = evaluation_blocks(report)
    if result.format_name == "html":
        result.write(evaluation_page(report, blocks))
    else:
        result.emit(report, blocks)
    say_failed(report.gates)
    return 0 if report.passed else 1


_TEXT_OF_A_QUERY = 70


def gate_blocks(gates: Sequence[GateCheck]) -> list[Block]:
    """Lay out which gates failed and passed; nothing without gates."""
    rows = [("failed" if gate.met else "passed", gate.text) for gate in gates]
    return [Heading("Gates"), Facts(rows)] if rows else []


def say_failed(gates: Sequence[GateCheck]) -> None:
    """Print each gate that failed to stderr."""
    for gate in gates:
        if gate.met:
            say(f"gate failed: {gate.text}")


def evaluation_blocks(report: EvaluationReport) -> list[Block]:
    """Lay out the measures, and the comparison if there is one."""
    model = report.model
    blocks: list[Block] = [
        Facts(
            [
                ("Model", _system(model)),
                ("Collection", f"{report.data}, split {report.split}"),
                ("Documents", f"{report.num_documents:,}"),
                ("Queries", f"{report.num_queries:,} with {report.num_judgements:,} judgements"),
                *_terms(model),
                ("Time", format_duration(model.seconds * 1e3) + _query_time(model)),
                ("Peak memory", format_bytes(report.peak_rss_bytes)),
                *([("Run", report.run_path)] if report.run_path else []),
            ]
        ),
        Heading("Measures, with 95% intervals over queries"),
        Table(
            ("measure", "mean", "from", "to"),
            [(name, *(f"{value:.4f}" for value in (of.mean, of.low, of.high))) for name, of in report.measures.items()],
            frozenset({"mean", "from", "to"}),
        ),
        *(Note(note) for note in report.notes),
    ]
    if report.against is not None:
        blocks += _comparison(report, report.against)
    if report.pruned:
        blocks += _pruned(report.pruned)
    return [*blocks, *gate_blocks(report.gates)]


def _comparison(report: EvaluationReport, against: SystemComparison) -> list[Block]:
    base = against.base
    columns = ("measure", "model", "base", "change", "relative", "from", "to", "p", "better", "worse")
    rows = []
    for name, difference in against.measures.items():
        relative = "" if difference.relative is None else f"{difference.relative:+.2%}"
        figures = (f"{report.measures[name].mean:.4f}", f"{difference.base:.4f}", f"{difference.change:+.4f}", relative)
        interval = (f"{difference.low:+.4f}", f"{difference.high:+.4f}", f"{difference.p_value:.3g}")
        rows.append((name, *figures, *interval, str(difference.num_better), str(difference.num_worse)))
    same = f"{against.num_equal_top_10:,} of {report.num_queries:,} queries have the same 10 in the same order"
    blocks: list[Block] = [
        Heading("Against the base"),
        Facts(
            [
                ("Base", _system(base)),
                *_terms(base),
                ("Time", format_duration(base.seconds * 1e3) + _query_time(base)),
                ("Top 10", f"{against.overlap_at_10:.2%} of the base's are found; {same}"),
            ]
        ),
        Heading("Differences, with 95% intervals and a randomization test"),
        Table(columns, rows, frozenset(columns[1:])),
    ]
    if against.lost:
        first = next(iter(report.measures))
        heads = ("query", first, "base", "text")
        lost = [
            (query.id, f"{query.measures[first]:.3f}", f"{query.base[first]:.3f}", _cut(query.text))
            for query in against.lost
        ]
        blocks += [Heading("Queries that lost most"), Table(heads, lost, frozenset(heads[1:3]))]
    return blocks


def _pruned(results: Sequence[PrunedResult]) -> list[Block]:
    """Lay out the sizes with smaller vectors, and for each measure the differences from the vectors as they are."""
    whole = results[0].sizes.index_bytes
    names = ("prune", "query", "document", "empty", "index", "share", "")
    rows = [
        (
            *(result.prune, f"{result.sizes.query_terms:.1f}", f"{result.sizes.document_terms:.1f}"),
            *(f"{result.sizes.empty_queries + result.sizes.empty_documents:,}", format_bytes(result.sizes.index_bytes)),
            *(f"{result.sizes.index_bytes / whole:.1%}" if whole else "", "chosen" if result.chosen else ""),
        )
        for result in results
    ]
    blocks: list[Block] = [
        Heading("Smaller vectors: terms or token vectors of a text, texts without any, and an index"),
        Table(names, rows, frozenset(names[1:-1])),
    ]
    columns = ("prune", "mean", "change", "from", "to", "p")
    for name in results[0].measures:
        table = []
        for result in results:
            change = result.changes.get(name)
            figures: tuple[str, ...] = ("", "", "", "")
            if change is not None:
                figures = (
                    *(f"{value:+.4f}" for value in (change.change, change.low, change.high)),
                    f"{change.p_value:.3g}",
                )
            table.append((result.prune, f"{result.measures[name].mean:.4f}", *figures))
        blocks += [Heading(f"{name} with smaller vectors"), Table(columns, table, frozenset(columns[1:]))]
    return blocks


def _system(system: SystemReport) -> str:
    size = "" if system.size_bytes is None else f", {format_bytes(system.size_bytes)}"
    kind = "" if system.kind == system.name else f", {system.kind}"
    return f"{system.name}{kind}{f' by {system.similarity}' if system.similarity else ''}{size}"


def _query_time(system: SystemReport) -> str:
    return "" if system.query_ms is None else f"; encoding a single query takes {format_duration(system.query_ms)}"


def _terms(system: SystemReport) -> list[tuple[str, str]]:
    terms = system.terms
    if terms is None:
        return []
    numbers = f"{terms.query_terms:.0f} of a query, {terms.document_terms:.0f} of a document"
    return [("Terms", f"{numbers}; {terms.sparsity:.2%} of all weights are zero")]


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_OF_A_QUERY else f"{text[:_TEXT_OF_A_QUERY]}…"


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
    ends = [(result.measures[name].mean, result.changes.get(name)) for result in results]
    values = [
        value
        for mean, change in ends
        for value in (mean, *((whole + change.low, whole + change.high) if change else ()))
    ]
    low, high, largest = min(values), max(values), max(result.sizes.index_bytes for result in results)

    def across(size: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * size / max(1, largest), 1)

    def down(value: float) -> float:
        return float(round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low or 1), 1))

    rules = list(dict.fromkeys(_rule(result) for result in results[1:]))
    points: list[dict[str, Any]] = []
    places: dict[str, list[tuple[float, float]]] = {rule: [] for rule in rules}
    for result, (mean, change) in zip(results, ends, strict=True):
        x, y, rule, whisker, label = across(result.sizes.index_bytes), down(mean), 0, "", result.prune
        if change:
            whisker = f"M{x} {down(whole + change.low)}V{down(whole + change.high)}"
            if places[_rule(result)]:  # the first point of a line has the rule's name too
                label = label.removeprefix(f"{_rule(result)}:")
            places[_rule(result)].append((x, y))
            rule = 1 + rules.index(_rule(result))
        title = f"{result.prune}: {mean:.4f}, {format_bytes(result.sizes.index_bytes)}"
        point = {"label": label, "title": title, "chosen": result.chosen, "rule": rule}
        points.append({"x": x, "y": y, "whisker": whisker, **point})
    lines = [{"name": rule, "points": [f"{x} {y}" for x, y in sorted(of_rule)]} for rule, of_rule in places.items()]
    ends_of_axes = {"low": f"{low:.3f}", "high": f"{high:.3f}", "largest": format_bytes(largest), "whole": down(whole)}
    return {
        "name": name,
        "lines": lines,
        "points": points,
        "has_chosen": any(result.chosen for result in results),
    } | ends_of_axes


def _rule(pruned: PrunedResult) -> str:
    """Return the name of the rule for documents, or else of the one for queries."""
    documents, _, queries = pruned.prune.partition("/")
    return (documents or f"/{queries}").partition(":")[0]
