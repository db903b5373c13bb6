"""Order statistics, positions in a sorted row, running maxima and products.

NaN counts as greater than everything, as in PyTorch. onnxruntime's TopK leaves its position open, so it gets no NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

aten = torch.ops.aten


def kth_value(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k-th smallest values along `dim`, counted from one, and where they are."""
    if not x.dim():
        return _of_scalar(x)
    ordered, is_nan = _sorted(x, dim)
    num_numbers = (~is_nan).sum(dim, keepdim=True)
    return _placed(x, ordered.narrow(dim, k - 1, 1), num_numbers < k, dim, keepdim)


def median(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower of the middle values along `dim`, and where they are; NaN where there is one."""
    if not x.dim():
        return _of_scalar(x)
    ordered, is_nan = _sorted(x, dim)
    return _placed(x, ordered.narrow(dim, (x.shape[dim] - 1) // 2, 1), is_nan.any(dim, keepdim=True), dim, keepdim)


def nan_median(x: torch.Tensor, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower of the middle values along `dim` that are numbers, and where they are."""
    if not x.dim():
        return _of_scalar(x)
    ordered, is_nan = _sorted(x, dim)
    num_numbers = (~is_nan).sum(dim, keepdim=True)
    values = ordered.gather(dim, ((num_numbers - 1) // 2).clamp(min=0))
    return _placed(x, values, num_numbers == 0, dim, keepdim)


def median_of_all(x: torch.Tensor) -> torch.Tensor:
    """Return the median of all values."""
    return median(x.reshape(-1), 0)[0] if x.numel() else NotImplemented


def nan_median_of_all(x: torch.Tensor) -> torch.Tensor:
    """Return the median of all values that are numbers."""
    return nan_median(x.reshape(-1), 0)[0] if x.numel() else NotImplemented


def maximum_of_booleans(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether any value along `dim` is true, and the index of the first; only for booleans."""
    if x.dtype is not torch.bool or not x.dim():
        return NotImplemented  # type: ignore[no-any-return]
    return x.any(dim, keepdim), x.to(torch.int32).argmax(dim, keepdim)


def search_sorted(
    boundaries: torch.Tensor,
    x: torch.Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return how many of the sorted `boundaries` [..., M] are before each value of `x` [..., N], by bisection."""
    size = boundaries.shape[-1]
    if not isinstance(size, int):
        return NotImplemented
    if sorter is not None:
        boundaries = boundaries.gather(-1, sorter)
    after_equals = right or side == "right"
    rows = x if boundaries.dim() > 1 else x.reshape(-1)
    low = torch.zeros_like(rows, dtype=torch.int64)
    high = torch.full_like(low, size)
    for _ in range(size.bit_length()):
        middle = (low + high) // 2
        # Searches that are done keep their position, which may be the end, where there is no boundary.
        found = boundaries.gather(-1, middle.clamp(max=size - 1))
        continues = ~(found > rows) if after_equals else ~(found >= rows)
        continues = continues & (low < high)
        low, high = torch.where(continues, middle + 1, low), torch.where(continues, high, middle)
    return low.reshape(x.shape).to(torch.int32 if out_int32 else torch.int64)


def _sorted(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values along `dim` in order with infinity for NaN, and where NaN was."""
    is_nan = _nans(x)
    numbers = torch.where(is_nan, torch.full_like(x, math.inf), x) if x.dtype.is_floating_point else x
    return numbers.sort(dim)[0], is_nan


def _placed(
    x: torch.Tensor, values: torch.Tensor, is_nan: torch.Tensor, dim: int, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `values`, which has one value along `dim`, or NaN, and where in `x` the first like it is."""
    if x.dtype.is_floating_point:
        values = torch.where(is_nan, torch.full_like(values, math.nan), values)
    equal = (x == values) | (_nans(x) & _nans(values))
    places = equal.to(torch.int32).argmax(dim, keepdim=True)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _of_scalar(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone(), torch.zeros_like(x, dtype=torch.int64)


def _nans(x: torch.Tensor) -> torch.Tensor:
    return x.isnan() if x.dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)


# Running maxima, minima and products, by combining each value with the one 1, 2, 4, ... positions before it.


def running_extreme(
    x: torch.Tensor, dim: int, *, replaces: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima or minima of all values up to each one along `dim`, and the index of the last of equal ones.

    A later value takes the place of an earlier one that it `replaces`: greater or equal for maxima, less or equal for
    minima. NaN replaces everything.
    """
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    dim, size, step = dim % x.dim(), x.shape[dim], 1
    if not isinstance(size, int):
        return NotImplemented  # type: ignore[no-any-return]
    values = x.clone()
    along = torch.arange(size, device=x.device).reshape([-1] + [1] * (x.dim() - 1 - dim))
    places = along.expand(x.shape).clone()
    while step < size:
        before, place_before = values.narrow(dim, 0, size - step), places.narrow(dim, 0, size - step)
        value, place = values.narrow(dim, step, size - step), places.narrow(dim, step, size - step)
        stays = replaces(value, before)
        stays = stays | value.isnan() if x.dtype.is_floating_point else stays
        values = torch.cat([values.narrow(dim, 0, step), torch.where(stays, value, before)], dim)
        places = torch.cat([places.narrow(dim, 0, step), torch.where(stays, place, place_before)], dim)
        step *= 2
    return values, places


def running_product(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the products of all values up to each one along `dim`."""
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point else torch.int64
    x = x.to(dtype, copy=True)
    if not x.dim():
        return x
    size, step = x.shape[dim], 1
    if not isinstance(size, int):
        return NotImplemented
    while step < size:
        products = x.narrow(dim, step, size - step) * x.narrow(dim, 0, size - step)
        x = torch.cat([x.narrow(dim, 0, step), products], dim)
        step *= 2
    return x
