"""Gradients of quantizing and dequantizing: straight through the rounding, and none where a number was out of range.

What arrives at quantized numbers is a float, as if they were not rounded: Bengio et al., arXiv:1308.3432. The gradients
with respect to the scales of both operators make up that of Esser et al., Learned Step Size Quantization,
arXiv:1902.08153.
"""

from __future__ import annotations

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, rule

_SCALE, _ZERO_POINT = 1, 2
_DOMAINS = ("", "com.microsoft")

QUANTIZERS = frozenset((domain, "QuantizeLinear") for domain in _DOMAINS)
"""The standard operators whose integers stand for numbers, and so carry a gradient on."""

READERS = frozenset((domain, "DequantizeLinear") for domain in _DOMAINS) | frozenset(
    ("", op_type)
    for op_type in ("Concat", "Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
)
"""The operators whose rules give a gradient of float to quantized numbers that they read."""


def _per_channel(n: Backward) -> bool:
    """Whether there is a scale for each place along an axis, rather than one for all."""
    if n.attribute("block_size", 0):
        raise Refusal("it has a scale for each block of an axis")
    return n.sizes(_SCALE) not in ([], [1])


def _aligned(n: Backward, place: int) -> Tensor:
    """Return scale or zero point so that it broadcasts to what is quantized."""
    if not _per_channel(n):
        return n.x(place)
    return n.x(place).reshape([-1, *[1] * (len(n.shape()) - 1 - n.axis(1))])


def _gathered(n: Backward, gradient: Tensor) -> Tensor:
    """Sum over all that one scale serves."""
    if not _per_channel(n):
        return n.build.op("ReduceSum", gradient, keepdims=0).reshape(n.x(_SCALE).size())
    return gradient.sum([axis for axis in range(len(n.shape())) if axis != n.axis(1)], keepdims=False)


def _arriving(n: Backward) -> Tensor:
    """Return the gradient of the quantized numbers, zero where they are the ends of their range for what is beyond."""
    kind = n.node.outputs[0].dtype
    if kind is None or not kind.is_integer():
        raise Refusal("its numbers are no integers")
    scale = _aligned(n, _SCALE)
    dtype = scale.dtype
    rounded = n.build.op("Round", n.x(0).cast(dtype) / scale)
    shifted = rounded + _aligned(n, _ZERO_POINT).cast(dtype) if n.has(_ZERO_POINT) else rounded
    lowest = -(1 << (kind.bitwidth - 1)) if kind.is_signed() else 0
    outside = n.build.op("Or", shifted < lowest, shifted > lowest + (1 << kind.bitwidth) - 1)
    return n.build.where(outside, 0.0, n.dy.cast(dtype))


def _quantize(n: Backward) -> Tensor:
    return (_arriving(n) / _aligned(n, _SCALE)).cast(n.x(0).dtype)


def _quantize_scale(n: Backward) -> Tensor:
    scale = _aligned(n, _SCALE)
    return -_gathered(n, _arriving(n) * n.x(0).cast(scale.dtype) / (scale * scale))


def _dequantize(n: Backward) -> Tensor:
    return n.dy * _aligned(n, _SCALE).cast(n.dy.dtype)


def _dequantize_scale(n: Backward) -> Tensor:
    numbers = n.x(0).cast(n.dy.dtype)
    if n.has(_ZERO_POINT):
        numbers = numbers - _aligned(n, _ZERO_POINT).cast(n.dy.dtype)
    return _gathered(n, n.dy * numbers).cast(n.x(_SCALE).dtype)


QUANTIZATION: dict[str, Rule] = {
    "DequantizeLinear": rule(_dequantize, _dequantize_scale),
    "QuantizeLinear": rule(_quantize, _quantize_scale),
}
