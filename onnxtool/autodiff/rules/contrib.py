"""Gradients of onnxruntime's own operators, which its optimizer and exporters fuse standard operators into.

Their gradients consist of standard operators. FakeQuant and ScaledSum exist only in training builds of onnxruntime.
"""

from __future__ import annotations

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.math import gelu_slope, tanh_gelu_slope
from onnxtool.autodiff.rules.nn import as_matrices, normalized_gradient, rms_gradient, summed_factor, swapped
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, broadcasting, rule

_LEFT, _RIGHT = 0, 1


def _bias_gelu(n: Backward) -> Tensor:
    return n.dy * gelu_slope(n, n.x(0) + n.x(1))


def _fast_gelu(n: Backward) -> Tensor:
    return n.dy * tanh_gelu_slope(n, n.x(0) + n.x(1) if n.has(1) else n.x(0))


def _quick_gelu(n: Backward) -> Tensor:
    scaled = n.x(0) * n.attribute("alpha", 1.702)
    gate = n.build.op("Sigmoid", scaled)
    return n.dy * (gate + gate * (1.0 - gate) * scaled)


def _fused_matmul(n: Backward) -> Tensor:
    if n.attribute("transBatchA", 0) or n.attribute("transBatchB", 0):
        raise Refusal("it transposes batch axes")
    ranks = len(n.shape(0)), len(n.shape(1))
    if min(ranks) < 2:
        raise Refusal("it multiplies a vector")
    left, right, dy = as_matrices(n)
    turned = [bool(n.attribute("transA", 0)), bool(n.attribute("transB", 0))]
    factors = [
        swapped(one, rank) if turn else one for one, rank, turn in zip((left, right), ranks, turned, strict=True)
    ]
    gradient = (
        dy @ swapped(factors[_RIGHT], ranks[_RIGHT]) if n.index == _LEFT else swapped(factors[_LEFT], ranks[_LEFT]) @ dy
    )
    if turned[n.index]:
        gradient = swapped(gradient, max(ranks))
    scaled = gradient if n.attribute("alpha", 1.0) == 1 else gradient * n.attribute("alpha", 1.0)
    return summed_factor(n, scaled, n.shape(n.index), n.x(n.index))


def _skipped(n: Backward, bias: int) -> Tensor:
    """Return the sum that a SkipLayerNormalization normalizes."""
    added = n.x(0) + n.x(1)
    return added + n.x(bias) if n.has(bias) else added


def _skip_layer_norm(n: Backward) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to the sum that is normalized, and the normalized values."""
    total = _skipped(n, 4)
    epsilon = n.attribute("epsilon", 1e-12)
    # Only its statistics are read: the bias does not matter, but onnxruntime 1.17 crashes without one.
    inputs = total, n.x(2), n.x(2)
    _, mean, deviation = n.build.ops("LayerNormalization", *inputs, outputs=3, axis=-1, epsilon=epsilon)
    normalized = (total - mean) * deviation
    return normalized_gradient(n.dy * n.x(2), normalized, deviation, [-1]), normalized


def _skip_rms_norm(n: Backward) -> tuple[Tensor, Tensor]:
    total = _skipped(n, 3)
    mean = (total * total).mean([-1]) + n.attribute("epsilon", 1e-12)
    deviation = n.build.op("Reciprocal", n.build.op("Sqrt", mean))
    return rms_gradient(n.dy * n.x(2), total, deviation, [-1]), total * deviation


def _parts(n: Backward) -> tuple[Tensor, Tensor]:
    return (_skip_layer_norm if n.node.op_type == "SkipLayerNormalization" else _skip_rms_norm)(n)


def _through_skip(n: Backward) -> Tensor:
    """Return the gradient of the summands; the sum may be read as well, as the fourth output."""
    gradient = _parts(n)[0]
    further = n.gradients[3] if len(n.gradients) > 3 else None
    return n.summed(gradient if further is None else gradient + further, n.index)


def _skip_scale(n: Backward) -> Tensor:
    return n.summed(n.dy * _parts(n)[1], n.index)


CONTRIB: dict[str, Rule] = {
    "BiasGelu": broadcasting(_bias_gelu, _bias_gelu),
    "FakeQuant": Rule((lambda n: n.build.where(n.y(1), n.dy, 0.0),), num_outputs=2),  # zero where it was out of range
    "FastGelu": broadcasting(_fast_gelu, _fast_gelu),
    "FusedMatMul": rule(_fused_matmul, _fused_matmul),
    "Gelu": rule(lambda n: n.dy * gelu_slope(n, n.x(0))),
    "QuickGelu": rule(_quick_gelu),
    "ScaledSum": Rule((lambda n: n.dy * n.attribute(f"scale_{n.index}", 1.0),), variadic=True),
    "SkipLayerNormalization": Rule(
        (_through_skip, _through_skip, _skip_scale, lambda n: n.summed(n.dy, 3), _through_skip), outputs=(0, 3)
    ),
    "SkipSimplifiedLayerNormalization": Rule(
        (_through_skip, _through_skip, _skip_scale, _through_skip), outputs=(0, 3)
    ),
}
