"""Tensors without elements: as results they are constants, and a concatenation is made without them."""

from __future__ import annotations

import torch

from onnxtool.torch_backend.nodes import (
    Node,
    call,
    is_call,
    is_empty,
    is_memory_for_random,
    is_random,
    is_static,
    tensor_of,
)

aten = torch.ops.aten


def empty_result(node: Node) -> Node | None:
    """Replace a node whose result is known to have no element by a constant of that shape.

    Its inputs stay out of the session: kernels disagree about empty inputs.
    """
    tensor = tensor_of(node)
    if tensor is None or not is_empty(tensor) or not is_static(tensor):
        return None
    if is_empty_constant(node) or is_random(node) or is_memory_for_random(node):
        return None
    with node.graph.inserting_before(node):
        constant = node.graph.call_function(
            aten.full.default, (list(tensor.shape), 0), {"dtype": tensor.dtype, "device": tensor.device}
        )
    # A fake tensor, as all other values: torch.onnx finds the mode of fake tensors by the values of a graph.
    constant.meta["val"] = tensor.new_empty(tensor.shape)
    return constant


def concatenation_without_empty(node: Node) -> Node | None:
    """Leave tensors without elements out of a concatenation that has others."""
    parts, dim = node.args[0], node.kwargs.get("dim", 0) if len(node.args) < 2 else node.args[1]
    full = [part for part in parts if not is_empty(tensor_of(part))]
    return call(node, aten.cat.default, full, dim) if 0 < len(full) < len(parts) else None


def is_empty_constant(node: Node) -> bool:
    """Whether the node is what `empty_result` makes, which no kernel computes."""
    return is_call(node, aten.full.default) and is_empty(tensor_of(node))
