"""`onnxtool optimize`: file to better file."""

from __future__ import annotations

from pathlib import Path

import click

from onnxtool.cli.options import PathType, output_options, progress, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration
from onnxtool.cli.stats import summary_blocks
from onnxtool.cli.verification import verification_blocks
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.optimize.presets import PRECISION_NAMES, PROVIDER_NAMES
from onnxtool.reports import FusionCount, OptimizeReport, Quantization


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
    help="Of weights and arithmetic; inputs and outputs keep their types.",
)
@click.option("--model_type", help="Architecture, as transformers calls it; without it, the metadata's.")
@click.option("--num_heads", type=click.IntRange(min=1), help="Attention heads; without it, the metadata's.")
@click.option("--hidden_size", type=click.IntRange(min=1), help="Hidden width; without it, the metadata's.")
@click.option("--require_fusion", is_flag=True, help="Fail unless every attention is fused.")
@click.option(
    "--max_error",
    type=click.FloatRange(0, 1),
    metavar="X",
    help="The most that 1 - cosine of any output may be. In int8 layers stay in float32 until it holds on the texts of "
    "the calibration; without it, 0.01 there.",
)
@click.option(
    "--calibration",
    type=PathType(),
    metavar="FILE",
    help="Texts for int8, one a line or JSON Lines with contents; without it, onnxtool's own.",
)
@click.option("--verify/--no_verify", default=True, show_default=True, help="Compare the result with the input.")
@click.option("--stats", is_flag=True, help="Print the summaries of both graphs.")
@output_options("The optimized file; without it, NAME-optimized.onnx beside the input.")
@report_options
def command(
    model_path: Path,
    provider: str,
    precision: str,
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
        *_quantized(report.quantization),
        *verification_blocks(report.verification),
    ]
    return blocks


def _fusion(count: FusionCount) -> str:
    expected = "" if count.expected is None else f" of {count.expected}"
    return f"{count.kind} {count.found}{expected}"


def _quantized(quantization: Quantization | None) -> list[Block]:
    """Describe what is in int8, how far it is off, and which layers could not afford it."""
    if quantization is None:
        return []
    texts = f"{quantization.num_texts} texts" if quantization.num_texts else "random ids"
    in_int8 = quantization.num_layers - len(quantization.kept)
    blocks: list[Block] = [
        Heading("Quantization"),
        Facts(
            [
                ("In int8", f"{in_int8} of {quantization.num_layers} layers, {quantization.num_embeddings} embeddings"),
                (
                    "Error",
                    f"1 - cosine {quantization.error:.2g} at most, {quantization.mean_error:.2g} on average, {texts}",
                ),
            ]
        ),
    ]
    if quantization.kept:
        rows = [(layer.name, f"{layer.error:.2g}") for layer in quantization.kept]
        blocks.append(Table(("stays in float32", "its error in int8"), rows, frozenset({"its error in int8"})))
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
