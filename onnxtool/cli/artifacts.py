"""`onnxtool artifacts`: turn a file or checkpoint into training artifacts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

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
from onnxtool.training.options import ForwardOptions, PreparationOptions

if TYPE_CHECKING:
    from onnxtool.training.artifacts.report import ArtifactReport
    from onnxtool.training.artifacts.verification import ArtifactVerification


@click.command(
    epilog="Example: onnxtool artifacts --model_name distilbert-base-uncased --loss CrossEntropyLoss "
    "--freeze 'distilbert.embeddings.*'",
)
@model_argument("model_path")
@derived_options(options=PreparationOptions, forward=ForwardOptions)
@dry_run_option
@report_options
def command(
    options: PreparationOptions,
    forward: Callable[[], ForwardOptions] | None,
    *,
    dry_run: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Make the training, eval and optimizer models and the checkpoint that on-device training needs.

    They use standard operators only, so any onnxruntime from 1.17 on can train with them: on CPU and CUDA, on phones
    and in browsers.
    """
    if (options.model_path is None) == (forward is None):
        raise click.UsageError("pass one of --model_path and --model_name")
    source = click.get_current_context().get_parameter_source
    for field in fields(ForwardOptions):
        if forward is None and source(field.name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{field.name} applies to a checkpoint, which --model_name names")
    options = replace(options, forward=forward and forward())
    from onnxtool.training.artifacts.preparation import plan_training, prepare_training

    if dry_run:
        emit_plan(plan_training(options), format_name)
        return
    with progress(quiet=quiet):
        report = prepare_training(options)
    emit(report, artifact_blocks(report), format_name)


def artifact_blocks(report: ArtifactReport) -> list[Block]:
    """Describe the artifacts: what is trained, the files, and the inputs and outputs of a step."""
    facts = [
        ("Artifacts", f"{report.directory}/"),
        ("Loss", report.loss),
        ("Optimizer", report.optimizer or "none"),
        ("Trained", f"{len(report.trained)} parameters, {report.num_trained} numbers"),
        ("Frozen", f"{len(report.frozen)} parameters, {report.num_frozen} numbers"),
        ("Opset", str(report.opset)),
        ("Time", ", ".join(f"{stage} {format_duration(ms)}" for stage, ms in report.duration_ms.items())),
    ]
    rows = [("input", value.name, format_tensor(value)) for value in report.inputs]
    rows += [("output", value.name, format_tensor(value)) for value in report.outputs]
    files = [(Path(file.path).name, format_bytes(file.size_bytes)) for file in report.files]
    return [
        Facts(facts),
        Heading("Files"),
        Table(("file", "size"), files, frozenset({"size"})),
        Heading("Inputs and outputs of a training step"),
        Table(("", "name", "type"), rows),
        *_proof_blocks(report.proof),
        *(Note(note) for note in report.notes),
    ]


def _proof_blocks(proof: ArtifactVerification | None) -> list[Block]:
    """Describe how far three training steps from the written files differ from PyTorch."""
    if proof is None:
        needs = "pass --model_name or a float file of at most 2 GB, with a --loss and without --no_verify"
        return [Note(f"loss and gradients were not verified: {needs}")]
    facts = [
        ("Verified against", f"{proof.reference}, three steps from the written files"),
        ("Loss", f"{proof.loss:.6g}, reference {proof.reference_loss:.6g}, relative difference {proof.loss_error:.1e}"),
        ("Loss of the eval model", f"relative difference {proof.eval_loss_error:.1e}"),
        (
            f"Gradients of {proof.num_gradients} parameters",
            f"largest relative difference {proof.gradient_error:.1e} ({proof.worst_parameter})",
        ),
        ("Changes by the optimizer", f"largest relative difference {proof.update_error:.1e}"),
        ("Allowed", f"{proof.tolerance:g} each"),
    ]
    if proof.own_loss is not None:
        facts.insert(3, ("Loss of transformers itself", f"relative difference {proof.own_loss_error:.1e}"))
    return [Heading("Verification"), Facts(facts)]
