"""Compute training gradients in fewer passes over memory: of scores, their cross entropy, and slices.

Shape letters: M rows, V classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtool.torch_backend.nodes import Node, call, is_call, is_static, shape_of, tensor_of

aten = torch.ops.aten
_TRANSPOSITIONS = (aten.t.default, aten.permute.default, aten.transpose.int)
_UNKNOWN = (-1, -1, -1)


def scale_smaller_operand(node: Node) -> Node | None:
    """Replace a matmul of `s * r`, or its sum over the rows, with one of s; s: [M, V]; r: [M, 1], or one number.

    `(s * r) @ w` is `(s @ w) * r`; `(s * r).t() @ x` is `s.t() @ (x * r)`; the sum is `r.t() @ s`. All readers of
    `s * r` must be of these kinds, so that it is not computed, and w and x must have no more columns than s.
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
    """Return the product `s * r` whose matmul or row sum the node is, directly or through views."""
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
    if len(rows) != 2 or rows[1] < 2 or not _shape(source) == _shape(scaled) == rows:
        return None
    if is_call(node, aten.mm.default) and _shape(node.args[1])[1] > rows[1]:
        return None
    return scaled if _shape(factor) in ((), (rows[0], 1)) and _are_float32(matrix, factor) else None


def _is_sum_of_rows(node: Node) -> bool:
    return is_call(node, aten.sum.dim_IntList) and not node.kwargs and list(node.args[1:]) == [[0], True]


def _readers(node: Node) -> Iterator[Node]:
    """Yield the readers of a node and of its views and transpositions."""
    for user in node.users:
        if is_call(user, aten.view.default, *_TRANSPOSITIONS):
            yield from _readers(user)
        else:
            yield user


def _shape(node: object) -> tuple[int, ...]:
    """Return the shape of a node that returns a tensor with known sizes; else a shape that no matrix has."""
    tensor = tensor_of(node)
    return tuple(tensor.shape) if tensor is not None and all(type(size) is int for size in tensor.shape) else _UNKNOWN


def _are_float32(*nodes: object) -> bool:
    return all((tensor := tensor_of(node)) is not None and tensor.dtype is torch.float32 for node in nodes)


def label_gradient(node: Node) -> Node | None:
    """Replace `g - exp(x) * sum(g)` with `(exp(x) - onehot) * -c * row` if g is `c * onehot * row`.

    This is the gradient of the negative log likelihood, followed by the gradient of the log-softmax x: [M, V]. row is
    the weight of each row: [M, 1], or one number. The zeros of g, [M, V], are neither created nor added up.
    """
    if node.kwargs or len(node.all_input_nodes) != 2:
        return None
    gradient, product = node.all_input_nodes
    match = _read_gradient(gradient)
    if match is None or not is_call(product, aten.mul.Tensor) or len(product.all_input_nodes) != 2:
        return None
    scatter, row = match
    exponent, total = product.all_input_nodes
    dim = scatter.args[1]
    if not is_call(exponent, aten.exp.default) or not is_call(total, aten.sum.dim_IntList):
        return None
    if total.kwargs or len(total.args) != 3 or total.args[0] is not gradient or not total.args[2]:
        return None
    if list(total.args[1]) != [dim] or shape_of(exponent) != shape_of(node):
        return None
    index, value = scatter.args[2], scatter.args[3]
    # The index sizes may be symbols; the sizes of the scores, which are numbers, are equal.
    sizes = [1 if axis == dim else size for axis, size in enumerate(shape_of(scatter) or ())]
    source = call(node, aten.new_full.default, exponent, sizes, -1.0)
    difference = call(node, aten.scatter_add.default, exponent, dim, index, source)
    factor = row if value == -1 else call(node, aten.mul.Tensor, row, -value)
    return call(node, aten.mul.Tensor, difference, factor)


