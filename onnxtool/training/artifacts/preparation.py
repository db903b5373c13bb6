"""Make artifacts from a model file, or export a checkpoint first: the implementation of `onnxtool artifacts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from onnxtool.checkpoint.folder import path_parts
from onnxtool.errors import ArtifactError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.model_file import ModelFile, ModelPath, scratch_folder
from onnxtool.reports import WritePlan
from onnxtool.runtime.probation import check_harmless
from onnxtool.training import onnxblock
from onnxtool.training.artifacts.differences import verify_file
from onnxtool.training.artifacts.forward_export import Forward, export_forward, source_of
from onnxtool.training.artifacts.generation import (
    LOSSES,
    ArtifactOptions,
    ArtifactReport,
    check_prefix,
    make_artifacts,
    plan_artifacts,
)
from onnxtool.training.artifacts.verification import (
    ArtifactVerification,
    LossSetting,
    OptimizerSetting,
    verify_artifacts,
)
from onnxtool.training.graphs.rows import IGNORE_INDEX
from onnxtool.training.options import NONE, LossType, PreparationOptions, TrainingTarget


def prepare_training(options: PreparationOptions) -> ArtifactReport:
    """Make artifacts from a model file or a checkpoint.

    Raises:
        OnnxtoolError: the export or `make_artifacts` failed.
    """
    if (options.model_path is None) == (options.forward is None):
        raise ArtifactError("one model is expected", "pass --model_path or --model_name")
    check_prefix(options.prefix)
    if options.forward is None:
        return make_artifacts(_file_options(options, ModelFile.open(options.model_path or Path())))
    with scratch_folder(_folder(options) / f"{options.prefix}training_model.onnx") as folder:
        forward = export_forward(options.forward, folder)
        return make_checkpoint_artifacts(options, forward)


def plan_training(options: PreparationOptions) -> WritePlan:
    """Check the options and the model file or checkpoint configuration, and describe what would be written.

    Raises:
        OnnxtoolError: as `prepare_training`, as far as it can be known without the weights.
    """
    forward = options.forward
    file: ModelPath = Path()
    if forward is None:
        file = ModelFile.open(options.model_path or Path())
        check_harmless(file)
    else:
        _ = Checkpoint.open(source_of(forward), task=forward.task).weight_files
    return plan_artifacts(_file_options(options, file))


def _file_options(options: PreparationOptions, file: ModelPath) -> ArtifactOptions:
    setting = LossSetting(options.loss, "", options.class_axis or 1, options.ignore_index, bool(options.shift_labels))
    made = _artifact_options(options, setting, file, options.loss_inputs)

    def verify(folder: Path) -> ArtifactVerification | None:
        opened = ModelFile.open(file)
        outputs = options.loss_inputs or [value.name for value in opened.structure.outputs]
        return verify_file(
            folder, options.prefix, opened, replace(setting, output=outputs[0]), _optimizer_setting(options)
        )

    return replace(made, verify=verify if options.verify and options.loss != NONE and options.lora is None else None)


def _optimizer_setting(options: PreparationOptions) -> OptimizerSetting | None:
    if options.optimizer == NONE:
        return None
    return OptimizerSetting(options.optimizer, options.weight_decay, options.max_grad_norm)


def make_checkpoint_artifacts(options: PreparationOptions, forward: Forward) -> ArtifactReport:
    """Make artifacts from an exported checkpoint, and verify them.

    Raises:
        OnnxtoolError: as `make_artifacts`.
    """
    loss_inputs = options.loss_inputs or forward.outputs[:1]
    ignored = IGNORE_INDEX if options.ignore_index is None else options.ignore_index
    shift = forward.shifts_labels if options.shift_labels is None else options.shift_labels
    is_entropy = options.loss == LossType.CrossEntropyLoss.name
    setting = LossSetting(options.loss, loss_inputs[0], options.class_axis or -1, ignored, shift and is_entropy)
    is_verifiable = options.loss != NONE and len(loss_inputs) == 1 and setting.output in forward.outputs

    def verify(folder: Path) -> ArtifactVerification | None:
        return verify_artifacts(folder, options.prefix, forward.reference, setting, _optimizer_setting(options))

    made = replace(
        _artifact_options(options, setting, forward.path, loss_inputs),
        aliases=forward.aliases,
        parameters=forward.parameters,
        verify=verify if options.verify and is_verifiable else None,
    )
    report = make_artifacts(made)
    return replace(report, notes=(*report.notes, *_notes(report, setting)))


def _notes(report: ArtifactReport, setting: LossSetting) -> Iterator[str]:
    """Explain differences from training with transformers."""
    if setting.shift:
        yield (
            "labels are shifted as in transformers: the logits at a token are for the label of the next one, so pass "
            "the input_ids as labels (--no_shift_labels turns this off)"
        )
    found = report.proof
    if found is not None and found.own_loss is not None and found.own_loss_error > found.tolerance:
        yield (
            f"{found.reference} itself computes another loss for the same labels, with a relative difference of "
            f"{found.own_loss_error:.2g}: these artifacts train {report.loss} on {setting.output}"
        )


def _artifact_options(
    options: PreparationOptions, setting: LossSetting, model: ModelPath, loss_inputs: Sequence[str]
) -> ArtifactOptions:
    """Return the options that apply to both files and checkpoints."""
    return ArtifactOptions(
        model=model,
        loss_input_names=loss_inputs or None,
        requires_grad=options.train or (() if options.lora is not None else ("*",)),
        lora=options.lora,
        frozen_params=options.freeze,
        loss=_loss(options, setting),
        optimizer=_optimizer(options),
        artifact_directory=_folder(options),
        prefix=options.prefix,
        ort_format=options.ort_format,
        additional_output_names=options.additional_outputs,
        nominal_checkpoint=options.nominal_checkpoint,
        recompute=options.recompute,
        require_all=options.require_all,
        target=None if options.target is None else TrainingTarget(options.target),
        force=options.force,
    )


def _folder(options: PreparationOptions) -> Path:
    if options.output is not None:
        return options.output
    if options.model_path is not None:
        return options.model_path.with_name(f"{options.model_path.stem}-training")
    name = "" if options.forward is None else path_parts(options.forward.model_name)[-1]
    return Path("models") / f"{name}-training"


def _loss(options: PreparationOptions, setting: LossSetting) -> LossType | onnxblock.Block | None:
    if options.loss == LossType.CrossEntropyLoss.name:
        return onnxblock.loss.CrossEntropyLoss(
            ignore_index=setting.ignore_index, axis=setting.class_axis, shift=setting.shift
        )
    if options.class_axis is not None or options.ignore_index is not None or options.shift_labels:
        raise ArtifactError(
            f"{options.loss} has no classes, and --class_axis, --ignore_index or --shift_labels was passed",
            "leave them out",
        )
    return None if options.loss == NONE else LOSSES[LossType[options.loss]]()


def _optimizer(options: PreparationOptions) -> onnxblock.optim.Optimizer | None:
    if options.optimizer == NONE:
        if options.weight_decay or options.max_grad_norm:
            raise ArtifactError("--weight_decay or --max_grad_norm was passed, and no optimizer is written", "name one")
        return None
    clip = None if options.max_grad_norm is None else onnxblock.optim.ClipGradNorm(options.max_grad_norm)
    if options.optimizer == "SGD":
        return onnxblock.optim.SGD(clip_grad=clip, weight_decay=options.weight_decay)
    return onnxblock.optim.AdamW(clip_grad=clip, weight_decay=options.weight_decay)
