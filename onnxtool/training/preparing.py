"""From a model file or a checkpoint to artifacts in one call: what `onnxtool artifacts` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxtool.errors import ArtifactError
from onnxtool.training import onnxblock
from onnxtool.training.artifacts import LOSSES, ArtifactOptions, ArtifactReport, LossType, make_artifacts
from onnxtool.training.forward_export import ForwardOptions
from onnxtool.training.label_rows import IGNORE_INDEX

NONE = "none"
LOSS_NAMES = (*(kind.name for kind in LossType), NONE)
OPTIMIZERS: Mapping[str, type[onnxblock.optim.Optimizer]] = {"AdamW": onnxblock.optim.AdamW, "SGD": onnxblock.optim.SGD}
OPTIMIZER_NAMES = (*OPTIMIZERS, NONE)


@dataclass(frozen=True)
class PreparationOptions:
    """What to make artifacts of, by the words of the command line.

    Attributes:
        model_path: an ONNX file; this or `forward`.
        forward: a checkpoint.
        train: names or patterns of parameters to train.
        freeze: names or patterns of parameters to freeze.
        loss: one of LOSS_NAMES.
        loss_inputs: values that the loss is built on.
        class_axis: that of a cross entropy; None for 1 of a file, and for the last of a checkpoint.
        ignore_index: of a cross entropy; None for none of a file, and for -100 of a checkpoint.
        optimizer: one of OPTIMIZER_NAMES.
        weight_decay: of the optimizer.
        max_grad_norm: gradients of a larger norm are scaled down to it.
        additional_outputs: values that the models give besides the loss.
        output: the folder; None for `models/NAME-training`.
    """

    model_path: Path | None = None
    forward: ForwardOptions | None = None
    train: tuple[str, ...] = ("*",)
    freeze: tuple[str, ...] = ()
    loss: str = "CrossEntropyLoss"
    loss_inputs: tuple[str, ...] = ()
    class_axis: int | None = None
    ignore_index: int | None = None
    optimizer: str = "AdamW"
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    additional_outputs: tuple[str, ...] = ()
    output: Path | None = None
    prefix: str = ""
    nominal_checkpoint: bool = False
    ort_format: bool = False
    force: bool = False


@dataclass(frozen=True)
class _Source:
    """The forward model, and what is known of it where it comes from a checkpoint."""

    path: Path
    parameters: tuple[str, ...] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()


def prepare_training(
    options: PreparationOptions, on_progress: Callable[[str], None] = lambda _stage: None
) -> ArtifactReport:
    """Make the artifacts of a model file, or of a checkpoint that is exported for it.

    Raises:
        OnnxtoolError: of the export, or of `make_artifacts`.
    """
    import tempfile

    from onnxtool.training.forward_export import export_forward

    if (options.model_path is None) == (options.forward is None):
        raise ArtifactError("one model is expected", "pass --model_path or --model_name")
    if options.model_path is not None:
        return _make(options, _Source(options.model_path), on_progress)
    assert options.forward is not None  # noqa: S101  for type checkers; told apart above
    with tempfile.TemporaryDirectory() as folder:
        forward = export_forward(options.forward, Path(folder), on_progress)
        source = _Source(forward.path, forward.parameters, forward.aliases, forward.outputs)
        return _make(options, source, on_progress)


def _make(options: PreparationOptions, source: _Source, on_progress: Callable[[str], None]) -> ArtifactReport:
    loss_inputs = options.loss_inputs or source.outputs[:1]
    return make_artifacts(
        ArtifactOptions(
            model=source.path,
            requires_grad=options.train,
            frozen_params=options.freeze,
            loss=_loss(options, source),
            optimizer=_optimizer(options),
            artifact_directory=_folder(options),
            prefix=options.prefix,
            ort_format=options.ort_format,
            additional_output_names=options.additional_outputs,
            nominal_checkpoint=options.nominal_checkpoint,
            loss_input_names=loss_inputs or None,
            aliases=source.aliases,
            parameters=source.parameters,
            force=options.force,
        ),
        on_progress,
    )


def _folder(options: PreparationOptions) -> Path:
    if options.output is not None:
        return options.output
    if options.model_path is not None:
        return options.model_path.with_name(f"{options.model_path.stem}-training")
    name = "" if options.forward is None else Path(options.forward.model_name).name
    return Path("models") / f"{name}-training"


def _loss(options: PreparationOptions, source: _Source) -> LossType | onnxblock.Block | None:
    if options.loss == NONE:
        return None
    kind = LossType[options.loss]
    if kind is not LossType.CrossEntropyLoss:
        if options.class_axis is not None or options.ignore_index is not None:
            raise ArtifactError(
                f"{kind.name} has no classes, and --class_axis or --ignore_index was passed", "leave them out"
            )
        return LOSSES[kind]()
    is_checkpoint = source.parameters is not None
    ignored = options.ignore_index if options.ignore_index is not None else IGNORE_INDEX if is_checkpoint else None
    axis = options.class_axis or (-1 if is_checkpoint else 1)
    return onnxblock.loss.CrossEntropyLoss(ignore_index=ignored, axis=axis)


def _optimizer(options: PreparationOptions) -> onnxblock.optim.Optimizer | None:
    if options.optimizer == NONE:
        return None
    clip = None if options.max_grad_norm is None else onnxblock.optim.ClipGradNorm(options.max_grad_norm)
    if options.optimizer == "SGD":
        return onnxblock.optim.SGD(clip_grad=clip, weight_decay=options.weight_decay)
    return onnxblock.optim.AdamW(clip_grad=clip, weight_decay=options.weight_decay)
