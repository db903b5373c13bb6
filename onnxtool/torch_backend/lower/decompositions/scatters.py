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


def index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """Add slices of `source` to the slices of `x` selected by `index`, with one scatter along `dim`.

    PyTorch's decompositions of this and of `index_copy` take negative indices, for which its operators raise.
    """
    if not x.dim():
        return index_add(x.reshape(1), 0, index.reshape(-1), source.reshape(-1), alpha=alpha).reshape(())
    source = source if alpha == 1 else source * alpha
    return aten.scatter_add.default(x, dim, _places(x, dim, index, source), source)


def index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Write slices of `source` to the slices of `x` selected by `index`, with one scatter along `dim`."""
    if not x.dim():
        return index_copy(x.reshape(1), 0, index.reshape(-1), source.reshape(-1)).reshape(())
    return aten.scatter.src(x, dim, _places(x, dim, index, source), source)


def index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor | float) -> torch.Tensor:
    """Write `value` to the slices of `x` selected by `index`, which may count from the end."""
    if not x.dim():
        return index_fill(x.reshape(1), 0, index, value).reshape(())
    index = index.reshape(-1)
    places = torch.where(index < 0, index + x.shape[dim], index)
    shape = [*x.shape]
    shape[dim] = index.shape[0]
    filling = value.to(x.dtype) if isinstance(value, torch.Tensor) else torch.scalar_tensor(value, dtype=x.dtype)
    return index_copy(x, dim, places, filling.expand(shape))


def _places(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the indices of slices along `dim`, for each element of the slices `source`."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return index.long().reshape(shape).expand(source.shape)


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


def scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> torch.Tensor:
    """Divide a scattered sum by a scattered count; only for float means, others are left to the translation."""
    if reduce != "mean" or not x.dtype.is_floating_point:
        return NotImplemented
    source = source.reshape(()) if not index.dim() else source[tuple(slice(size) for size in index.shape)]
    before = torch.ones_like(x) if include_self else torch.zeros_like(x)
    counts = aten.scatter_add.default(before, dim, index, torch.ones_like(source))
    start = x if include_self else torch.where(counts > 0, torch.zeros_like(x), x)
    return aten.scatter_add.default(start, dim, index, source) / counts.clamp(min=1)


def _linear(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the indices into several dimensions as one index into the flattened dimensions.

    An index outside of its dimension stays outside of all of them.
    """
    positive = [torch.where(index < 0, index + size, index) for index, size in zip(indices, sizes, strict=True)]
    linear = positive[0]
    for index, size in zip(positive[1:], sizes[1:], strict=True):
        linear = torch.where((linear < 0) | (index < 0) | (index >= size), -1, linear * size + index)
    return linear
