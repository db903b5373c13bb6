"""Attention as products, a softmax and as few passes over the scores as there can be, for AOTAutograd to trace.

As one operator it has no translation, and PyTorch's own way to take it apart scales queries and keys each on their own,
transposes the gradient of the keys twice, and looks through all probabilities for rows that are masked as a whole.
Letters of shapes: N batches and heads, L queries, S keys, E and V features.
"""

from __future__ import annotations

import math

import torch

from onnxtool.torch_backend.lower.random import draws_as_eager, kept_shares

_DTYPES = (torch.float32, torch.float64)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Do what `scaled_dot_product_attention` does, for queries [..., L, E], keys [..., S, E] and values [..., S, V].

    None where the leading dimensions differ, where there are none, or in half precision, also by autocast, in which
    queries and keys have to be scaled each on their own.
    """
    if torch.is_autocast_enabled(query.device.type) or (dropout_p and not draws_as_eager(query, dropout_p)):
        return None
    if query.dtype not in _DTYPES or query.dim() < 3 or (is_causal and attn_mask is not None):
        return None
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return None
    if enable_gqa and query.dim() == 4:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    leading = query.shape[:-2]
    if key.shape[:-2] != leading or value.shape[:-2] != leading or key.device != query.device:
        return None
    queries, keys, values = (tensor.flatten(0, -3) for tensor in (query, key, value))
    scores = torch.bmm(queries, keys.transpose(1, 2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = scores.unflatten(0, leading)
    kept = None
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores + _finite(past, query.dtype)[0]  # no row is masked as a whole
    elif attn_mask is not None:
        bias, kept = _finite(attn_mask, query.dtype)
        scores = scores + bias
    probabilities = torch.softmax(scores, -1)
    if dropout_p:
        probabilities = probabilities * kept_shares(probabilities, dropout_p)
    result = torch.bmm(probabilities.flatten(0, -3), values).unflatten(0, leading)
    return result if kept is None else result * kept


def _finite(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is added to the scores, and 1 for the rows of which something counts, 0 for the others.

    Minus infinity becomes the half of the lowest number: beside any other score, its exponential is zero as well. A row
    of nothing else has no NaN then, and what comes out for it is multiplied by 0.
    """
    lowest = torch.finfo(dtype).min / 2
    if mask.dtype is torch.bool:
        counts = mask.any(-1, keepdim=True)
        bias = torch.where(mask, 0.0, lowest).to(dtype)
    else:
        counts = mask.amax(-1, keepdim=True) > -torch.inf
        bias = mask.clamp(min=lowest)
    return bias, counts.to(dtype)
