"""Gradients of onnxruntime's own operators, created by its optimizer and by exporters when they fuse standard ones.

Their gradients consist of standard operators. FakeQuant and ScaledSum exist only in training builds of onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onnxtool.autodiff.builder import Builder, Dimension, Tensor, sum_to
from onnxtool.autodiff.rules.math import gelu_slope, tanh_gelu_slope
from onnxtool.autodiff.rules.nn import as_matrices, normalized_gradient, rms_gradient, summed_factor, swapped
from onnxtool.autodiff.rules.rule import Backward, Gradient, Refusal, Rule, broadcasting, rule

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
    """Return the gradient with respect to the sum before normalization, and the normalized values."""
    total = _skipped(n, 4)
    epsilon = n.attribute("epsilon", 1e-12)
    # Only its statistics are read, so the bias does not matter, but onnxruntime 1.17 crashes without one.
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
    """Return the gradient of the summands; the sum itself may also be read, as the fourth output."""
    gradient = _parts(n)[0]
    further = n.gradients[3] if len(n.gradients) > 3 else None
    return n.summed(gradient if further is None else gradient + further, n.index)


def _skip_scale(n: Backward) -> Tensor:
    return n.summed(n.dy * _parts(n)[1], n.index)


CONTRIB: dict[str, Rule] = {
    "BiasGelu": broadcasting(_bias_gelu, _bias_gelu),
    "FakeQuant": Rule((lambda n: n.build.where(n.y(1), n.dy, 0.0),), num_outputs=2),  # zero for out-of-range elements
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


# Attention: the probabilities are recomputed; the rest is four matrix products.
#
# Letters: B samples, S queries, T keys, N heads, D the width of a head. With P = softmax(Q K' scale + mask), O = P V:
# dV = P' dO, dP = dO V', dS = P (dP - sum(dP P)), dQ = dS K scale, dK = dS' Q scale.


_BIAS_OF_SCORES = 5  # the same input index for both operators


def _transposed(matrices: Tensor) -> Tensor:
    return matrices.transpose([0, 1, 3, 2])


def _split_heads(build: Builder, rows: Tensor, num_heads: int) -> Tensor:
    """Reshape [B, S, N D] to [B, N, S, D]."""
    return rows.reshape(build.concat([0, 0], [num_heads, -1])).transpose([0, 2, 1, 3])


def _join_heads(build: Builder, heads: Tensor) -> Tensor:
    return heads.transpose([0, 2, 1, 3]).reshape(build.concat([0, 0], [-1]))


def _check(n: Backward, caches: Sequence[int]) -> None:
    if any(n.has(place) for place in caches):
        raise Refusal("with a cache of keys and values")
    if n.attribute("do_rotary", 0):
        raise Refusal("with rotary embeddings")
    if any(gradient is not None for gradient in n.gradients[1:]):
        raise Refusal("through its second output")


def _added(n: Backward, mask: int, queries: Tensor, keys: Tensor) -> list[Tensor]:
    """Return the terms added to the scores: key mask, causal mask, and bias."""
    build, dtype = n.build, n.x(0).dtype
    filler = build.constant(n.attribute("mask_filter_value", -10000.0), dtype)
    added = []
    if n.has(mask):
        if len(n.shape(mask)) != 2:
            raise Refusal("with a mask that does not have two axes")
        kept = build.op("Unsqueeze", n.x(mask), build.axes([1, 2]))
        zero = build.constant(0, kept.dtype)
        added.append(build.where(kept.equals(zero), filler, 0.0))
    if n.attribute("unidirectional", 0):
        lengths = [one.size().slice(2, 3) for one in (queries, keys)]
        first = build.constant(1, lengths[0].dtype)
        added.append(build.op("Trilu", filler.expand(build.concat(*lengths)), first, upper=1))
    if n.has(_BIAS_OF_SCORES):
        added.append(n.x(_BIAS_OF_SCORES))
    return added


def _row_gradients(n: Backward, rows: Sequence[Tensor], width: Dimension, mask: int) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values as rows, and of the scores.

    Args:
        n: the node.
        rows: queries [B, S, N D], and keys and values [B, T, N D].
        width: N D.
        mask: the input that holds the key mask.
    """
    build, num_heads = n.build, n.attribute("num_heads", 1)
    queries, keys, values = (_split_heads(build, one, num_heads) for one in rows)
    scale = n.attribute("scale", 0.0)
    if not scale:
        if not isinstance(width, int):
            raise Refusal("the width of its heads is not fixed")
        scale = 1 / math.sqrt(width // num_heads)
    added = _added(n, mask, queries, keys)
    dy = _split_heads(build, n.dy, num_heads)
    scores = queries @ _transposed(keys) * scale
    for one in added:
        scores = scores + one
    probabilities = build.op("Softmax", scores, axis=-1)
    slopes = dy @ _transposed(values)
    of_scores = (slopes - (slopes * probabilities).sum([-1])) * probabilities
    scaled = of_scores * scale
    parts = scaled @ keys, _transposed(scaled) @ queries, _transposed(probabilities) @ dy
    return (*(_join_heads(build, one) for one in parts), of_scores)


def _attention(n: Backward) -> tuple[Tensor, ...]:
    """Return the gradients of x, of the weights and biases of all three projections, and of the scores."""
    _check(n, (4, 6))
    build, width = n.build, n.shape(1)[-1]
    if not isinstance(width, int):
        raise Refusal("the shape of its weights is not fixed")
    sizes = n.attribute("qkv_hidden_sizes", [width // 3] * 3)
    projected = n.x(0) @ n.x(1)
    if n.has(2):
        projected = projected + n.x(2)
    rows = build.ops("Split", projected, build.axes(sizes), outputs=3, axis=-1)
    *parts, scores = _row_gradients(n, rows, sizes[0], 3)
    slopes = build.op("Concat", *parts, axis=-1)
    flat = [one.reshape(build.concat([-1], one.size().slice(-1, 3))) for one in (n.x(0), slopes)]
    return (
        slopes @ n.x(1).transpose([1, 0]),
        build.op("Gemm", *flat, transA=1),
        slopes.sum([0, 1], keepdims=False),
        scores,
    )


def _multi_head_attention(n: Backward) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, of the bias of all three, and of the scores."""
    _check(n, (6, 7, 8, 9))
    build = n.build
    if not (n.has(1) and n.has(2)) or {len(n.shape(place)) for place in range(3)} != {3}:
        raise Refusal("with packed keys and values, or ones split into heads")
    rows = [n.x(place) for place in range(3)]
    if n.has(3):
        sizes = build.concat(*(one.size().slice(-1, 3) for one in rows))
        biases = build.ops("Split", n.x(3), sizes, outputs=3, axis=0)
        rows = [one + bias for one, bias in zip(rows, biases, strict=True)]
    *parts, scores = _row_gradients(n, rows, n.shape()[-1], 4)
    sums = [part.sum([0, 1], keepdims=False) for part in parts]
    return (*parts, build.op("Concat", *sums, axis=0), scores)


def _of(make: Callable[[Backward], tuple[Tensor, ...]], place: int) -> Gradient:
    return lambda n: n.build.once((n.node, "attention"), lambda: make(n))[place]


def _of_score_bias(make: Callable[[Backward], tuple[Tensor, ...]]) -> Gradient:
    def gradient(n: Backward) -> Tensor:
        scores = _of(make, -1)(n)
        return sum_to(n.build, scores, of=scores, to=n.x(_BIAS_OF_SCORES))

    return gradient


ATTENTION: dict[str, Rule] = {
    "Attention": rule(*(_of(_attention, place) for place in range(3)), None, None, _of_score_bias(_attention)),
    "MultiHeadAttention": rule(
        *(_of(_multi_head_attention, place) for place in range(4)), None, _of_score_bias(_multi_head_attention)
    ),
}
