"""Export a checkpoint for training: with dropout and original parameter names, neither folded nor transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtool.autodiff.rules.tensor import PADDING_INDEX
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.checkpoint import Checkpoint, task_of_architecture
from onnxtool.export.modalities.finding import find_modality
from onnxtool.export.signature import detect_signature, to_tensors
from onnxtool.export.source import Source
from onnxtool.export.tracing import guarded, operators_apart
from onnxtool.model_file import Staging, save_model
from onnxtool.progress import tell
from onnxtool.training.artifacts.verification import TorchModel
from onnxtool.training.options import ForwardOptions

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
        for use in [] if table is None else table.uses():
            if use.node.op_type == "Gather" and use.idx == 0:
                use.node.metadata_props[PADDING_INDEX] = str(module.padding_idx)


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
