"""In which order of its dimensions a tensor lies in memory: onnxruntime reads it in that order without a copy."""

from __future__ import annotations

import torch


def order_in_memory(value: object) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a tensor is contiguous; None where it is, or is so in no order.

    Sizes and strides have to be known.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())) or value.is_contiguous():
        return None
    order = tuple(sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), -value.shape[dim])))
    return order if value.permute(order).is_contiguous() else None
