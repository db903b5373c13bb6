"""Gradients of onnxruntime's fused attention: the probabilities are recomputed, and the rest is four matrix products.

Letters: B samples, S queries, T keys, N heads, D the width of a head. With P = softmax(Q K' scale + mask) and O = P V:
dV = P' dO, dP = dO V', dS = P (dP - sum(dP P)), dQ = dS K scale, dK = dS' Q scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onnxtool.autodiff.broadcasting import sum_to
from onnxtool.autodiff.builder import Builder, Dimension, Tensor
from onnxtool.autodiff.rules.rule import Backward, Gradient, Refusal, Rule, rule

_BIAS_OF_SCORES = 5  # the input of both operators


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
    """Return the terms added to the scores: a key mask, a causal mask, and a bias."""
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
    """Return the gradients of queries, keys and values as rows, and that of the scores.

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
