"""Functions of one or two values that are a few operators of ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch._decomp.decompositions import silu_backward

_LAST_TERM_OF_SINC = 6


def relu(x: torch.Tensor) -> torch.Tensor:
    """Replace negative integers by zero; floats are left to the translation."""
    return NotImplemented if x.dtype.is_floating_point else torch.where(x > 0, x, torch.zeros_like(x))


def silu_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `x * sigmoid(x)` by that product, which a gated layer computes again anyway."""
    if x.dtype not in (torch.float32, torch.float64):
        return silu_backward(gradient, x)  # computes in float32
    sigmoid = torch.sigmoid(x)
    return gradient * (sigmoid + x * sigmoid * (1 - sigmoid))


def at_least(x: torch.Tensor, least: float) -> torch.Tensor:
    """Take the translation of `clamp`: that of `clamp_min` makes an infinity the largest number."""
    return torch.ops.aten.clamp.default(x, least)


def at_most(x: torch.Tensor, most: float) -> torch.Tensor:
    """Take the translation of `clamp`: that of `clamp_max` makes an infinity the smallest number."""
    return torch.ops.aten.clamp.default(x, None, most)


def number_of_two(
    x: torch.Tensor, y: torch.Tensor, *, select: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the one that `select` takes, maximum or minimum, and the other one for a NaN."""
    x, y = torch.broadcast_tensors(x, y)
    if not x.dtype.is_floating_point:
        return select(x, y)
    return torch.where(x.isnan(), y, torch.where(y.isnan(), x, select(x, y)))


def hypotenuse(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return sqrt(x^2 + y^2) from the ratio of the smaller one to the larger, whose square is finite.

    Infinite where either is, whatever the other one is.
    """
    x, y = x.abs(), y.abs()
    larger, smaller = torch.maximum(x, y), torch.minimum(x, y)
    ratio = smaller / torch.where(larger == 0, torch.ones_like(larger), larger)
    result = larger * torch.sqrt(1 + ratio * ratio)
    return torch.where(x.isinf() | y.isinf(), torch.full_like(result, math.inf), result)


def spherical_bessel_j0(x: torch.Tensor) -> torch.Tensor:
    """Return sin(x) / x: near zero by its series, one at zero, zero at infinity."""
    square = x * x
    series = torch.zeros_like(x)
    for term in reversed(range(_LAST_TERM_OF_SINC + 1)):
        series = series * square + (-1) ** term / math.factorial(2 * term + 1)
    result = torch.where(x.abs() < 0.5, series, torch.sin(x) / x)
    return torch.where(x.isinf(), torch.zeros_like(x), result)
