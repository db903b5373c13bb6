"""Which operators AOTAutograd takes apart before a graph is cut and translated."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from onnxtool.torch_backend.lower.decompositions import RULES
from onnxtool.torch_backend.lower.fused_kernels import unless_large
from onnxtool.torch_backend.lower.random import drawn
from onnxtool.torch_backend.lower.torch_onnx import Decompositions, decompositions_but
from onnxtool.torch_backend.lower.translations import translations

aten = torch.ops.aten

_KEPT = (
    # They mean nothing to a compiled graph, and their decompositions are themselves.
    *(aten.lift_fresh.default, aten.lift.default),
    # PyTorch's own kernel is faster than what it would become, and stays where it is.
    aten.embedding_dense_backward.default,
    # Their decompositions read a value, which there is none of while a graph is traced.
    *(aten.bucketize.Tensor, aten.bucketize.Scalar),
    # Its decomposition makes values of another type than it says.
    *(aten.copysign.Tensor, aten.copysign.Scalar),
    # Their decompositions draw other numbers than they do.
    *(aten.uniform.default, aten.normal_functional.default, aten.exponential.default, aten.geometric.default),
    *(aten.cauchy.default, aten.log_normal.default, aten.bernoulli.default, aten.bernoulli.p),
)


@functools.cache
def decompositions() -> Decompositions:
    """Return the table for AOTAutograd."""
    known = translations()
    table = decompositions_but(known.real | known.complex)
    table = {op: function for op, function in table.items() if op not in _KEPT}
    table |= RULES
    table[aten.native_dropout.default] = _native_dropout
    table[aten._safe_softmax.default] = _safe_softmax
    table[aten.rand_like.default] = functools.partial(_noise_like, aten.rand.default)
    table[aten.randn_like.default] = functools.partial(_noise_like, aten.randn.default)
    return unless_large(table)


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the softmax, with zeros in rows that are minus infinity as a whole: those that attention masks.

    Such a row is told by two numbers, where PyTorch's decomposition compares every element: its softmax is NaN, and its
    sum minus infinity, which that of a row with a NaN or with plus infinity is not.
    """
    if not x.dim() or not x.is_floating_point():
        return NotImplemented
    softmax = torch.softmax(x, dim, dtype)
    first, total = aten.slice.Tensor(softmax, dim, 0, 1), aten.sum.dim_IntList(x, [dim], True)
    is_masked = first.isnan() & (total == -torch.inf)
    return torch.where(is_masked, torch.zeros((), dtype=softmax.dtype, device=x.device), softmax)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the mask as eager PyTorch does on the CPU, from the same numbers, and apply it."""
    if not train:
        return x, torch.ones_like(x, dtype=torch.bool)
    if p >= 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = drawn(x, lambda shape: aten.bernoulli.p(torch.empty(shape, dtype=torch.bool, device=x.device), 1 - p))
    return x * mask.to(x.dtype) * (1.0 / (1.0 - p)), mask


def _noise_like(
    draw: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Draw numbers of the shape of `x` without its values, so that they need not wait for them."""
    if memory_format not in (None, torch.preserve_format) or layout not in (None, torch.strided) or pin_memory:
        return NotImplemented  # what the protocol of decompositions asks for
    return drawn(x, lambda shape: draw(shape, dtype=dtype or x.dtype, device=device or x.device))
