"""The softmax of attention, whose masked rows are zero."""

from __future__ import annotations

import torch

aten = torch.ops.aten


def safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the softmax, with zeros in rows of nothing but minus infinity: those that attention masks.

    Two numbers tell such a row, where PyTorch's decomposition compares every element: its softmax is NaN, and its sum
    is minus infinity, which the sum of a row with a NaN or with plus infinity is not.
    """
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    softmax = torch.softmax(x, dim, dtype)
    first, total = aten.slice.Tensor(softmax, dim, 0, 1), aten.sum.dim_IntList(x, [dim], True)
    is_masked = first.isnan() & (total == -torch.inf)
    return torch.where(is_masked, torch.zeros((), dtype=softmax.dtype, device=x.device), softmax)
