"""The modes by which Pooling of sentence-transformers makes one vector of the states of tokens.

Letters of shapes: B batch, S sequence, H hidden, N numbers of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.activations import Builder, Floats, Value

Mask = NDArray[np.bool_]

# The input of graphs that leave prompts out when they pool: int64 [B, S], 0 for tokens that the model reads and that
# are not pooled over. Padding may be either.
POOLING_MASK = "pooling_mask"

_SMALLEST_SUM = 1e-9  # what sums of weights are divided by at least


@dataclass(frozen=True)
class PoolingMode:
    """One mode of Pooling, [B, S, H] to [B, H], over the tokens that are pooled over.

    Where that is none of a text, they give what sentence-transformers gives of it alone: zeros, the first token for
    `cls`, and -inf for `max`.

    Attributes:
        flag: its name in configurations from before 5.4.
        apply: in NumPy, with a mask bool [B, S]; or with weights, see `is_weighted`.
        build: as operators, with a mask float [B, S].
        reference: in PyTorch (torch, states, mask int64 [B, S]).
        is_weighted: whether the place of a token in its text, from 1 and counted over all that the model reads, stands
            in the mask where others have 1.
    """

    flag: str
    apply: Callable[[Floats, NDArray[Any]], Floats]
    build: Callable[[Builder, Value, Value], Value]
    reference: Callable[[Any, Any, Any], Any]
    is_weighted: bool = False


def behind_prompts(mask: Mask, lengths: Sequence[int] | NDArray[np.int64]) -> Mask:
    """Return the mask of tokens that are pooled over, bool [B, S], where each text begins with a prompt.

    Args:
        mask: bool [B, S], of real tokens.
        lengths: of B prompts, in tokens.
    """
    return np.asarray(mask & (mask.cumsum(axis=1) > np.asarray(lengths)[:, None]))


def some_prompts(mask: Mask) -> Mask:
    """Return such a mask for prompts of various lengths, none as long as its text, to verify graphs with."""
    counts = mask.sum(axis=1)
    return behind_prompts(mask, counts * (1 + np.arange(len(mask)) % 3) // 4)


def places(mask: Mask) -> NDArray[np.int64]:
    """Return the place of each token from the first real one on, from 1: int64 [B, S]."""
    return np.asarray(np.arange(1, mask.shape[1] + 1) - mask.argmax(axis=1)[:, None])


def build_places(build: Builder, real: Value) -> Value:
    """Append `places` for a mask float [B, S]."""
    ones = build.op("Add", build.op("Sub", real, real), build.number(1.0))
    counted = build.op("CumSum", ones, build.constant(np.array(1, dtype=np.int64)))
    return build.op("Sub", counted, build.cast(build.op("ArgMax", real, axis=1, keepdims=1)))


def places_in_torch(torch: Any, mask: Any) -> Any:
    """Return `places` for a mask int64 [B, S]."""
    return torch.arange(1, mask.shape[1] + 1, device=mask.device) - mask.argmax(dim=1, keepdim=True)


def largest(values: Floats, mask: Mask) -> Floats:
    """Return the largest value over real tokens: [B, S, N] to [B, N]; -inf of a text without."""
    return np.stack([row[valid].max(axis=0, initial=-np.inf) for row, valid in zip(values, mask, strict=True)])


def _sum(states: Floats, mask: NDArray[Any]) -> Floats:
    return np.asarray(np.einsum("bsh,bs->bh", states, mask.astype(states.dtype)))


def _mean(states: Floats, mask: NDArray[Any]) -> Floats:
    return np.asarray(_sum(states, mask) / np.maximum(mask.sum(axis=1, keepdims=True), _SMALLEST_SUM))


def _mean_by_root(states: Floats, mask: NDArray[Any]) -> Floats:
    return np.asarray(_sum(states, mask) / np.sqrt(np.maximum(mask.sum(axis=1, keepdims=True), _SMALLEST_SUM)))


def _first(states: Floats, mask: NDArray[Any]) -> Floats:
    return np.asarray(states[np.arange(len(states)), mask.argmax(axis=1)])


def _last(states: Floats, mask: NDArray[Any]) -> Floats:
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.asarray(states[np.arange(len(states)), last] * mask.any(axis=1, keepdims=True))


def _build_sum(build: Builder, states: Value, real: Value) -> Value:
    return build.reduce("ReduceSum", build.op("Mul", states, build.as_weights(real)))


def _build_division(build: Builder, total: Value, weights: Value, *, root: bool = False) -> Value:
    """Divide [B, H] by the sum of weights [B, S], or by the root of that."""
    count = build.op("Max", build.reduce("ReduceSum", weights, keepdims=1), build.number(_SMALLEST_SUM))
    return build.op("Div", total, build.op("Sqrt", count) if root else count)


def _build_mean(build: Builder, states: Value, real: Value) -> Value:
    return _build_division(build, _build_sum(build, states, real), real)


def _build_mean_by_root(build: Builder, states: Value, real: Value) -> Value:
    return _build_division(build, _build_sum(build, states, real), real, root=True)


def _build_largest(build: Builder, states: Value, real: Value) -> Value:
    is_real = build.op("Greater", build.as_weights(real), build.number(0.0))
    return build.reduce("ReduceMax", build.op("Where", is_real, states, build.number(float("-inf"))))


def _build_first(build: Builder, states: Value, real: Value) -> Value:
    return build.pick(states, real)


def _build_last(build: Builder, states: Value, real: Value) -> Value:
    """Take the token at which the count of real tokens is first complete, wherever the padding is."""
    return build.pick(states, build.op("CumSum", real, build.constant(np.array(1, dtype=np.int64))))


def _mean_in_torch(torch: Any, states: Any, mask: Any, *, root: bool = False) -> Any:
    """Reimers and Gurevych, Sentence-BERT, 2019, section 3."""
    real = mask.unsqueeze(-1).to(states.dtype)
    count = real.sum(dim=1).clamp(min=_SMALLEST_SUM)
    return (states * real).sum(dim=1) / (count.sqrt() if root else count)


def _mean_by_root_in_torch(torch: Any, states: Any, mask: Any) -> Any:
    return _mean_in_torch(torch, states, mask, root=True)


def _largest_in_torch(torch: Any, states: Any, mask: Any) -> Any:
    return states.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).max(dim=1).values


def _first_in_torch(torch: Any, states: Any, mask: Any) -> Any:
    return states[torch.arange(len(states), device=states.device), mask.argmax(dim=1)]


def _last_in_torch(torch: Any, states: Any, mask: Any) -> Any:
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), last] * mask.any(dim=1, keepdim=True)


# By the names that sentence-transformers gives them; several flags concatenate in this order.
POOLING_MODES: dict[str, PoolingMode] = {
    "cls": PoolingMode("pooling_mode_cls_token", _first, _build_first, _first_in_torch),
    "max": PoolingMode("pooling_mode_max_tokens", largest, _build_largest, _largest_in_torch),
    "mean": PoolingMode("pooling_mode_mean_tokens", _mean, _build_mean, _mean_in_torch),
    "mean_sqrt_len_tokens": PoolingMode(
        "pooling_mode_mean_sqrt_len_tokens", _mean_by_root, _build_mean_by_root, _mean_by_root_in_torch
    ),
    # Muennighoff, 2022, arXiv:2202.08904.
    "weightedmean": PoolingMode(
        "pooling_mode_weightedmean_tokens", _mean, _build_mean, _mean_in_torch, is_weighted=True
    ),
    "lasttoken": PoolingMode("pooling_mode_lasttoken", _last, _build_last, _last_in_torch),
}
