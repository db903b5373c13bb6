"""Gradients of quantization and dequantization: the straight-through estimator, with zero for out-of-range numbers.

The gradient of quantized numbers is a float, as if they were not rounded: Bengio et al., arXiv:1308.3432. Together, the
scale gradients of both operators are those in Esser et al., Learned Step Size Quantization, arXiv:1902.08153.
"""

from __future__ import annotations

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, rule

_SCALE, _ZERO_POINT = 1, 2
_DOMAINS = ("", "com.microsoft")

QUANTIZERS = frozenset((domain, "QuantizeLinear") for domain in _DOMAINS)
"""Operators whose integer outputs are quantized numbers, through which a gradient flows."""

READERS = frozenset((domain, "DequantizeLinear") for domain in _DOMAINS) | frozenset(
    ("", op_type)
    for op_type in ("Concat", "Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
)
"""Operators whose rules have a float gradient for quantized inputs."""


def _per_channel(n: Backward) -> bool:
    """Return whether there is one scale per channel instead of a single one."""
    if n.attribute("block_size", 0):
        raise Refusal("it has a scale for each block of an axis")
    return n.sizes(_SCALE) not in ([], [1])


def _aligned(n: Backward, place: int) -> Tensor:
    """Return the scale or zero point in a shape that broadcasts to the data."""
    if not _per_channel(n):
        return n.x(place)
    return n.x(place).reshape([-1, *[1] * (len(n.shape()) - 1 - n.axis(1))])


def _summed_by_scale(n: Backward, gradient: Tensor) -> Tensor:
    """Sum over all elements with the same scale."""
    if not _per_channel(n):
        return n.build.op("ReduceSum", gradient, keepdims=0).reshape(n.x(_SCALE).size())
    return gradient.sum([axis for axis in range(len(n.shape())) if axis != n.axis(1)], keepdims=False)


def _in_range_gradient(n: Backward) -> Tensor:
    """Return the gradient of the quantized numbers, zero where they saturated."""
    kind = n.node.outputs[0].dtype
    if kind is None or not kind.is_integer():
        raise Refusal("its output is not of integers")
    scale = _aligned(n, _SCALE)
    dtype = scale.dtype
    rounded = n.build.op("Round", n.x(0).cast(dtype) / scale)
    shifted = rounded + _aligned(n, _ZERO_POINT).cast(dtype) if n.has(_ZERO_POINT) else rounded
    lowest = -(1 << (kind.bitwidth - 1)) if kind.is_signed() else 0
    is_saturated = n.build.op("Or", shifted < lowest, shifted > lowest + (1 << kind.bitwidth) - 1)
    return n.build.where(is_saturated, 0.0, n.dy.cast(dtype))


def _quantize_scale(n: Backward) -> Tensor:
    scale = _aligned(n, _SCALE)
    return -_summed_by_scale(n, _in_range_gradient(n) * n.x(0).cast(scale.dtype) / (scale * scale))


def _dequantize_scale(n: Backward) -> Tensor:
    numbers = n.x(0).cast(n.dy.dtype)
    if n.has(_ZERO_POINT):
        numbers = numbers - _aligned(n, _ZERO_POINT).cast(n.dy.dtype)
    return _summed_by_scale(n, n.dy * numbers).cast(n.x(_SCALE).dtype)


QUANTIZATION: dict[str, Rule] = {
    "DequantizeLinear": rule(lambda n: n.dy * _aligned(n, _SCALE).cast(n.dy.dtype), _dequantize_scale),
    "QuantizeLinear": rule(lambda n: (_in_range_gradient(n) / _aligned(n, _SCALE)).cast(n.x(0).dtype), _quantize_scale),
}
