"""`onnxtool optimize`: file to better file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from onnxtool.cli.options import PathType, output_options, progress, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration
from onnxtool.cli.stats import summary_blocks
from onnxtool.cli.verification import verification_blocks
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.optimize.presets import PRECISION_NAMES, PROVIDER_NAMES
from onnxtool.optimize.quantization.conversion import ACTIVATIONS
from onnxtool.optimize.report import Candidate, FusionCount, OptimizeReport, Quantization


@click.command(
    epilog="Example: onnxtool optimize --model_path models/splade-cocondenser-ensembledistil.onnx --stats",
)
@click.option("--model_path", type=PathType(), required=True, help="The ONNX file.")
@click.option(
    "--provider",
    type=click.Choice(PROVIDER_NAMES),
    default="cpu",
    show_default=True,
    help="What the model will run on; what helps one provider slows another down.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISION_NAMES),
    default="fp32",
    show_default=True,
    help="Of weights and arithmetic; inputs and outputs keep their types. int4: weights in blocks of 4 bits. auto: the "
    "fastest on this machine within --max_error.",
)
@click.option(
    "--activations",
    type=click.Choice(ACTIVATIONS),
    help="How activations of int8 get their ranges: in each run (dynamic, the default), or once and for all from the "
    "texts of the calibration (static), so that an answer does not depend on what else is in the batch.",
)
@click.option("--model_type", help="Architecture, as transformers calls it; without it, the metadata's.")
@click.option("--num_heads", type=click.IntRange(min=1), help="Attention heads; without it, the metadata's.")
@click.option("--hidden_size", type=click.IntRange(min=1), help="Hidden width; without it, the metadata's.")
@click.option("--require_fusion", is_flag=True, help="Fail unless every attention is fused.")
@click.option(
    "--max_error",
    type=click.FloatRange(0, 1),
    metavar="X",
    help="The most that 1 - cosine of any output may be. In int8 and int4 layers stay in higher precision until it "
    "holds on the texts of the calibration; without it, 0.01 there, and for auto.",
)
@click.option(
    "--calibration",
    type=PathType(),
    metavar="FILE",
    help="Texts for int8, int4 and auto, one a line or JSON Lines with contents; without it, onnxtool's own.",
)
@click.option("--verify/--no_verify", default=True, show_default=True, help="Compare the result with the input.")
@click.option("--stats", is_flag=True, help="Print the summaries of both graphs.")
@output_options("The optimized file; without it, NAME-optimized.onnx beside the input.")
@report_options
def command(
    model_path: Path,
    provider: str,
    precision: str,
    activations: str | None,
    model_type: str | None,
    num_heads: int | None,
    hidden_size: int | None,
    require_fusion: bool,
    max_error: float | None,
    calibration: Path | None,
    verify: bool,
    stats: bool,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Fuse an ONNX file's operators for an execution provider, and convert it to another precision.

    The passes run in a fixed order, each says what it changed, and the result is compared with the input on several
    shapes and masks before it is kept.
    """
    options = OptimizeOptions(
        model_path=model_path,
        output=output,
        provider=provider,
        precision=precision,
        activations=activations,
        model_type=model_type,
        num_heads=num_heads,
        hidden_size=hidden_size,
        require_fusion=require_fusion,
        max_error=max_error,
        calibration=calibration,
        verify=verify,
        force=force,
    )
    with progress(quiet=quiet) as on_progress:
        report = optimize_model(options, on_progress=on_progress)
    emit(report, optimize_blocks(report, stats=stats), format_name)


