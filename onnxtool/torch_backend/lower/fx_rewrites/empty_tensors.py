"""Tensors without elements: as results they are constants, and in a concatenation they are left out."""

from __future__ import annotations

import torch

from onnxtool.torch_backend.lower.fx_rewrites.rewriter import Node, call, is_call, tensor_of
from onnxtool.torch_backend.lower.random import is_memory_for_random, is_random

aten = torch.ops.aten


def empty_result(node: Node) -> Node | None:
    """Replace a node whose result is known to have no element by a constant of that shape.

    What it was computed from stays out of the session: kernels disagree about empty inputs.
    """
    tensor = tensor_of(node)
    if tensor is None or not is_empty(tensor) or not all(isinstance(size, int) for size in tensor.shape):
        return None
    if is_empty_constant(node) or is_random(node) or is_memory_for_random(node):
        return None
    kind = {"dtype": tensor.dtype, "device": tensor.device}
    with node.graph.inserting_before(node):
        constant = node.graph.call_function(aten.full.default, (list(tensor.shape), 0), kind)
    constant.meta["val"] = aten.full.default(list(tensor.shape), 0, **kind)
    return constant


def joined_with_nothing(node: Node) -> Node | None:
    """Leave tensors without elements out of a concatenation that has others."""
    if not is_call(node, aten.cat.default):
        return None
    parts, dim = node.args[0], node.kwargs.get("dim", 0) if len(node.args) < 2 else node.args[1]
    tensors = [(part, tensor_of(part)) for part in parts]
    full = [part for part, tensor in tensors if tensor is None or not is_empty(tensor)]
    if not full or len(full) == len(tensors):
        return None
    return call(node, aten.cat.default, full, dim)


def is_empty_constant(node: Node) -> bool:
    """Whether the node is what `empty_result` makes, for which no kernel has to think."""
    tensor = tensor_of(node)
    return is_call(node, aten.full.default) and tensor is not None and is_empty(tensor)


def is_empty(value: torch.Tensor) -> bool:
    """Whether the tensor has no element, whatever its symbolic sizes turn out to be."""
    return any(isinstance(size, int) and size == 0 for size in value.shape)
