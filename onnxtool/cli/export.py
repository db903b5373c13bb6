"""`onnxtool export`: export a checkpoint to an ONNX file."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onnxtool.cli.options import derived_options, dry_run_option, model_argument, report_options
from onnxtool.cli.progress import progress
from onnxtool.cli.render import (
    Block,
    Facts,
    Heading,
    Note,
    Table,
    emit,
    emit_plan,
    format_bytes,
    format_duration,
    format_tensor,
)
from onnxtool.cli.verify import size_blocks, verdict, verification_blocks
from onnxtool.export.options import ExportOptions
from onnxtool.export.report import ExportReport
from onnxtool.model_file import check_writable
from onnxtool.reports import TensorInfo, WritePlan, planned_files

if TYPE_CHECKING:
    from onnxtool.optimize.report import OptimizeReport
    from onnxtool.release.variants import Variant


@click.command(
    epilog="Example: onnxtool export --model_name naver/splade-cocondenser-ensembledistil",
)
@model_argument("model_name", "CHECKPOINT")
@derived_options(options=ExportOptions)
@click.option("--optimize", is_flag=True, help="Run `onnxtool optimize` on the exported file.")
@click.option("--stats", is_flag=True, help="Also print a summary of the graph.")
@dry_run_option
@report_options
def command(
    options: ExportOptions, *, optimize: bool, stats: bool, dry_run: bool, format_name: str, quiet: bool
) -> None:
    """Export a Hugging Face checkpoint to an ONNX file, with its tokenizer and configuration next to it.

    The architecture is taken from config.json, outputs and dynamic axes are found by running the model, and the file is
    kept only after it has been compared with PyTorch on several shapes, masks and texts.
    """
    from onnxtool.export.run import export_model, plan_export  # imports tracing, which --help does not need
    from onnxtool.export.targets import TARGETS

    TARGETS[options.target].precisions(options.precisions)
    if optimize and not TARGETS[options.target].takes_any_graph:
        raise click.UsageError(
            f"--optimize would leave a second graph where {options.target} reads one; run onnxtool optimize with "
            "--output"
        )
    if dry_run:
        plan = plan_export(options)
        emit_plan(_with_optimized(plan, force=options.force) if optimize else plan, format_name)
        return
    # PyTorch's threads spin while they wait: with another process on the cores, verifying takes three times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
    # This process makes one file and ends. The library collects where a model goes; in between the collector would look
    # at torch's millions of objects again and again, and at the end once more.
    gc.disable()
    atexit.register(gc.freeze)
    optimized = second = None
    with progress(quiet=quiet):
        exported = replace(options, sizes=()) if optimize else options
        report, variants = _export_all(options) if options.precisions else (export_model(exported), ())
        if optimize:
            optimized, second = _optimize(report, options)
    blocks = export_blocks(report)
    if report.partner is not None:
        blocks += [Heading("The other encoder"), *export_blocks(report.partner)]
    document: dict[str, object] = {**vars(report)}
    if variants:
        document["variants"] = variants
        blocks += variant_blocks(variants)
    if stats:
        from onnxtool.cli.stats import summary_blocks
        from onnxtool.summary import summarize_model

        document["stats"] = summary = summarize_model(Path(report.output))
        blocks += summary_blocks(summary, "Exported ONNX model summary")
    if optimized is not None:
        from onnxtool.cli.optimize import optimize_blocks

        document["optimize"] = optimized
        blocks += optimize_blocks(optimized, stats=stats)
        if second is not None:
            document["optimize_partner"] = second
            blocks += [Heading("The other encoder"), *optimize_blocks(second, stats=stats)]
    last = optimized or report
    emit(document, [*blocks, verdict(last.verification, last.output)], format_name)


def _export_all(options: ExportOptions) -> tuple[ExportReport, tuple[Variant, ...]]:
    from onnxtool.release.variants import export_variants

    exported = export_variants(options)
    return exported.export, exported.variants


def _optimize(report: ExportReport, options: ExportOptions) -> tuple[OptimizeReport, OptimizeReport | None]:
    """Optimize the exported file, and its partner if it has one."""
    from onnxtool.optimize.options import OptimizeOptions
    from onnxtool.optimize.run import optimize_model

    settings = OptimizeOptions(Path(report.output), force=options.force, verify=options.verify, sizes=options.sizes)
    optimized = optimize_model(settings)
    if report.partner is None:
        return optimized, None
    return optimized, optimize_model(replace(settings, model_path=Path(report.partner.output)))


def _with_optimized(plan: WritePlan, *, force: bool) -> WritePlan:
    """Add the optimized files of a plan's graphs to it.

    Raises:
        OutputExistsError: one is there and `force` is not set.
    """
    from onnxtool.export.preparation import partner_paths

    graphs = [Path(plan.files[0].path)]
    graphs += {*partner_paths(graphs[0])} & {Path(file.path) for file in plan.files}
    written = [graph.with_name(f"{graph.stem}-optimized.onnx") for graph in graphs]
    for path in written:
        check_writable(path, force=force)
    return plan._replace(files=(*plan.files, *planned_files(written)))


def export_blocks(report: ExportReport) -> list[Block]:
    """Describe an export: source and output, signature, and verification."""
    facts = [
        ("Exported", f"{report.source} ({report.architecture}, {report.model_type})"),
        ("Output", report.output),
        ("Tokenizer and config", f"{report.files}/"),
        ("Task", report.task),
        ("Head", report.head),
        ("Exporter", f"{report.exporter}, opset {report.opset}"),
        ("Time", ", ".join(f"{stage} {format_duration(ms)}" for stage, ms in report.duration_ms.items())),
    ]
    return [
        Facts(facts),
        Heading("Inputs and outputs"),
        Table(("", "name", "type"), [*_rows("input", report.inputs), *_rows("output", report.outputs)]),
        *(Note(note) for note in report.notes),
        *verification_blocks(report.verification),
        *size_blocks(report.sizes),
    ]


def variant_blocks(variants: Sequence[Variant]) -> list[Block]:
    """Describe the files in other precisions."""
    rows = [
        (
            name,
            variant.precision,
            format_bytes(variant.size_bytes),
            *map(_error, (variant.error, variant.max_abs_error)),
        )
        for variant in variants
        for name in variant.files
    ]
    figures = ("size", "1 - cosine", "max_abs_error")
    return [
        Heading("Files beside it, compared with it"),
        Table(("file", "precision", *figures), rows, frozenset(figures)),
    ]


def _error(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2g}"


def _rows(kind: str, tensors: Sequence[TensorInfo]) -> list[tuple[str, str, str]]:
    return [(kind, tensor.name, format_tensor(tensor)) for tensor in tensors]
