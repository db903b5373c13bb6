"""Cases of quantizing and dequantizing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.autodiff.cases.case import Case, normal, positive

_BYTE = np.array(100, np.uint8)
_SIGNED = np.array([-3, 0, 5], np.int8)
_CODES = np.random.default_rng(8).integers(-128, 128, (2, 3, 4)).astype(np.int8)


def _straight_through(axis: int, lowest: int, highest: int) -> Any:
    """Return quantizing and dequantizing with PyTorch's gradient of all but the rounding, which counts as none."""

    def apply(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        if scale.ndim:
            shape = [-1 if place == axis % x.ndim else 1 for place in range(x.ndim)]
            scale, zero = scale.reshape(shape), zero.reshape(shape)
        ratio = x / scale
        number = ratio + (ratio.round() - ratio).detach() + zero
        # Of a number that is exactly an end of the range, the gradient goes through.
        inside = (number >= lowest) & (number <= highest)
        return (torch.where(inside, number, number.detach().clamp(lowest, highest)) - zero) * scale

    return apply


def _dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    number = codes.double() if zero is None else codes.double() - zero[:, None]
    return number * (scale if scale.ndim == 0 else scale[:, None])


def _fake(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, scale.item(), int(zero), 0, 255)


QUANTIZATION = (
    # The ranges are smaller than the numbers, so that some are outside.
    Case(
        "QuantizeLinear",
        (normal(3, 4) * 2, np.array(0.01), _BYTE),
        _fake,
        by=(0,),
        weights=(1,),
        constants=(1,),
        reference=False,
        dequantized=True,
    ),
    Case(
        "QuantizeLinear",
        (normal(3, 4) * 2, np.array(0.01), _BYTE),
        _straight_through(0, 0, 255),
        weights=(1,),
        note="by its scale",
        reference=False,
        dequantized=True,
    ),
    Case(
        "QuantizeLinear",
        (normal(2, 3, 4), positive(3) / 100, _SIGNED),
        _straight_through(1, -128, 127),
        weights=(1,),
        note="by channel",
        reference=False,
        dequantized=True,
    ),
    Case(
        "QuantizeLinear",
        (normal(2, 4, 3), positive(3) / 100, _SIGNED),
        _straight_through(-1, -128, 127),
        {"axis": -1},
        weights=(1,),
        note="by the last axis",
        reference=False,
        dequantized=True,
    ),
    Case(
        "QuantizeLinear",
        (normal(3, 4) * 2, np.array(0.01), _BYTE),
        _straight_through(0, 0, 255),
        domain="com.microsoft",
        weights=(1,),
        reference=False,
        dequantized=True,
    ),
    Case("DequantizeLinear", (_CODES, np.array(0.02)), _dequantize, weights=(1,), reference=False),
    Case(
        "DequantizeLinear",
        (_CODES, positive(3) / 100, _SIGNED),
        _dequantize,
        weights=(1,),
        note="by channel",
        reference=False,
    ),
    Case(
        "DequantizeLinear",
        (_CODES, positive(3) / 100, _SIGNED),
        _dequantize,
        {"axis": 1},
        domain="com.microsoft",
        weights=(1,),
        reference=False,
    ),
)