def _read_gradient(node: Node) -> tuple[Node, Node] | None:
    """Return the scatter of one value per row into zeros, and the row factor, whose product the node is."""
    if not is_call(node, aten.mul.Tensor) or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return None
    scatter, row = node.all_input_nodes
    if not is_call(scatter, aten.scatter.value) or not is_call(scatter.args[0], aten.zeros_like.default):
        return None
    _, dim, index, value = scatter.args
    indices, factors, zeros = tensor_of(index), tensor_of(row), tensor_of(scatter)
    if scatter.kwargs or indices is None or factors is None or zeros is None or not isinstance(value, int | float):
        return None
    if (
        not isinstance(dim, int)
        or not is_static(zeros)
        or zeros.dtype is not torch.float32
        or factors.dtype is not torch.float32
    ):
        return None
    one_a_row = [size if axis != dim else 1 for axis, size in enumerate(zeros.shape)]
    if not _same(indices.shape, one_a_row) or (factors.dim() and not _same(factors.shape, one_a_row)):
        return None
    return scatter, row


def _same(shape: torch.Size, sizes: list[int]) -> bool:
    """Return whether a shape, including symbols, equals `sizes` at every call."""
    return len(shape) == len(sizes) and all(
        statically_known_true(first == second) for first, second in zip(shape, sizes, strict=True)
    )


_DEFAULTS: tuple[int | None, ...] = (0, None, None, 1)  # dimension, start, end and step
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


@dataclass(frozen=True)
class _SliceWrite:
    """Values written into zeros, from `start` up to `end` of a dimension of `size`."""

    values: Node
    dim: int
    start: int
    end: int
    size: int


def padded_slice(node: Node) -> Node | None:
    """Replace `slice_scatter(zeros, x)`, a scatter in ONNX, with `constant_pad_nd(x)`."""
    written = _written(node)
    tensor = tensor_of(node)
    if written is None or tensor is None:
        return None
    pads = [0, 0] * (tensor.dim() - 1 - written.dim)
    return call(
        node, aten.constant_pad_nd.default, written.values, [*pads, written.start, written.size - written.end], 0
    )


def joined_slices(node: Node) -> Node | None:
    """Replace `slice_scatter(zeros, x, dim, 0, n) + slice_scatter(zeros, y, dim, n)` with `cat([x, y], dim)`.

    The gradient of a rotary embedding has one such write for each half of a head.
    """
    if node.kwargs or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return None
    first, second = map(_written, node.all_input_nodes)
    if first is None or second is None or (first.dim, first.size) != (second.dim, second.size):
        return None
    low, high = sorted((first, second), key=lambda part: part.start)
    if low.start != 0 or low.end != high.start or high.end != high.size:
        return None
    return call(node, aten.cat.default, [low.values, high.values], low.dim)


def _written(node: object) -> _SliceWrite | None:
    """Parse a write of a slice into zeros; its sizes must be known, and its step must be 1."""
    tensor = tensor_of(node)
    if not isinstance(node, torch.fx.Node) or tensor is None or node.kwargs:
        return None
    if is_call(node, aten.constant_pad_nd.default):
        return _read_padding(node, tensor)
    if not is_call(node, aten.slice_scatter.default) or not is_call(node.args[0], *_ZEROS):
        return None
    arguments = list(node.args[1:])
    values, dim, start, end, step = arguments + list(_DEFAULTS[len(arguments) - 1 :])
    source = tensor_of(values)
    if source is None or source.dtype != tensor.dtype or not isinstance(dim, int) or step != 1:
        return None
    size = tensor.shape[dim]
    if not all(isinstance(number, int) for number in (size, start or 0, size if end is None else end)):
        return None
    first, last, _ = slice(start, end).indices(size)
    return _SliceWrite(values, dim % tensor.dim(), first, last, size) if first < last else None


def _read_padding(node: Node, tensor: torch.Tensor) -> _SliceWrite | None:
    """Parse the result of `padded_slice`."""
    values, pads, *fill = node.args
    if (
        fill not in ([], [0])
        or not isinstance(values, torch.fx.Node)
        or not isinstance(pads, list | tuple)
        or len(pads) < 2
    ):
        return None
    before, after = pads[-2:]
    if any(pads[:-2]) or not isinstance(before, int) or not isinstance(after, int) or min(before, after) < 0:
        return None
    dim = tensor.dim() - len(pads) // 2
    size = tensor.shape[dim]
    return _SliceWrite(values, dim, before, size - after, size) if isinstance(size, int) else None
