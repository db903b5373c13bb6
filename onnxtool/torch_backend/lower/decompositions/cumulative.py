"""Running maxima, minima and products, by combining each value with the one 1, 2, 4, ... positions before it."""

from __future__ import annotations

from collections.abc import Callable

import torch


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
