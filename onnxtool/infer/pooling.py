"""Turn what a model gives for each token into one vector for each text, and vectors into figures.

Letters of shapes: B batch, S sequence, H hidden size, V vocabulary, N texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.sentence_modules import pooling_modes as stated_modes
from onnxtool.errors import InputError
from onnxtool.reports import Json

Floats = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]

_TINY = 1e-9  # keeps a row without tokens from being divided by zero


def _mean(states: Floats, mask: Mask) -> Floats:
    """Average the states of real tokens."""
    return np.asarray(_sum(states, mask) / np.maximum(mask.sum(axis=1, keepdims=True), _TINY))


def _mean_by_root(states: Floats, mask: Mask) -> Floats:
    """Sum the states of real tokens and divide by the root of their number."""
    return np.asarray(_sum(states, mask) / np.sqrt(np.maximum(mask.sum(axis=1, keepdims=True), _TINY)))


def _weighted_mean(states: Floats, mask: Mask) -> Floats:
    """Average the states of real tokens, the first with weight 1, the second with weight 2 and so on."""
    weights = np.cumsum(mask, axis=1) * mask
    total = np.einsum("bsh,bs->bh", states, weights)
    return np.asarray(total / np.maximum(weights.sum(axis=1, keepdims=True), _TINY))


def _maximum(states: Floats, mask: Mask) -> Floats:
    return maximum_of_tokens(states, mask)


def _first(states: Floats, mask: Mask) -> Floats:
    return np.asarray(states[np.arange(len(states)), mask.argmax(axis=1)])


def _last(states: Floats, mask: Mask) -> Floats:
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.asarray(states[np.arange(len(states)), last])


def _sum(states: Floats, mask: Mask) -> Floats:
    return np.asarray(np.einsum("bsh,bs->bh", states, mask.astype(states.dtype)))


# The modes of sentence-transformers' Pooling.
POOLINGS: dict[str, Callable[[Floats, Mask], Floats]] = {
    "cls": _first,
    "max": _maximum,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}


def pooling_modes(config: dict[str, Json]) -> tuple[str, ...]:
    """Read the modes from a Pooling configuration of any age; the mean where it names none.

    Raises:
        InputError: a mode is unknown.
    """
    modes = stated_modes(config)
    for mode in modes:
        if mode not in POOLINGS:
            raise InputError(f"unknown pooling mode {mode!r}", f"onnxtool knows {', '.join(POOLINGS)}")
    return modes


def pool(states: Floats, mask: Mask, modes: tuple[str, ...]) -> Floats:
    """Pool `states`, float [B, S, H], over the tokens where `mask`, bool [B, S], is true.

    Returns:
        float32 [B, H], or [B, M * H] for M modes.
    """
    states = states.astype(np.float32, copy=False)
    return np.concatenate([POOLINGS[mode](states, mask) for mode in modes], axis=1).astype(np.float32)


def maximum_of_tokens(values: Floats, mask: Mask) -> Floats:
    """Take the largest value over real tokens: float [B, S, V] to [B, V].

    Row by row: one copy of a text's values at most, not of the whole batch's, which may be hundreds of megabytes.
    """
    return np.stack([row[valid].max(axis=0) for row, valid in zip(values, mask, strict=True)])


def splade_weights(logits: Floats, mask: Mask, *, strategy: str = "max", activation: str = "relu") -> Floats:
    """Turn logits, float [B, S, V], into the weights of terms, float32 [B, V].

    SPLADE takes `log1p(relu(logits))` of every token and then the largest over the tokens (Formal et al., 2021,
    arXiv:2109.10086). Both functions are monotonic, so the largest is taken first and the logarithm of V values
    instead of S times V. The older sum (arXiv:2107.05720) cannot be turned around.
    """
    if strategy == "max":
        return _activate(maximum_of_tokens(logits, mask), activation)
    if strategy == "sum":
        rows = zip(logits, mask, strict=True)
        return np.stack([_activate(row[valid], activation).sum(axis=0) for row, valid in rows])
    raise InputError(f"unknown pooling_strategy {strategy!r} of SpladePooling", "onnxtool knows max and sum")


def _activate(logits: Floats, activation: str) -> Floats:
    weights = np.log1p(np.maximum(logits.astype(np.float32), 0.0))
    if activation == "relu":
        return weights
    if activation == "log1p_relu":  # OpenSearch's models, arXiv:2504.14839
        return np.log1p(weights)
    raise InputError(f"unknown activation_function {activation!r} of SpladePooling", "onnxtool knows relu, log1p_relu")


def normalize(vectors: Floats) -> Floats:
    """Scale each vector, float [N, H], to length one; a vector of zeros stays."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _TINY))


def cosine_similarities(vectors: Floats) -> NDArray[np.float64]:
    """Return the cosine of every pair of vectors: float [N, H] to float64 [N, N]."""
    unit = normalize(vectors.astype(np.float64))
    return np.asarray(np.clip(unit @ unit.T, -1.0, 1.0))


def softmax(logits: Floats) -> NDArray[np.float64]:
    """Turn logits into probabilities over the last axis, in float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True).astype(np.float64))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def sigmoid(logits: Floats) -> NDArray[np.float64]:
    """Turn each logit into a probability of its own, in float64."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64))))
