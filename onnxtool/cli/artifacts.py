"""`onnxtool artifacts`: file or checkpoint to what a training needs."""

from __future__ import annotations

from pathlib import Path

import click

from onnxtool.cli.options import NameChoice, PathType, output_options, progress, report_options
from onnxtool.cli.render import Block, Facts, Heading, Note, Table, emit, format_bytes, format_duration, format_tensor
from onnxtool.export.tasks import TASK_NAMES
from onnxtool.training.artifacts.forward_export import ForwardOptions
from onnxtool.training.artifacts.preparation import LOSS_NAMES, OPTIMIZER_NAMES, PreparationOptions, prepare_training
from onnxtool.training.artifacts.report import ArtifactReport
from onnxtool.training.artifacts.verification import ArtifactVerification


@click.command(
    epilog="Example: onnxtool artifacts --model_name distilbert-base-uncased --loss CrossEntropyLoss "
    "--freeze 'distilbert.embeddings.*'",
)
@click.option("--model_path", type=PathType(), help="A forward model, an ONNX file.")
@click.option("--model_name", metavar="ID_OR_DIR", help="In place of it an id on the hub, or a folder; it is exported.")
@click.option(
    "--task",
    type=NameChoice(("auto", *TASK_NAMES)),
    metavar="TASK",
    default="auto",
    show_default=True,
    help="What the checkpoint is for, as in onnxtool export.",
)
@click.option("--revision", help="Branch, tag or commit on the hub.")
@click.option("--trust_remote_code", is_flag=True, help="Let code in the checkpoint run.")
@click.option("--allow_missing_weights", is_flag=True, help="Initialize weights that the checkpoint does not have.")
@click.option("--allow_pickle", is_flag=True, help="Load weights from a pickle where there are no safetensors.")
@click.option(
    "--train",
    multiple=True,
    metavar="PATTERN",
    help="Parameters to train, by name or as *.bias; repeatable. Without it, all that the loss depends on.",
)
@click.option("--freeze", multiple=True, metavar="PATTERN", help="Parameters to freeze; repeatable.")
@click.option(
    "--loss",
    type=click.Choice(LOSS_NAMES),
    default="CrossEntropyLoss",
    show_default=True,
    help="On top of the model; none takes its first output as the loss.",
)
@click.option(
    "--loss_input",
    multiple=True,
    metavar="NAME",
    help="The value that the loss is built on; without it, the logits of a checkpoint, or the only output of a file.",
)
@click.option(
    "--class_axis",
    type=click.IntRange(-1, 1),
    help="The axis of the classes, 1 or -1; without it, 1 of a file and the last of a checkpoint.",
)
@click.option(
    "--ignore_index",
    type=int,
    help="Labels of this value do not count; without it, none of a file and -100 of a checkpoint.",
)
@click.option(
    "--shift_labels/--no_shift_labels",
    default=None,
    help="Whether the scores at a token are for the label of the next one; without it, as transformers does: for "
    "checkpoints of language models that write on.",
)
@click.option(
    "--verify/--no_verify",
    default=True,
    show_default=True,
    help="Compare loss and gradients of a checkpoint's artifacts with PyTorch.",
)
@click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZER_NAMES),
    default="AdamW",
    show_default=True,
    help="Whose model is written.",
)
@click.option(
    "--weight_decay",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Of the optimizer.",
)
@click.option(
    "--max_grad_norm",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Scale gradients down to this norm, all together.",
)
@click.option(
    "--additional_output", multiple=True, metavar="NAME", help="A value to give besides the loss; repeatable."
)
@click.option("--prefix", default="", help="Before the name of each file.")
@click.option("--nominal_checkpoint", is_flag=True, help="Write a checkpoint without values as well.")
@click.option("--recompute", is_flag=True, help="Recompute activations for the gradients: less memory, more time.")
@click.option("--ort_format", is_flag=True, help="Write .ort files as well.")
@output_options("The folder; without it, NAME-training beside the file, or models/NAME-training.")
@report_options
def command(
    model_path: Path | None,
    model_name: str | None,
    task: str,
    revision: str | None,
    trust_remote_code: bool,
    allow_missing_weights: bool,
    allow_pickle: bool,
    train: tuple[str, ...],
    freeze: tuple[str, ...],
    loss: str,
    loss_input: tuple[str, ...],
    class_axis: int | None,
    ignore_index: int | None,
    shift_labels: bool | None,
    verify: bool,
    optimizer: str,
    weight_decay: float,
    max_grad_norm: float | None,
    additional_output: tuple[str, ...],
    prefix: str,
    nominal_checkpoint: bool,
    recompute: bool,
    ort_format: bool,
    output: Path | None,
    force: bool,
    format_name: str,
    quiet: bool,
) -> None:
    """Make the training, eval and optimizer models and the checkpoint that on-device training needs.

    They consist of standard operators only, so that any onnxruntime from 1.17 on trains with them: on CPU and CUDA, on
    phones and in browsers.
    """
    if (model_path is None) == (model_name is None):
        raise click.UsageError("pass one of --model_path and --model_name")
    if class_axis == 0:
        raise click.UsageError("--class_axis is 1 or -1; the first axis is that of the samples")
    forward = None
    if model_name is not None:
        forward = ForwardOptions(model_name, task, revision, trust_remote_code, allow_missing_weights, allow_pickle)
    options = PreparationOptions(
        model_path=model_path,
        forward=forward,
        train=train or ("*",),
        freeze=freeze,
        loss=loss,
        loss_inputs=loss_input,
        class_axis=class_axis,
        ignore_index=ignore_index,
        shift_labels=shift_labels,
        verify=verify,
        optimizer=optimizer,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        additional_outputs=additional_output,
        output=output,
        prefix=prefix,
        nominal_checkpoint=nominal_checkpoint,
        recompute=recompute,
        ort_format=ort_format,
        force=force,
    )
    with progress(quiet=quiet) as on_progress:
        report = prepare_training(options, on_progress)
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
    """Describe how far one step of the written files is from PyTorch."""
    if proof is None:
        return []
    facts = [
        ("Verified against", f"{proof.reference} in PyTorch, one step from the written files"),
        ("Loss", f"{proof.loss:.6g}, PyTorch {proof.reference_loss:.6g}, relative difference {proof.loss_error:.1e}"),
        ("Loss of the eval model", f"relative difference {proof.eval_loss_error:.1e}"),
        (
            f"Gradients of {proof.num_gradients} parameters",
            f"largest relative difference {proof.gradient_error:.1e} ({proof.worst_parameter})",
        ),
        ("Allowed", f"{proof.tolerance:g} each"),
    ]
    if proof.own_loss is not None:
        facts.insert(3, ("Loss of transformers itself", f"relative difference {proof.own_loss_error:.1e}"))
    return [Heading("Verification"), Facts(facts)]
