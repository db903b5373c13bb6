"""Determine a model's inputs and outputs by running it with other sizes, and make a traced graph match them.

An axis has a name if running the model moves it, and a number otherwise: a pooled output [B, H] gets no sequence axis,
and a vision transformer that accepts a single image size keeps it. A traced graph gets these names, its nodes are named
by scope, and exporter metadata is removed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from numpy.typing import NDArray

from onnxtool.errors import ExportError, first_line
from onnxtool.export.modalities.modality import SEQUENCE, Axis, Modality, Sizes, usual_sizes
from onnxtool.graph.edit import bodies, drop_unused, reads
from onnxtool.reports import Dimension

Shape = tuple[Dimension, ...]

# Outputs that encoder-decoders and dual encoders return in addition to what is needed.
_EXTRA_OUTPUTS = frozenset({"encoder_last_hidden_state", "loss"})


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a model, in order.

    Attributes:
        inputs: name to shape.
        outputs: name to shape.
        axes: the dynamic axes of the inputs.
        model_sizes: sizes of axes that the model itself fixes, by name.
        file_sizes: sizes of axes that this file fixes, although the model does not.
    """

    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    axes: tuple[Axis, ...] = ()
    model_sizes: dict[str, int] = field(default_factory=dict)
    file_sizes: dict[str, int] = field(default_factory=dict)

    @property
    def sequences(self) -> frozenset[str]:
        """The outputs whose first axes are B and S."""
        return frozenset(name for name, shape in self.outputs.items() if shape[1:2] == (SEQUENCE,))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all non-dynamic axes."""
        return {**self.model_sizes, **self.file_sizes}


def detect_signature(model: Any, modality: Modality, fixed: Sizes | None = None) -> Signature:
    """Determine the signature of a transformers model by running it, once for each axis that may be dynamic.

    Args:
        model: a transformers model.
        modality: its inputs.
        fixed: sizes of axes that should not be dynamic.

    Raises:
        ExportError: the model does not run on its processor's output, or accepts only one batch size.
    """
    fixed = dict(fixed or {})
    usual = usual_sizes(modality) | fixed
    inputs, outputs = _shapes_of_run(model, modality, usual)
    moved: dict[Axis, tuple[_Shapes, _Shapes]] = {}
    model_sizes: dict[str, int] = {}
    for axis in modality.axes:
        if axis.name in fixed:
            continue
        try:
            moved[axis] = _shapes_of_run(model, modality, {**usual, axis.name: axis.other})
        except ExportError:
            if not axis.may_fail:
                raise
            model_sizes[axis.name] = axis.usual
    # Qwen2-Audio returns its mask.
    kept = [name for name in outputs if name not in inputs and (name not in _EXTRA_OUTPUTS or len(outputs) == 1)]
    return Signature(
        {name: _shape(name, inputs[name], {axis: run[0][name] for axis, run in moved.items()}) for name in inputs},
        {name: _shape(name, outputs[name], {axis: run[1][name] for axis, run in moved.items()}) for name in kept},
        tuple(moved),
        model_sizes,
        fixed,
    )


_Shapes = dict[str, tuple[int, ...]]


def _shapes_of_run(model: Any, modality: Modality, sizes: Sizes) -> tuple[_Shapes, _Shapes]:
    """Return the input and output shapes of one run."""
    feeds = modality.feeds(sizes)
    outputs = run_torch_tensors(model, feeds)
    return {name: array.shape for name, array in feeds.items()}, {
        n: tuple(tensor.shape) for n, tensor in outputs.items()
    }


def _shape(name: str, sizes: tuple[int, ...], moved: Mapping[Axis, tuple[int, ...]]) -> Shape:
    return tuple(
        _dimension(name, size, {axis: shape[position] for axis, shape in moved.items()})
        for position, size in enumerate(sizes)
    )


def _dimension(name: str, size: int, moved: Mapping[Axis, int]) -> Dimension:
    movers = [axis for axis, other in moved.items() if other != size]
    if not movers:
        return size
    if len(movers) == 1 and size == movers[0].usual and moved[movers[0]] == movers[0].other:
        return movers[0].name
    # A window, a product, …: dynamic, but not one of the input axes.
    return "_".join([name, *(axis.name for axis in movers)])


def run_torch_tensors(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a transformers model on NumPy arrays and return its tensors by name.

    Raises:
        ExportError: the model does not run on these inputs.
    """
    import torch

    tensors = to_tensors(model, feeds)
    try:
        with torch.inference_mode():
            outputs = model(**tensors)
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, AssertionError, KeyError) as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise ExportError(
            f"{type(model).__name__} does not run on {shapes}: {first_line(error)}",
            "it may need inputs that its tokenizer or processor does not give",
        ) from error
    return _name_outputs(outputs)