def optimize_blocks(report: OptimizeReport, *, stats: bool) -> list[Block]:
    """Describe an optimization: the summaries where asked for, what the passes did, and the proof."""
    blocks: list[Block] = []
    if stats:
        blocks += summary_blocks(report.before, "Original ONNX model summary")
        blocks += summary_blocks(report.after, "Optimized ONNX model summary")
    before, after = report.before, report.after
    facts = [
        ("Optimized", f"{before.path} for {report.provider} in {report.precision}"),
        ("Output", report.output),
        ("Nodes", f"{before.num_nodes} -> {after.num_nodes}"),
        ("Size", f"{format_bytes(before.size_bytes)} -> {format_bytes(after.size_bytes)}"),
        ("Fused", ", ".join(_fusion(count) for count in report.fusions)),
        ("Time", ", ".join(f"{stage} {format_duration(ms)}" for stage, ms in report.duration_ms.items())),
    ]
    rows = [(result.name, str(result.num_changes), format_duration(result.duration_ms)) for result in report.passes]
    blocks += [
        *([Heading("Optimization")] if stats else []),
        Facts(facts),
        Heading("Passes"),
        Table(("pass", "changes", "time"), rows, frozenset({"changes", "time"})),
        *(Note(f"{result.name}: {result.note}") for result in report.passes if result.note),
        *(_unfused(count) for count in report.fusions if count.expected is not None and count.found < count.expected),
        *_elsewhere(report),
        *_candidates(report.candidates),
        *_quantized(report.quantization),
        *verification_blocks(report.verification),
    ]
    return blocks


def _fusion(count: FusionCount) -> str:
    expected = "" if count.expected is None else f" of {count.expected}"
    return f"{count.kind} {count.found}{expected}"


def _candidates(candidates: Sequence[Candidate]) -> list[Block]:
    """Describe what was tried on this machine, and why not where it was not possible."""
    if not candidates:
        return []
    shapes = tuple(dict.fromkeys(shape for one in candidates for shape in one.latency_ms))
    rows = []
    for one in candidates:
        latencies = [f"{one.latency_ms[shape]:.4g} ms" if shape in one.latency_ms else "" for shape in shapes]
        size = "" if one.size_bytes is None else format_bytes(one.size_bytes)
        error = "" if one.error is None else f"{one.error:.2g}"
        verdict = "chosen" if one.chosen else one.reason
        rows.append((f"{one.precision} {one.activations}".strip(), *latencies, size, error, verdict))
    figures = (*shapes, "size", "error")
    return [
        Heading("Candidates on this machine"),
        Table(("precision", *figures, "verdict"), rows, frozenset(figures)),
    ]


def _quantized(quantization: Quantization | None) -> list[Block]:
    """Describe what is in fewer bits, how far it is off, and which layers could not afford it."""
    if quantization is None:
        return []
    precision, kept = quantization.precision, quantization.kept
    texts = f"{quantization.num_texts} texts" if quantization.num_texts else "random ids"
    layers = f"{quantization.num_layers - len(kept)} of {quantization.num_layers} layers"
    if quantization.activations:
        layers += f" with {quantization.activations} activations"
    embeddings = f"{quantization.num_embeddings} embeddings"
    if quantization.embedding_precision not in ("", precision):
        embeddings += f" in {quantization.embedding_precision}"
    error = f"1 - cosine {quantization.error:.2g} at most, {quantization.mean_error:.2g} on average, {texts}"
    blocks: list[Block] = [
        Heading("Quantization"),
        Facts([(f"In {precision}", f"{layers}, {embeddings}"), ("Error", error)]),
    ]
    if kept:
        columns = ("layer", "is kept in", f"its error in {precision}")
        rows = [(layer.name, layer.precision, f"{layer.error:.2g}") for layer in kept]
        blocks.append(Table(columns, rows, frozenset(columns[2:])))
    return [*blocks, Note(quantization.note)] if quantization.note else blocks


def _elsewhere(report: OptimizeReport) -> list[Note]:
    if report.verification is None or report.verification.provider == report.provider:
        return []
    return [
        Note(
            f"verified on {report.verification.provider}, not on {report.provider}: an overflow of half precision "
            "would not show"
        )
    ]


def _unfused(count: FusionCount) -> Note:
    return Note(f"{count.found} of {count.expected} {count.kind}s are fused; --require_fusion makes that an error")
