"""`onnxtool evaluate`: measure retrieval quality."""

from __future__ import annotations

from pathlib import Path

import click

from onnxtool.cli.evaluate_blocks import evaluation_blocks, evaluation_page
from onnxtool.cli.options import (
    FORMATS,
    PathType,
    Result,
    derived_options,
    dry_run_option,
    model_argument,
    result_options,
)
from onnxtool.cli.progress import progress
from onnxtool.cli.render import emit_plan
from onnxtool.cli.streams import printable
from onnxtool.evaluation.options import EvaluateOptions
from onnxtool.model_file import check_writable
from onnxtool.reports import WritePlan, planned_files


@click.command(epilog="Example: onnxtool evaluate --model_path models/all-MiniLM-L6-v2.onnx --data models/collection")
@model_argument("model_path")
@click.option("--model_path", type=PathType(), required=True, help="The ONNX file.")
@click.option(
    "--data",
    type=PathType(),
    required=True,
    metavar="DIR_OR_ID",
    help="A collection in BEIR's layout (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv), or TREC's topics and qrels: a "
    "folder, or a dataset on the hub such as BeIR/scifact or mteb/scifact@REVISION.",
)
@derived_options(options=EvaluateOptions)
@click.option("--save_run", type=PathType(), metavar="FILE", help="Write the ranked results in TREC run format.")
@dry_run_option
@result_options([*FORMATS, "html"], "; html is one page with a chart of quality against time")
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
    from onnxtool.evaluation import evaluate_model
    from onnxtool.evaluation.run import check_evaluation

    if dry_run:
        check_evaluation(model_path, data, options)
        notes = (f"vectors of documents would be kept in {options.cache_folder}",)
        emit_plan(WritePlan("evaluate", planned_files(written), notes), result.format_name)
        return 0
    with progress(quiet=result.quiet):
        report = evaluate_model(model_path, data, options, run_path=save_run, force=result.force)
    if result.format_name == "html":
        result.write(evaluation_page(report))
    else:
        result.emit(report, evaluation_blocks(report))
    for gate in report.gates:
        if gate.met:
            click.echo(f"gate failed: {printable(gate.text)}", err=True)
    return 0 if report.passed else 1