def run_own_forward(model: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run a model whose forward was replaced by its own, like `run_torch_tensors`."""
    restricted = vars(model).pop("forward")
    try:
        return run_torch_tensors(model, feeds)
    finally:
        model.forward = restricted


def to_tensors(model: Any, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Convert arrays to tensors on the model's device, floats to its dtype."""
    import torch

    dtype = getattr(model, "dtype", torch.float32)
    device = getattr(model, "device", "cpu")  # FSMT's encoder is a plain module
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in feeds.items()}
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def to_numpy(tensor: Any) -> Any:
    """Return a tensor as a NumPy array; bfloat16, which NumPy does not have, becomes float32."""
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def _name_outputs(outputs: Any) -> dict[str, Any]:
    """Name the tensors in a model's output by key, else by position."""
    import torch

    if isinstance(outputs, torch.Tensor):
        return {"output": outputs}
    items = outputs.items() if isinstance(outputs, Mapping) else ((f"output_{i}", o) for i, o in enumerate(outputs))
    return {name: value for name, value in items if isinstance(value, torch.Tensor)}


_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # torch.export's for nodes of its own


def tidy(model: ir.Model, signature: Signature, module: Any) -> None:
    """Make the graph that was traced of a module match the signature, in place.

    Raises:
        ExportError: an input is missing or has a fixed size, or an output is missing: the trace did not match the
            model.
    """
    _check_inputs(model, signature)
    _select_outputs(model.graph, signature)
    _name_axes(model, signature)
    order_and_name(model.graph, module)
    strip(model)
    _pad_pools_by_negative_zero(model.graph)


def _check_inputs(model: ir.Model, signature: Signature) -> None:
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    for name, shape in signature.inputs.items():
        if name not in inputs:
            raise ExportError(
                f"the traced graph does not use {name}; it has {', '.join(inputs)}",
                "its answers could not depend on it; try the other --exporter",
            )
        traced = inputs[name].shape
        if traced is None or len(traced) != len(shape):
            raise ExportError(f"the traced graph gives {name} the shape {traced}, not {list(shape)}", "report this")
        fixed = [
            axis for size, axis in zip(traced, shape, strict=True) if isinstance(axis, str) and isinstance(size, int)
        ]
        if fixed:
            raise ExportError(
                f"the traced graph fixes {', '.join(fixed)} of {name}, {traced}",
                "try the other --exporter; this model specializes on sizes",
            )
    extra = [name for name in inputs if name not in signature.inputs]
    if extra:
        raise ExportError(f"the traced graph has additional inputs: {', '.join(extra)}", "try the other --exporter")
    graph.inputs[:] = [inputs[name] for name in signature.inputs]


def _select_outputs(graph: ir.Graph, signature: Signature) -> None:
    outputs = {value.name: value for value in graph.outputs}
    missing = [name for name in signature.outputs if name not in outputs]
    if missing:
        raise ExportError(
            f"the traced graph lacks the outputs {', '.join(missing)}; it has {', '.join(map(str, outputs))}",
            "try the other --exporter",
        )
    graph.outputs[:] = [outputs[name] for name in signature.outputs]


def _name_axes(model: ir.Model, signature: Signature) -> None:
    """Rename the exporter's symbols (s18, s41) to meaningful axis names, and set the shapes of inputs and outputs."""
    renames: dict[str, str] = {}
    for value in model.graph.inputs:
        assert value.shape is not None  # noqa: S101  checked by _check_inputs
        for size, name in zip(value.shape, signature.inputs[str(value.name)], strict=True):
            if isinstance(name, str):
                renames[str(size)] = name
    rename_axes(model, renames)
    for value in model.graph.inputs:
        value.shape = ir.Shape(list(signature.inputs[str(value.name)]))
    for value in model.graph.outputs:
        value.shape = ir.Shape(list(signature.outputs[str(value.name)]))


def rename_axes(model: ir.Model, renames: dict[str, str]) -> None:
    """Replace the exporter's symbols with their names in the shapes of all computed values."""
    for graph in model.graphs():
        for node in graph:
            for output in node.outputs:
                if output.shape is not None:
                    output.shape = ir.Shape([_renamed(size, renames) for size in output.shape])


def _renamed(size: int | ir.SymbolicDim, renames: dict[str, str]) -> int | str | None:
    """Return a dimension with the exporter's symbols in it replaced by their names."""
    if isinstance(size, int):
        return size
    if size.value is None:
        return None
    return re.sub(r"\w+", lambda match: renames.get(match[0], match[0]), str(size.value))


