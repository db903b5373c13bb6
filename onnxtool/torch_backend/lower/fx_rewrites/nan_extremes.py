"""Extremes of numbers that are NaN: PyTorch's maximum of a NaN and a number is the NaN, that of onnxruntime is not."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from onnxtool.torch_backend.lower.fx_rewrites.rewriter import Node, call, is_call, tensor_of

aten, prims = torch.ops.aten, torch.ops.prims
_VALUES = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
_PLACES = (aten.argmax.default, aten.argmin.default)
_BOTH = (aten.max.dim, aten.min.dim)


def extreme_with_nan(node: Node) -> Node | None:
    """Let a maximum or minimum be NaN where one is among its numbers, and its place that of the first NaN."""
    if is_call(node, *_VALUES):
        return _value(node, node, node.args[1:])
    if is_call(node, *_PLACES):
        return _place(node, node, node.args[1:])
    if node.target is operator.getitem and is_call(node.args[0], *_BOTH):
        both, index = node.args
        return (_place if index else _value)(node, both, both.args[1:])
    return None


def _value(node: Node, extreme: Node, options: tuple[Any, ...]) -> Node | None:
    is_nan = _nans(node, extreme)
    if is_nan is None:
        return None
    dims, *keep = options or ([],)
    found = call(node, aten.amax.default, is_nan, dims if isinstance(dims, list | tuple) else [dims], *keep)
    nan = call(node, aten.mul.Scalar, _copy(node), math.nan)
    return call(node, aten.where.self, call(node, aten.gt.Scalar, found, 0), nan, _copy(node))


def _place(node: Node, extreme: Node, options: tuple[Any, ...]) -> Node | None:
    is_nan = _nans(node, extreme)
    if is_nan is None:
        return None
    first = call(node, aten.argmax.default, is_nan, *options)
    dims = () if not options or options[0] is None else (options[0],)
    found = call(node, aten.amax.default, is_nan, list(dims), *options[1:])
    return call(node, aten.where.self, call(node, aten.gt.Scalar, found, 0), first, _copy(node))


def _nans(node: Node, extreme: Node) -> Node | None:
    """Return where the numbers are NaN, as ones; None of those that never are."""
    x = extreme.args[0]
    tensor = tensor_of(x)
    if tensor is None or not tensor.is_floating_point() or extreme.kwargs:
        return None
    return call(node, prims.convert_element_type.default, call(node, aten.isnan.default, x), torch.int32)


def _copy(node: Node) -> Node:
    """Insert what the node computes once more: the node itself is about to be replaced by what reads it."""
    with node.graph.inserting_before(node):
        copied = node.graph.call_function(node.target, node.args)
    copied.meta["val"] = node.meta["val"]
    return copied
