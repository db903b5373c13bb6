"""Keeps the precision of numbers in float64 operators, which torch.onnx (tested: 2.13) rounds to float32."""

from __future__ import annotations

import ctypes

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onnxtool.torch_backend.lower.decisions import decision

aten = torch.ops.aten

_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def keep_float64_constants(graph_module: torch.fx.GraphModule) -> None:
    """Make numbers that float32 would round constants of the graph: arguments (`float64_argument`), `alpha` of sums."""
    for node in list(graph_module.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            continue
        position = decision(node.target).float64_argument
        if position is not None and len(node.args) > position and _is_rounded(node.args[position]):
            with graph_module.graph.inserting_before(node):
                node.update_arg(position, _constant(graph_module, node.args[position], node.name))
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