def order_and_name(graph: ir.Graph, module: Any) -> None:
    """Order nodes as the outputs need them, and name nodes, values and constants after the submodule that made them.

    `encoder.layer.0/MatMul` makes diffs and profiles readable, and the file depends on its computation alone. An
    exporter's order and numbers are those of one process: Gemma 3 loops over a set of its kinds of layers, whose order
    differs from process to process, and numbers also count what is dropped.

    Args:
        graph: the graph, with its subgraphs; names of inputs and outputs stay.
        module: the traced module; names of its parameters and buffers stay.
    """
    kept = {str(value.name) for value in (*graph.inputs, *graph.outputs)} | weights_of(module).keys()
    modules = {name for name, _ in module.named_modules()}
    counts, named = dict.fromkeys(kept, 1), set[ir.Value]()

    def unique(name: str) -> str:
        candidate, counts[name] = name, counts.get(name, 0)
        while counts.get(candidate):
            candidate = f"{name}_{counts[name]}"
            counts[name] += 1
        counts[candidate] = 1
        return candidate

    def name(value: ir.Value, stem: str) -> None:
        if value.name not in kept and value not in named:
            value.name = unique(stem)
            named.add(value)

    def settle(part: ir.Graph) -> None:
        nodes = list(_needed(part))
        part.remove(set(part).difference(nodes), safe=True)
        part.extend(nodes)
        for value in part.inputs:
            name(value, "input")
        for node in nodes:
            node.name = unique("/".join(filter(None, (_module_of(node, modules), node.op_type))))
            for place, source in enumerate(node.inputs):
                if source is not None and source.is_initializer():
                    name(source, f"{node.name}/{place}")
            for output in node.outputs:
                name(output, f"{node.name}/output")
            for body in bodies(node):
                settle(body)

    settle(graph)
    drop_unused([value for value in graph.initializers.values() if value.name not in kept])


def _needed(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes that the outputs need, each after those that it needs, in the order of its inputs."""
    known: set[ir.Node] = set()
    waiting = [(value.producer(), False) for value in reversed(graph.outputs)]
    while waiting:
        node, is_ready = waiting.pop()
        if node is None or node.graph is not graph or node in known:
            continue
        if is_ready:
            known.add(node)
            yield node
        else:
            waiting.append((node, True))
            waiting += [(value.producer(), False) for value in reversed(reads(node)) if value is not None]


def weights_of(module: Any, *, tied: bool = True) -> dict[str, Any]:
    """Return a module's parameters and buffers by name; tied ones under each of their names, or the first alone."""
    named_tensors = (module.named_parameters, module.named_buffers)
    return {name: tensor for named in named_tensors for name, tensor in named(remove_duplicate=not tied)}


def _module_of(node: ir.Node, modules: Collection[str]) -> str:
    """Return the path of the module that made a node; empty for the model itself, and where it is unknown."""
    scopes = node.metadata_props.get(_SCOPES_KEY)
    if scopes is not None:
        # dynamo's list ends with the name of the operator's own FX node; before that are the modules, outermost first.
        modules = [str(scope) for scope in ast.literal_eval(scopes)][:-1]
        return (modules or [""])[-1].removeprefix(_NO_MODULE)
    path = ""
    if (node.name or "").startswith("/"):  # TorchScript's: /model/encoder/layer.0/MatMul_3
        for part in str(node.name).split("/")[2:-1]:
            path = f"{path}.{part}".removeprefix(".")
            path = path if path in modules else re.sub(r"_\d+$", "", path)  # the number of a later call
    return path


def strip(model: ir.Model) -> None:
    """Remove stack traces, which contain local paths, and other exporter metadata from every node."""
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()


def _pad_pools_by_negative_zero(graph: ir.Graph) -> None:
    """Pad MaxPool inputs with -0.0 instead of 0, which is an equal number.

    onnxruntime fuses a Pad of zeros, which it recognizes bitwise, with the following MaxPool, whose own padding counts
    as the lowest number: if all values at a border are negative, as BiT's may be, their maximum changes
    (core/optimizer/pad_fusion.cc, since 1.17 and still in 1.31; issue 290 of onnxsim is the same).
    """
    for node in graph:
        readers = {reader.op_type for reader, _ in node.outputs[0].uses()}
        pads = node.inputs[2] if node.op_type == "Pad" and len(node.inputs) > 2 else None
        padding = None if pads is None or "MaxPool" not in readers else ir.convenience.get_const_tensor(pads)
        if pads is None or padding is None or not padding.dtype.is_floating_point() or padding.numpy().any():
            continue
        array = -np.abs(padding.numpy())
        zero = ir.tensor(array, name=f"{node.outputs[0].name}_negative_zero")
        value = ir.Value(name=zero.name, const_value=zero, shape=ir.Shape(array.shape), type=ir.TensorType(zero.dtype))
        graph.register_initializer(value)
        node.replace_input_with(2, value)
        constant = pads.producer()
        if not pads.uses() and constant is not None:
            graph.remove(constant, safe=True)
        elif not pads.uses():
            graph.initializers.pop(str(pads.name))
