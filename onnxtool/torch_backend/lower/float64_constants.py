"""Keeps the digits of numbers beside float64 tensors, which torch.onnx (tested: 2.13) rounds to float32."""

from __future__ import annotations

import ctypes

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

aten = torch.ops.aten

_PLACES = {
    aten.scalar_tensor.default: 0,
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.fill.Scalar: 1,
    aten.masked_fill.Scalar: 2,
}
"""Which argument of an operator is a number that is translated as a float32, and then cast."""
_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def keep_doubles(graph_module: torch.fx.GraphModule) -> None:
    """Make such numbers constants of the graph, of type float64."""
    for node in list(graph_module.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            continue
        place = _PLACES.get(node.target)
        if place is not None and len(node.args) > place and _is_rounded(node.args[place]):
            with graph_module.graph.inserting_before(node):
                node.update_arg(place, _constant(graph_module, node.args[place], node.name))
        elif node.target in _SUMS and _is_rounded(alpha := node.kwargs.get("alpha", 1)):
            with graph_module.graph.inserting_before(node):
                constant = _constant(graph_module, alpha, node.name)
                scaled = graph_module.graph.call_function(aten.mul.Tensor, (node.args[1], constant))
            scaled.meta["val"] = node.args[1].meta["val"]
            node.args, node.kwargs = (node.args[0], scaled), {}


def _is_rounded(number: object) -> bool:
    """Whether the number is not one of float32; NaN is one of both."""
    return isinstance(number, float) and number == number and ctypes.c_float(number).value != number


def _constant(graph_module: torch.fx.GraphModule, number: float, name: str) -> torch.fx.Node:
    with unset_fake_temporarily():
        tensor = torch.tensor(number, dtype=torch.float64)
    graph_module.register_buffer(f"{name}_number", tensor, persistent=False)
    node = graph_module.graph.get_attr(f"{name}_number")
    node.meta["val"] = tensor
    return node
