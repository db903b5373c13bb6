"""Make artifacts from a model file or a checkpoint: the implementation of `onnxtool artifacts`.

A checkpoint is first exported for training: with dropout and original parameter names, neither folded nor transposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtool.autodiff.rules.tensor import PADDING_INDEX
from onnxtool.checkpoint.folder import path_parts
from onnxtool.errors import ArtifactError, CheckpointError, ExportError
from onnxtool.export.checkpoint import Checkpoint, task_of_architecture
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.signature import detect_signature, to_tensors
from onnxtool.export.source import Source
from onnxtool.export.tracing import guarded, operators_apart
from onnxtool.model_file import ModelFile, ModelPath, Staging, save_model, scratch_folder
from onnxtool.progress import tell
from onnxtool.reports import WritePlan
from onnxtool.runtime.probation import check_harmless
from onnxtool.training import onnxblock
from onnxtool.training.artifacts.differences import verify_file
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
    TorchModel,
    verify_artifacts,
)
from onnxtool.training.graphs.rows import IGNORE_INDEX
from onnxtool.training.options import NONE, ForwardOptions, LossType, PreparationOptions, TrainingTarget


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
    artifact_options = _artifact_options(options, setting, file, options.loss_inputs)

    def verify(folder: Path) -> ArtifactVerification | None:
        opened = ModelFile.open(file)
        outputs = options.loss_inputs or [value.name for value in opened.structure.outputs]
        return verify_file(
            folder, options.prefix, opened, replace(setting, output=outputs[0]), _optimizer_setting(options)
        )

    return replace(artifact_options, verify=verify if options.verify and options.loss != NONE else None)


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

    artifact_options = replace(
        _artifact_options(options, setting, forward.path, loss_inputs),
        aliases=forward.aliases,
        parameters=forward.parameters,
        verify=verify if options.verify and is_verifiable else None,
    )
    report = make_artifacts(artifact_options)
    return replace(report, notes=(*report.notes, *_notes(report, setting)))


def _notes(report: ArtifactReport, setting: LossSetting) -> Iterator[str]:
    """Explain differences from training with transformers."""
    if setting.shift:
        yield (
            "labels are shifted as in transformers: the logits at a token are for the label of the next one, so pass "
            "the input_ids as labels (--no_shift_labels turns this off)"
        )
    proof = report.proof
    if proof is not None and proof.own_loss is not None and proof.own_loss_error > proof.tolerance:
        yield (
            f"{proof.reference} itself computes another loss for the same labels, with a relative difference of "
            f"{proof.own_loss_error:.2g}: these artifacts train {report.loss} on {setting.output}"
        )


def _artifact_options(
    options: PreparationOptions, setting: LossSetting, model: ModelPath, loss_inputs: Sequence[str]
) -> ArtifactOptions:
    """Return the options that apply to both files and checkpoints."""
    return ArtifactOptions(
        model=model,
        loss_input_names=loss_inputs or None,
        requires_grad=options.train or ("*",),
        frozen_params=options.freeze,
        loss=_loss(options, setting),
        optimizer=_optimizer(options),
        artifact_directory=_folder(options),
        prefix=options.prefix,
        ort_format=options.ort_format,
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


_OPSET = 20
_CAUSAL_TASK = "text-generation"


@dataclass(frozen=True)
class Forward:
    """A checkpoint exported as a forward model.

    Attributes:
        path: the ONNX file.
        parameters: parameter names, in model order.
        aliases: other names of tied parameters, mapped to the name in the file.
        outputs: output names, the logits first if there are any.
        reference: the PyTorch model.
        shifts_labels: whether the logits at a token are for the label of the next one.
    """

    path: Path
    parameters: tuple[str, ...]
    aliases: Mapping[str, str]
    outputs: tuple[str, ...]
    reference: TorchModel
    shifts_labels: bool


def source_of(options: ForwardOptions) -> Source:
    """Find the checkpoint.

    Raises:
        CheckpointError: the path does not exist.
    """
    return Source.find(
        options.model_name,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
    )


def export_forward(options: ForwardOptions, folder: Path) -> Forward:
    """Trace the model in training mode into a file in `folder`.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: the model cannot be traced.
    """
    source = source_of(options)
    checkpoint = Checkpoint.open(source, task=options.task)
    tell(f"loading {options.model_name}")
    # Only eager attention, including its dropout, consists of operators with gradients.
    model = checkpoint.load_model(
        dtype="float32",
        device="cpu",
        attention="eager",
        allow_missing_weights=options.allow_missing_weights,
        allow_unused_weights=options.allow_unused_weights,
    )
    if checkpoint.quantizer:
        raise CheckpointError(
            f"{options.model_name} is quantized by {checkpoint.quantizer}, and codes are not trained",
            "pass the checkpoint that it was quantized from",
        )
    modality = find_modality(model, checkpoint, text=None)
    signature = detect_signature(model, modality)
    sample = to_tensors(model, modality.sample(signature.sizes))
    tell(f"tracing {type(model).__name__}")

    def trace() -> ir.Model:
        with operators_apart():
            return _trace(model.train(), sample, signature.inputs, tuple(signature.outputs))

    graph = guarded(
        trace,
        subject=f"{type(model).__name__} cannot be traced in training mode",
        exporter="dynamo",
        opset=None,
        hint="export a forward model yourself, and pass it with --model_path",
    )
    _name_axes(graph, signature.inputs, signature.outputs)
    names, aliases = _parameters(model, graph)
    _mark_padding(model, graph, aliases)
    path = save_model(graph, Staging(folder, folder / "forward.onnx", folder))
    outputs = sorted(signature.outputs, key=lambda name: name != "logits")
    shifts = task_of_architecture(checkpoint.config.model_type, checkpoint.architecture) == _CAUSAL_TASK
    return Forward(path, names, aliases, tuple(outputs), TorchModel(model, sample), shifts)


def _trace(model: Any, sample: Mapping[str, Any], inputs: Mapping[str, Any], outputs: tuple[str, ...]) -> ir.Model:
    """Trace without torch's optimizer, which renames parameters and merges equal ones such as zero biases."""
    import torch
    from torch.export import Dim

    shapes = tuple(
        {axis: Dim.DYNAMIC for axis, size in enumerate(inputs[name]) if isinstance(size, str)} for name in sample
    )

    class Named(torch.nn.Module):  # type: ignore[misc]  # torch is not followed by mypy
        """Returns only the signature's outputs, as a tuple."""

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            result = model(**dict(zip(sample, tensors, strict=True)))
            return (result,) if isinstance(result, torch.Tensor) else tuple(result[name] for name in outputs)

    named = Named()
    named.model = model
    program = torch.onnx.export(
        named,
        args=tuple(sample.values()),
        dynamo=True,
        optimize=False,
        opset_version=_OPSET,
        dynamic_shapes={"tensors": shapes},
        input_names=list(sample),
        output_names=list(outputs),
        verbose=False,
    )
    graph: ir.Model = program.model
    for name in list(graph.graph.initializers):
        if name.startswith("model."):
            graph.graph.initializers[name].name = name.removeprefix("model.")
    return graph


