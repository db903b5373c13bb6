"""Products of all values, and of three tensors."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch

aten = torch.ops.aten


def product(x: torch.Tensor, dims: Sequence[int] | None, *, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply along one dimension after the other."""
    x = x.to(output_dtype) if output_dtype else x
    for dim in sorted(range(x.dim()) if dims is None else dims, reverse=True):
        x = aten.prod.dim_int(x, dim)
    return x


def trilinear(
    x: torch.Tensor,
    y: torch.Tensor,
    z: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """Sum products of three tensors, of which each lacks some of the dimensions, as two matmuls."""
    letters = string.ascii_lowercase[: x.dim() + len(expand1)]
    inputs = (
        "".join(letter for dim, letter in enumerate(letters) if dim not in e) for e in (expand1, expand2, expand3)
    )
    kept = "".join(letter for dim, letter in enumerate(letters) if dim not in sumdim)
    return torch.einsum(f"{','.join(inputs)}->{kept}", x, y, z)
