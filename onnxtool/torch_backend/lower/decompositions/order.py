"""Positions in sorted rows, running maxima and products; NaN is greater than everything, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch

aten = torch.ops.aten


def maximum_of_booleans(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether any value along `dim` is true, and the index of the first; for booleans only."""
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
    """Return how many of the sorted `boundaries` [..., M] precede each value of `x` [..., N], by bisection."""
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
        # Finished searches keep their position, which may be the end, where there is no boundary.
        found = boundaries.gather(-1, middle.clamp(max=size - 1))
        continues = ~(found > rows) if after_equals else ~(found >= rows)
        continues = continues & (low < high)
        low, high = torch.where(continues, middle + 1, low), torch.where(continues, high, middle)
    return low.reshape(x.shape).to(torch.int32 if out_int32 else torch.int64)


def bucketize(
    x: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    """Return the bucket of each value; PyTorch's own decomposition reads a single value, which a traced graph lacks."""
    return search_sorted(boundaries, x, out_int32=out_int32, right=right)


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
