"""Scales of rows, moved from the largest matrix of a training step, the gradient of the scores, to a smaller one.

Letters of shapes: M rows, V classes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from onnxtool.torch_backend.nodes import Node, call, is_call, tensor_of

aten = torch.ops.aten
_TRANSPOSITIONS = (aten.t.default, aten.permute.default, aten.transpose.int)
_UNKNOWN = (-1, -1, -1)


def scale_smaller_operand(node: Node) -> Node | None:
    """Replace a matmul of `s * r`, or its sum over the rows, by one of s; s: [M, V]; r: [M, 1], or one number.

    `(s * r) @ w` is `(s @ w) * r`; `(s * r).t() @ x` is `s.t() @ (x * r)`; the sum is `r.t() @ s`. All readers of
    `s * r` have to be of these kinds, so that it is not computed, and w and x have no more columns than s.
    """
    scaled = _scaled_rows(node)
    if scaled is None or not all(_scaled_rows(reader) for reader in _readers(scaled)):
        return None
    matrix, factor = scaled.args
    if is_call(node, aten.sum.dim_IntList):
        if not _shape(factor):
            return call(node, aten.mul.Tensor, call(node, aten.sum.dim_IntList, matrix, [0], True), factor)
        return call(node, aten.mm.default, call(node, aten.permute.default, factor, [1, 0]), matrix)
    left, right = node.args
    if is_call(left, *_TRANSPOSITIONS):
        transposed = call(node, aten.permute.default, matrix, [1, 0])
        return call(node, aten.mm.default, transposed, call(node, aten.mul.Tensor, right, factor))
    return call(node, aten.mul.Tensor, call(node, aten.mm.default, matrix, right), factor)


def _scaled_rows(node: Node) -> Node | None:
    """Return the product `s * r` of which the node is a matmul or the sum over the rows, directly or through views."""
    if not is_call(node, aten.mm.default) and not _is_sum_of_rows(node):
        return None
    source = node.args[0]
    if is_call(node, aten.mm.default) and is_call(source, *_TRANSPOSITIONS):
        source = source.args[0]
    scaled = source
    while is_call(scaled, aten.view.default):
        scaled = scaled.args[0]
    if not is_call(scaled, aten.mul.Tensor) or scaled.kwargs or len(scaled.all_input_nodes) != 2:
        return None
    matrix, factor = scaled.args
    rows = _shape(matrix)
    if is_call(node, aten.mm.default) and _shape(node.args[1])[1] > rows[-1]:
        return None
    is_known = len(rows) == 2 and _shape(source) == _shape(scaled) == rows and _shape(factor) in ((), (rows[0], 1))
    return scaled if is_known and rows[1] > 1 and _are_float32(matrix, factor) else None


def _is_sum_of_rows(node: Node) -> bool:
    return is_call(node, aten.sum.dim_IntList) and not node.kwargs and list(node.args[1:]) == [[0], True]


def _readers(node: Node) -> Iterator[Node]:
    """Yield the readers of a node, and of views and transpositions of it."""
    for user in node.users:
        if is_call(user, aten.view.default, *_TRANSPOSITIONS):
            yield from _readers(user)
        else:
            yield user


def _shape(node: object) -> tuple[int, ...]:
    """Return the shape of a node that gives a tensor of known sizes; else a shape that no matrix has."""
    tensor = tensor_of(node)
    return tuple(tensor.shape) if tensor is not None and all(type(size) is int for size in tensor.shape) else _UNKNOWN


def _are_float32(*nodes: object) -> bool:
    return all((tensor := tensor_of(node)) is not None and tensor.dtype is torch.float32 for node in nodes)