def _name_axes(graph: ir.Model, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Name dynamic axes in all shapes as in the signature."""
    names: dict[str | None, str] = {}
    shapes = {**inputs, **outputs}
    for value in (*graph.graph.inputs, *graph.graph.outputs):
        for old, new in zip(value.shape or (), shapes.get(str(value.name), ()), strict=False):
            if isinstance(new, str) and not isinstance(old, int):
                names.setdefault(old.value, new)
    values = [value for node in graph.graph.all_nodes() for value in node.outputs]
    for value in (*graph.graph.inputs, *values):
        if value.shape is not None:
            value.shape = ir.Shape(
                [size if isinstance(size, int) else names.get(size.value, size.value) for size in value.shape]
            )


def _mark_padding(model: Any, graph: ir.Model, aliases: Mapping[str, str]) -> None:
    """Record `padding_idx` on each embedding Gather; PyTorch does not train that row."""
    import torch

    for module_name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding) or module.padding_idx is None:
            continue
        name = f"{module_name}.weight"
        table = graph.graph.initializers.get(aliases.get(name, name))
        for usage in [] if table is None else table.uses():
            if usage.node.op_type == "Gather" and usage.idx == 0:
                usage.node.metadata_props[PADDING_INDEX] = str(module.padding_idx)


def _parameters(model: Any, graph: ir.Model) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names of initializers that are parameters, and the aliases of tied ones."""
    present = set(graph.graph.initializers)
    names: dict[int, str] = {}
    pairs = list(model.named_parameters(remove_duplicate=False))
    for name, parameter in pairs:
        if name in present:
            names.setdefault(id(parameter), name)
    if not names:
        raise ExportError("the traced graph has none of the parameters under their names", "pass --model_path")
    aliases = {
        name: names[id(parameter)]
        for name, parameter in pairs
        if id(parameter) in names and names[id(parameter)] != name
    }
    return tuple(names.values()), aliases
