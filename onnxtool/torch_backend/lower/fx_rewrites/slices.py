"""Gradients of slices: writes into zeros become padding, and sums of adjacent ones a concatenation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onnxtool.torch_backend.nodes import Node, call, is_call, tensor_of

aten = torch.ops.aten
_DEFAULTS: tuple[int | None, ...] = (0, None, None, 1)  # of the dimension, its start, its end and the step
_ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


@dataclass(frozen=True)
class _Written:
    """Values that are written into zeros, from `start` up to `end` of a dimension of `size`."""

    values: Node
    dim: int
    start: int
    end: int
    size: int


def padded_slice(node: Node) -> Node | None:
    """Replace `slice_scatter(zeros, x)` by `constant_pad_nd(x)`: the former is a scatter in ONNX."""
    written = _written(node)
    tensor = tensor_of(node)
    if written is None or tensor is None:
        return None
    pads = [0, 0] * (tensor.dim() - 1 - written.dim)
    return call(
        node, aten.constant_pad_nd.default, written.values, [*pads, written.start, written.size - written.end], 0
    )


def joined_slices(node: Node) -> Node | None:
    """Replace `slice_scatter(zeros, x, dim, 0, n) + slice_scatter(zeros, y, dim, n)` by `cat([x, y], dim)`.

    The gradient of a rotary embedding has one for each half of a head.
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


def _written(node: object) -> _Written | None:
    """Read a write of a slice into zeros; its sizes have to be known, and its step 1."""
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
    return _Written(values, dim % tensor.dim(), first, last, size) if first < last else None


def _read_padding(node: Node, tensor: torch.Tensor) -> _Written | None:
    """Read what `padded_slice` has written."""
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
    return _Written(values, dim, before, size - after, size) if isinstance(size, int) else None
