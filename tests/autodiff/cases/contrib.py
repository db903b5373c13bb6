"""Cases of onnxruntime's own operators, which onnx.reference does not know."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from tests.autodiff.cases.case import Case, inside, normal, positive

_EPSILON = 1e-5


def _gelu_of_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.gelu(a + b)


def _fast_gelu(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


def _layer_norm(
    x: torch.Tensor,
    skip: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    return functional.layer_norm(total, scale.shape, scale, shift, _EPSILON), None, None, total


def _rms_norm(
    x: torch.Tensor, skip: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    total = x + skip if bias is None else x + skip + bias
    return functional.rms_norm(total, scale.shape, scale, _EPSILON)


def _fake_quant(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, scale.item(), int(zero.item()), 0, 255)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: torch.Tensor | float = 0.0, scale: float | None = None
) -> torch.Tensor:
    """Attend with two heads."""
    heads = [one.unflatten(-1, (2, -1)).transpose(1, 2) for one in (q, k, v)]
    scores = heads[0] @ heads[1].mT * (scale or heads[0].shape[-1] ** -0.5) + added
    return (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)


def _self_attention(
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    _: None = None,
    added: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    if mask is not None:
        added = added + torch.where(mask == 0, -10000.0, 0.0)[:, None, None]
    q, k, v = (x @ weights + bias).chunk(3, -1)
    return _attend(q, k, v, added)


def _causal(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    later = torch.full((x.shape[1], x.shape[1]), -10000.0).triu(1)
    q, k, v = (x @ weights + bias).chunk(3, -1)
    return _attend(q, k, v, later, 0.3)


def _cross_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    added: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    if bias is not None:
        q, k, v = (one + part for one, part in zip((q, k, v), bias.split([4, 4, 6]), strict=True))
    if mask is not None:
        added = added + torch.where(mask == 0, -10000.0, 0.0)[:, None, None]
    return _attend(q, k, v, added)


_MASK = np.array([[1, 1, 0], [1, 1, 1]], np.int32)

CONTRIB = (
    Case("Gelu", (normal(3, 4) * 2,), functional.gelu, domain="com.microsoft", reference=False),
    Case("BiasGelu", (normal(2, 3, 4), normal(4)), _gelu_of_sum, domain="com.microsoft", reference=False),
    Case("FastGelu", (normal(2, 3, 4),), _fast_gelu, domain="com.microsoft", reference=False),
    Case(
        "FastGelu", (normal(2, 3, 4), normal(4)), _fast_gelu, note="with bias", domain="com.microsoft", reference=False
    ),
    Case(
        "QuickGelu",
        (normal(3, 4),),
        lambda x: x * torch.sigmoid(1.5 * x),
        {"alpha": 1.5},
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "FusedMatMul",
        (normal(2, 3), normal(3, 4)),
        lambda a, b: 0.5 * a @ b,
        {"alpha": 0.5},
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "FusedMatMul",
        (normal(5, 2, 3), normal(5, 4, 3)),
        lambda a, b: a @ b.mT,
        {"transB": 1},
        note="second transposed",
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "FusedMatMul",
        (normal(2, 5, 3, 2), normal(1, 5, 3, 4)),
        lambda a, b: a.mT @ b,
        {"transA": 1},
        note="first transposed",
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "FusedMatMul",
        (normal(2, 3, 2), normal(4, 3)),
        lambda a, b: a.mT @ b.mT * 2,
        {"transA": 1, "transB": 1, "alpha": 2.0},
        note="both transposed",
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "SkipLayerNormalization",
        (normal(2, 3, 4), normal(2, 3, 4), positive(4), normal(4), normal(4)),
        _layer_norm,
        {"epsilon": _EPSILON},
        outputs=4,
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "SkipLayerNormalization",
        (normal(2, 3, 4), normal(3, 4), positive(4)),
        lambda *x: _layer_norm(*x)[0],
        {"epsilon": _EPSILON},
        note="repeated",
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "SkipSimplifiedLayerNormalization",
        (normal(2, 3, 4), normal(2, 3, 4), positive(4)),
        _rms_norm,
        {"epsilon": _EPSILON},
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "SkipSimplifiedLayerNormalization",
        (normal(2, 3, 4), normal(2, 3, 4), positive(4), normal(4)),
        _rms_norm,
        {"epsilon": _EPSILON},
        note="with bias",
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "FakeQuant",
        (inside(3, 4) * 3, np.array(0.01, np.float32), np.array(128, np.float32)),
        _fake_quant,
        outputs=2,
        domain="com.microsoft",
        onnxruntime=False,
        reference=False,
    ),
    Case(
        "ScaledSum",
        (normal(3, 4), normal(3, 4)),
        lambda a, b: 0.5 * a + 2 * b,
        {"scale_0": 0.5, "scale_1": 2.0},
        domain="com.microsoft",
        onnxruntime=False,
    ),
    Case(
        "ScaledSum",
        (normal(3), normal(3), normal(3)),
        lambda a, b, c: a + b - c,
        {"scale_2": -1.0},
        domain="com.microsoft",
        note="of three",
        onnxruntime=False,
    ),
    Case(
        "Attention",
        (normal(2, 3, 4), normal(4, 12), normal(12)),
        _self_attention,
        {"num_heads": 2},
        domain="com.microsoft",
        reference=False,
        weights=(1, 2),
    ),
    Case(
        "Attention",
        (normal(2, 3, 4), normal(4, 12), normal(12), _MASK, None, normal(1, 2, 3, 3)),
        _self_attention,
        {"num_heads": 2},
        domain="com.microsoft",
        reference=False,
        weights=(1, 2),
        note="masked and biased",
    ),
    Case(
        "Attention",
        (normal(2, 3, 4), normal(4, 12), normal(12)),
        _causal,
        {"num_heads": 2, "unidirectional": 1, "scale": 0.3},
        domain="com.microsoft",
        reference=False,
        weights=(1, 2),
        note="causal",
    ),
    Case(
        "MultiHeadAttention",
        (normal(2, 5, 4), normal(2, 3, 4), normal(2, 3, 6)),
        _cross_attention,
        {"num_heads": 2, "scale": 0.5**0.5},
        domain="com.microsoft",
        reference=False,
    ),
    Case(
        "MultiHeadAttention",
        (normal(2, 5, 4), normal(2, 3, 4), normal(2, 3, 6), normal(14), _MASK, normal(2, 2, 5, 3)),
        _cross_attention,
        {"num_heads": 2, "scale": 0.5**0.5},
        domain="com.microsoft",
        reference=False,
        note="masked and biased",
    ),
)
