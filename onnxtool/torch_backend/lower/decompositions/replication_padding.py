"""Padding with copies of border values, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

aten = torch.ops.aten


def replication_pad(x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Pad where some width is negative, by index_select; onnxruntime's Pad refuses that.

    Other widths are left to the translation.
    """
    if all(width >= 0 for width in padding):
        return NotImplemented
    for place, (before, after) in enumerate(_pairs(padding)):
        dim = -1 - place
        size = x.shape[dim]
        picked = torch.arange(-before, size + after, device=x.device).clamp(min=0, max=size - 1)
        x = x.index_select(dim, picked)
    return x


def replication_pad_backward(gradient: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """Add the gradients of all copies of a border value to its own."""
    for place, (before, after) in enumerate(_pairs(padding)):
        gradient = _gather_copies(gradient, x.dim() - 1 - place, x.shape[-1 - place], before, after)
    return gradient


def _gather_copies(gradient: torch.Tensor, dim: int, size: int, before: int, after: int) -> torch.Tensor:
    zeros = [0, 0] * (gradient.dim() - 1 - dim) + [max(-before, 0), max(-after, 0)]
    gradient = aten.constant_pad_nd.default(gradient, zeros) if any(zeros) else gradient
    before, after = max(before, 0), max(after, 0)
    if not before and not after:
        return gradient
    if size == 1:
        return gradient.sum(dim, keepdim=True)
    first = gradient.narrow(dim, 0, before + 1).sum(dim, keepdim=True)
    last = gradient.narrow(dim, before + size - 1, after + 1).sum(dim, keepdim=True)
    return torch.cat([first, gradient.narrow(dim, before + 1, size - 2), last], dim)


def _pairs(padding: Sequence[int]) -> list[tuple[int, int]]:
    """Return the widths before and after each dimension, the last one first."""
    return list(zip(padding[::2], padding[1::2], strict=True))
