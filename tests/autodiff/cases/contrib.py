"""Cases of onnxruntime's own operators, which onnx.reference does not know."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from tests.autodiff.cases.case import Case, inside, normal


def _gelu_of_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return functional.gelu(a + b)


def _fast_gelu(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.gelu(x if bias is None else x + bias, approximate="tanh")


def _fake_quant(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, scale.item(), int(zero.item()), 0, 255)


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
)
