"""Translates a graph by PyTorch's public exporters, as a module."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.torch_backend.lower.torch_onnx import ConversionFailedError, quiet
from onnxtool.torch_backend.nodes import seen_size


def export(graph_module: torch.fx.GraphModule) -> ir.Model:
    """Translate a graph by `torch.export` and `torch.onnx.export`.

    They take tensors only. A `SymInt` input has to be the size of an input tensor, and is read off that tensor.

    Raises:
        ConversionFailedError: no tensor has a size, or one of the exporters fails.
    """
    module = torch.fx.GraphModule(graph_module, _with_sizes_of_tensors(graph_module.graph))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    with quiet(), unset_fake_temporarily(), tracing(None):
        try:
            program = torch.export.export(module, _examples(tensors), dynamic_shapes=_dynamic_shapes(tensors))
            exported = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
        except Exception as error:  # two exporters and a tracer fail with whatever their own code raises
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            raise ConversionFailedError(f"{type(error).__name__}: {reason}") from error
    model: ir.Model = exported.model
    _add_unused_inputs(model.graph, values)
    return model


def _with_sizes_of_tensors(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy of the graph that reads each `SymInt` input off a tensor."""
    result = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders:
        if isinstance(node.meta["val"], torch.Tensor):
            copies[node] = result.node_copy(node)
    for node in placeholders:
        if node in copies or not node.users:
            continue
        found = _dimension_of_size(str(node.meta["val"]), [other for other in placeholders if other in copies])
        if found is None:
            raise ConversionFailedError(f"the size {node.meta['val']} is not the size of a tensor among the inputs")
        copies[node] = result.call_function(torch.ops.aten.sym_size.int, (copies[found[0]], found[1]))
    result.output(result.graph_copy(graph, copies))
    return result


def _dimension_of_size(size: str, tensors: Sequence[torch.fx.Node]) -> tuple[torch.fx.Node, int] | None:
    """Return a tensor and the dimension of it that has that size."""
    for node in tensors:
        for dim, other in enumerate(node.meta["val"].shape):
            if str(other) == size:
                return node, dim
    return None


def _examples(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return real tensors of zeros, of the sizes at the first call: only shapes, types and layouts count."""
    examples = []
    for fake in tensors:
        shape, strides = ([seen_size(size) for size in sizes] for sizes in (fake.shape, fake.stride()))
        examples.append(torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device).zero_())
    return tuple(examples)


def _dynamic_shapes(tensors: Sequence[torch.Tensor]) -> object:
    """Mark the symbolic dimensions, which must not become constants."""
    dims = [
        {dim: torch.export.Dim.DYNAMIC for dim, size in enumerate(fake.shape) if not isinstance(size, int)}
        for fake in tensors
    ]
    return tuple(dims) if any(dims) else None


def _add_unused_inputs(graph: ir.Graph, values: Sequence[object]) -> None:
    """Restore the inputs that are not tensors: callers of the model pass all of them."""
    tensors = iter(list(graph.inputs))
    inputs = [
        next(tensors)
        if isinstance(value, torch.Tensor)
        else ir.Input(f"size_{index}", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
        for index, value in enumerate(values)
    ]
    graph.inputs.clear()
    graph.inputs.extend(inputs)
