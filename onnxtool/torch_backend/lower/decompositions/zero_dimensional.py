"""Operators that treat a tensor without dimensions separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

aten = torch.ops.aten

Dims = int | Sequence[int] | None


def over_extremes(
    x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False, *, reduce: torch._ops.OpOverload
) -> torch.Tensor:
    """Name all dimensions where none is named: the translation needs them."""
    if not x.dim():
        return x.clone()
    if dim:
        return NotImplemented
    result: torch.Tensor = reduce(x, list(range(x.dim())), keepdim)
    return result


def single_value(
    x: torch.Tensor, *_dims: object, result: Callable[[torch.Tensor], torch.Tensor], **_options: object
) -> torch.Tensor:
    """Return `result` of a single value; the translation reduces a dimension that is not there."""
    return NotImplemented if x.dim() else result(x)


def mean(x: torch.Tensor, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a single value as it is."""
    return NotImplemented if x.dim() else x.to(dtype or x.dtype, copy=True)


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Swap two dimensions where there are two."""
    return aten.permute.default(x, [1, 0]) if x.dim() == 2 else aten.view.default(x, x.shape)


def repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """Expand a single value to the repeated dimensions."""
    if x.dim() or not repeats:
        return NotImplemented if repeats else x.clone()
    return aten.expand.default(x, repeats).clone(memory_format=torch.contiguous_format)


def same(x: torch.Tensor) -> torch.Tensor:
    """Return a view of all of `x`."""
    return aten.view.default(x, x.shape)
