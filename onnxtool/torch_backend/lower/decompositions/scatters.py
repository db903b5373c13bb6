"""Indexed writes as scatters along one dimension, which onnxruntime computes correctly.

Shape letters: N indexable positions, M indices, R values at each position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

aten = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32)


def index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    """Add `values` to `x` at `indices` with one scatter; repeated indices add up.

    Writes that do not accumulate, and masks instead of indices, are left to the translation.
    """
    places = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not accumulate or not places or any(index.dtype not in _INTEGERS for index in given):
        return NotImplemented
    given = list(torch.broadcast_tensors(*given))
    rest = [dim for dim in range(x.dim()) if dim not in places]
    # If the indexed dimensions are not adjacent, the index dimensions come first.
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    rank = given[0].dim()
    shape = [x.shape[dim] for dim in rest]
    values = values.expand([*shape[:first], *given[0].shape, *shape[first:]])
    values = values.permute([*range(first, first + rank), *range(first), *range(first + rank, values.dim())])
    linear = _linear([index.long() for index in given], [x.shape[dim] for dim in places]).reshape(-1, 1)
    order = [*places, *rest]
    ordered = x.permute(order)
    num_places, num_values = math.prod([x.shape[dim] for dim in places]), math.prod(shape)
    rows = ordered.reshape(num_places, num_values)  # [N, R]
    added = values.reshape(linear.shape[0], num_values)  # [M, R]
    result = aten.scatter_add.default(rows, 0, linear.expand(linear.shape[0], num_values), added)
    return result.reshape(ordered.shape).permute([order.index(dim) for dim in range(x.dim())])


def diagonal_scatter(
    x: torch.Tensor, diagonal: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Write `diagonal` onto a diagonal of `x` with one scatter along both dimensions, flattened."""
    places = [dim1 % x.dim(), dim2 % x.dim()]
    rest = [dim for dim in range(x.dim()) if dim not in places]
    order = [*rest, *places]
    ordered = x.permute(order)
    steps = torch.arange(diagonal.shape[-1], device=x.device)
    rows, columns = steps + max(-offset, 0), steps + max(offset, 0)
    shape = [x.shape[dim] for dim in rest]
    flat = ordered.reshape([*shape, x.shape[places[0]] * x.shape[places[1]]])
    linear = (rows * x.shape[places[1]] + columns).expand(diagonal.shape)
    result = aten.scatter.src(flat, -1, linear, diagonal)
    return result.reshape(ordered.shape).permute([order.index(dim) for dim in range(x.dim())])


def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Write to a zero-dimensional tensor; other tensors are left to the translation."""
    return NotImplemented if x.dim() or index.dim() else source.clone()


def _linear(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the indices into several dimensions as one index into the flattened dimensions."""
    linear = torch.zeros_like(indices[0])
    for index, size in zip(indices, sizes, strict=True):
        linear = linear * size + torch.where(index < 0, index + size, index)
    return linear
