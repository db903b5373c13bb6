"""Attention as two matmuls and a softmax, with few passes over the scores, for AOTAutograd to trace.

As one operator attention has no translation. PyTorch's own decomposition scales queries and keys separately, transposes
the gradient of the keys twice, and searches all probabilities for rows that are masked completely.
Letters of shapes: N batches and heads, L queries, S keys, E and V features.
"""

from __future__ import annotations

import math

import torch

from onnxtool.torch_backend.lower.decompositions.random import DropoutMask, has_scaled_mask

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
    *,
    draw: DropoutMask,
) -> torch.Tensor | None:
    """Compute `scaled_dot_product_attention` for queries [..., L, E], keys [..., S, E] and values [..., S, V].

    `draw` makes the mask of dropout. None where the leading dimensions differ or are missing, and in half precision,
    also by autocast: there, queries and keys have to be scaled separately.
    """
    if torch.is_autocast_enabled(query.device.type) or (dropout_p and not has_scaled_mask(query, dropout_p)):
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
    unmasked = None
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores + _finite(visible, query.dtype)[0]  # no row is masked completely
    elif attn_mask is not None:
        bias, unmasked = _finite(attn_mask, query.dtype)
        scores = scores + bias
    probabilities = torch.softmax(scores, -1)
    if dropout_p:
        probabilities = probabilities * draw(probabilities, dropout_p)
    result = torch.bmm(probabilities.flatten(0, -3), values).unflatten(0, leading)
    return result if unmasked is None else result * unmasked


def _finite(mask: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias of the scores, and a factor of each row: 0 where the whole row is masked, else 1.

    Minus infinity becomes half of the lowest number: beside any other score, its exponential is zero as well. A row
    that is masked completely has no NaN then, and the factor makes its result zero.
    """
    lowest = torch.finfo(dtype).min / 2
    if mask.dtype is torch.bool:
        unmasked = mask.any(-1, keepdim=True)
        bias = torch.where(mask, 0.0, lowest).to(dtype)
    else:
        unmasked = mask.amax(-1, keepdim=True) > -torch.inf
        bias = mask.clamp(min=lowest)
    return bias, unmasked.to(dtype)
