"""`onnxtool export`: checkpoint to file."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import click

from onnxtool.checkpoint.tasks import TASK_NAMES
from onnxtool.cli.options import NameChoice, output_options, progress, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_duration, format_tensor
from onnxtool.cli.verification import verification_blocks
from onnxtool.export import DTYPES, ExportOptions, export_model
from onnxtool.export.heads.choice import HEAD_NAMES
from onnxtool.export.opsets import LOWEST_OPSET
from onnxtool.export.report import ExportReport
from onnxtool.export.targets import TARGET_NAMES, find_target
from onnxtool.export.tracing import EXPORTER_NAMES
from onnxtool.reports import TensorInfo


@click.command(
    epilog="Example: onnxtool export --model_name naver/splade-cocondenser-ensembledistil",
)
@click.option("--model_name", required=True, metavar="ID_OR_DIR", help="An id on the hub, or a folder.")
@click.option(
    "--task",
    type=NameChoice(("auto", *TASK_NAMES)),
    metavar="TASK",
    default="auto",
    show_default=True,
    help=f"What the model is for: {', '.join(TASK_NAMES)}. auto goes by config.json, modules.json and card.",
)
@click.option(
    "--head",
    type=click.Choice(HEAD_NAMES),
    default="auto",
    show_default=True,
    help="What the graph computes on top: nothing (none, logits) or a vector a text; auto is as the model was trained.",
)
@click.option(
    "--target",
    type=NameChoice(TARGET_NAMES),
    default="plain",
    show_default=True,
    help="What will run the model: names, layout and files are as it expects them.",
)
@click.option("--keep_raw", is_flag=True, help="Keep the output that the head stands on beside the head's.")
@click.option(
    "--exporter",
    type=click.Choice(EXPORTER_NAMES),
    default="auto",
    show_default=True,
    help="How to trace; auto takes the first that verifies.",
)
@click.option("--opset", type=click.IntRange(min=LOWEST_OPSET), help="ONNX opset; without it, the exporter's own.")
@click.option("--text", help="A text to trace the model on.")
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--trust_remote_code", is_flag=True, help="Let code in the checkpoint run.")
@click.option("--allow_missing_weights", is_flag=True, help="Initialize weights that the checkpoint does not have.")
@click.option("--allow_pickle", is_flag=True, help="Load weights from a pickle where there are no safetensors.")
@click.option("--require_dynamic", is_flag=True, help="Fail rather than fix an axis that the model leaves open.")
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), default="float32", show_default=True, help="Of the weights.")
@click.option("--device", default="cpu", show_default=True, help="Where PyTorch runs the model, e.g. cuda.")
@click.option("--verify/--no_verify", default=True, show_default=True, help="Compare the file with PyTorch.")
@click.option("--atol", type=click.FloatRange(min=0), help="Allowed absolute error, in place of the dtype's.")
@click.option("--rtol", type=click.FloatRange(min=0), help="Allowed error relative to the largest value of an output.")
@click.option("--optimize", is_flag=True, help="Run `onnxtool optimize` on the file straight after.")
@click.option("--stats", is_flag=True, help="Print the summary of the graph as well.")
@output_options("The ONNX file, or the folder for a --target; without it, models/NAME.onnx, or models/NAME/.")
@report_options
def command(
    model_name: str,
    task: str,
    head: str,
    target: str,
    keep_raw: bool,
    exporter: str,
    opset: int | None,
    text: str | None,
    revision: str | None,
    trust_remote_code: bool,
    allow_missing_weights: bool,
    allow_pickle: bool,
    require_dynamic: bool,
    dtype: str,
    device: str,
    verify: bool,
    atol: float | None,
    rtol: float | None,
    optimize: bool,
    stats: bool,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Export a Hugging Face checkpoint to an ONNX file, with its tokenizer and configuration beside it.

    The architecture is the one that config.json names, the outputs and dynamic axes are found by running it, and the
    file is compared with PyTorch on several shapes, masks and texts before it is kept.
    """
    if optimize and find_target(target).reads_folder:
        raise click.UsageError(
            f"--optimize would leave a second graph where {target} reads one; run onnxtool optimize with --output"
        )
    options = ExportOptions(
        model_name=model_name,
        output=output,
        task=task,
        head=head,
        target=target,
        keep_raw=keep_raw,
        exporter=exporter,
        opset=opset,
        text=text,
        revision=revision,
        trust_remote_code=trust_remote_code,
        allow_missing_weights=allow_missing_weights,
        allow_pickle=allow_pickle,
        require_dynamic=require_dynamic,
        dtype=dtype,
        device=device,
        verify=verify,
        atol=atol,
        rtol=rtol,
        force=force,
    )
    # PyTorch's threads spin while they wait: with another process on the cores, verifying takes three times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported
    # This process makes one file and ends. The library collects where a model goes; in between the collector would look
    # at torch's millions of objects again and again, and at the end once more.
    gc.disable()
    atexit.register(gc.freeze)
    optimized = None
    with progress(quiet=quiet) as on_progress:
        report = export_model(options, on_progress=on_progress)
        if optimize:
            from onnxtool.optimize import OptimizeOptions, optimize_model

            optimized = optimize_model(
                OptimizeOptions(Path(report.output), force=force, verify=verify), on_progress=on_progress
            )
    blocks = export_blocks(report)
    document: dict[str, object] = {field.name: getattr(report, field.name) for field in fields(report)}
    if stats:
        from onnxtool.cli.stats import summary_blocks
        from onnxtool.summary import summarize_model

        document["stats"] = summary = summarize_model(Path(report.output))
        blocks += summary_blocks(summary, "Exported ONNX model summary")
    if optimized is not None:
        from onnxtool.cli.optimize import optimize_blocks

        document["optimize"] = optimized
        blocks += optimize_blocks(optimized, stats=stats)
    emit(document, blocks, format_name)


def export_blocks(report: ExportReport) -> list[Block]:
    """Describe an export: what was made of what, its signature, and its proof."""
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
    ]


def _rows(kind: str, tensors: Sequence[TensorInfo]) -> list[tuple[str, str, str]]:
    return [(kind, tensor.name, format_tensor(tensor)) for tensor in tensors]
