"""Maxima and minima with NaN: PyTorch's maximum of a NaN and a number is NaN, and that of onnxruntime is the number."""

from __future__ import annotations

import math
from typing import Any

import torch

from onnxtool.torch_backend.nodes import Node, call, is_call, tensor_of

aten, prims = torch.ops.aten, torch.ops.prims


def extreme(node: Node) -> Node | None:
    """Let a maximum or minimum be NaN where one of its numbers is NaN."""
    return _value(node, node)


def index_of_extreme(node: Node) -> Node | None:
    """Let the index of a maximum or minimum be that of the first NaN, where one of its numbers is NaN."""
    return _index(node, node)


def extreme_and_index(node: Node) -> Node | None:
    """Do both for what `getitem` takes out of the two results of `max` and `min` along a dimension."""
    both, index = node.args
    if not is_call(both, aten.max.dim, aten.min.dim):
        return None
    return (_index if index else _value)(node, both)


def _value(node: Node, reduction: Node) -> Node | None:
    is_nan = _nans(node, reduction)
    if is_nan is None:
        return None
    dims, *keep = reduction.args[1:] or ([],)
    found = call(node, aten.amax.default, is_nan, dims if isinstance(dims, list | tuple) else [dims], *keep)
    nan = call(node, aten.mul.Scalar, _copy(node), math.nan)
    return call(node, aten.where.self, call(node, aten.gt.Scalar, found, 0), nan, _copy(node))


def _index(node: Node, reduction: Node) -> Node | None:
    is_nan = _nans(node, reduction)
    if is_nan is None:
        return None
    options: tuple[Any, ...] = reduction.args[1:]
    first = call(node, aten.argmax.default, is_nan, *options)
    dims = () if not options or options[0] is None else (options[0],)
    found = call(node, aten.amax.default, is_nan, list(dims), *options[1:])
    return call(node, aten.where.self, call(node, aten.gt.Scalar, found, 0), first, _copy(node))


def _nans(node: Node, reduction: Node) -> Node | None:
    """Return where the numbers are NaN, as ones; None for numbers that never are."""
    x = reduction.args[0]
    tensor = tensor_of(x)
    if tensor is None or not tensor.is_floating_point() or reduction.kwargs:
        return None
    return call(node, prims.convert_element_type.default, call(node, aten.isnan.default, x), torch.int32)


def _copy(node: Node) -> Node:
    """Insert the same computation once more: the node itself is about to be replaced by what reads it."""
    with node.graph.inserting_before(node):
        copied = node.graph.call_function(node.target, node.args)
    copied.meta["val"] = node.meta["val"]
    return copied
