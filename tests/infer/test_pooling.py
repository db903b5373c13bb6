"""Pooling and scores are those of their definitions, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.infer.pooling import (
    POOLINGS,
    cosine_similarities,
    maximum_of_tokens,
    normalize,
    pool,
    pooling_modes,
    sigmoid,
    softmax,
    splade_weights,
)

# Rows padded on the right, on the left, and not at all.
MASK = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=bool)


def _states(*, width: int = 4) -> NDArray[np.float32]:
    """Make float32 [3, 5, width] with huge values on padding, so that reading it shows."""
    states = np.random.default_rng(7).standard_normal((3, 5, width)).astype(np.float32)
    states[~MASK] = 1e6
    return states


def _by_hand(tokens: list[list[float]], mode: str) -> list[float]:
    """Pool the real tokens of one text by the definition of `mode`, in Python floats."""
    columns = list(zip(*tokens, strict=True))
    count = len(tokens)
    match mode:
        case "cls":
            return tokens[0]
        case "lasttoken":
            return tokens[-1]
        case "max":
            return [max(column) for column in columns]
        case "mean":
            return [sum(column) / count for column in columns]
        case "mean_sqrt_len_tokens":
            return [sum(column) / math.sqrt(count) for column in columns]
        case "weightedmean":
            total = count * (count + 1) / 2
            return [sum((i + 1) * value for i, value in enumerate(column)) / total for column in columns]
    raise NotImplementedError(f"write the definition of {mode} here")


@pytest.mark.parametrize("mode", POOLINGS)
def test_each_pooling_reads_real_tokens_only(mode: str) -> None:
    """On either side of padding it gives what its definition gives in a loop."""
    states = _states()
    wanted = [_by_hand([row.tolist() for row in states[i][MASK[i]]], mode) for i in range(3)]
    # float32 sums of five numbers.
    np.testing.assert_allclose(pool(states, MASK, (mode,)), wanted, rtol=1e-5, atol=1e-6)


def test_several_poolings_are_concatenated() -> None:
    """In the order in which they are named, as float32 even for fp16 states."""
    states = np.where(MASK[:, :, None], _states(), 9.0).astype(np.float16)
    both = pool(states, MASK, ("cls", "mean"))
    assert both.shape == (3, 8)
    assert both.dtype == np.float32
    np.testing.assert_array_equal(both[:, :4], pool(states, MASK, ("cls",)))


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({}, ("mean",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["max", "mean"], "pooling_mode_cls_token": True}, ("max", "mean")),
    ],
)
def test_configurations_of_any_age_are_read(config: dict[str, object], modes: tuple[str, ...]) -> None:
    """Flags of old versions concatenate in the table's order; the name of new ones wins."""
    assert pooling_modes(config) == modes  # type: ignore[arg-type]


def test_an_unknown_pooling_is_refused() -> None:
    """With what is known instead."""
    with pytest.raises(InputError, match="unknown pooling mode 'attention'") as caught:
        pooling_modes({"pooling_mode": "attention"})
    assert "mean" in caught.value.hint


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")])
def test_splade_weights_are_those_of_every_token_pooled(strategy: str, activation: str) -> None:
    """The definition takes the logarithm first and pools then; the order here is another, the result is not."""
    logits = _states(width=11)
    weights = splade_weights(logits, MASK, strategy=strategy, activation=activation)
    for row, text, valid in zip(weights, logits, MASK, strict=True):
        for term, weight in enumerate(row):
            activated = [math.log1p(max(0.0, float(value))) for value in text[valid, term]]
            if activation == "log1p_relu":
                activated = [math.log1p(value) for value in activated]
            wanted = max(activated) if strategy == "max" else sum(activated)
            assert weight == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("name", "value"), [("strategy", "mean"), ("activation", "gelu")])
def test_an_unknown_splade_pooling_is_refused(name: str, value: str) -> None:
    """Rather than taken for the usual one."""
    with pytest.raises(InputError, match=f"{value!r} of SpladePooling"):
        splade_weights(_states(), MASK, **{name: value})


def test_the_largest_of_tokens_ignores_padding() -> None:
    """Padding holds the largest values here."""
    assert maximum_of_tokens(_states(), MASK).max() < 1e3


def test_cosines_are_those_of_the_definition() -> None:
    """Symmetric, one on the diagonal, and 0 for a vector of zeros."""
    vectors = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    vectors[3] = 0.0
    cosines = cosine_similarities(vectors)
    for i in range(3):
        for j in range(3):
            a, b = vectors[i].tolist(), vectors[j].tolist()
            wanted = sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
            assert cosines[i, j] == pytest.approx(wanted, abs=1e-9)
    assert not cosines[3].any()
    assert np.abs(cosines).max() <= 1.0


def test_normalized_vectors_have_length_one() -> None:
    """And a vector of zeros stays one."""
    vectors = normalize(np.array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32))
    np.testing.assert_allclose(vectors, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


def test_probabilities_do_not_overflow() -> None:
    """Logits of fp16's range are fine, and so are those that a mask set to minus infinity."""
    logits = np.array([[6e4, 6e4, -np.inf], [0.0, math.log(3.0), -np.inf]])
    np.testing.assert_allclose(softmax(logits), [[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], rtol=1e-12)
    np.testing.assert_allclose(sigmoid(np.array([-6e4, 0.0, math.log(3.0), 6e4])), [0.0, 0.5, 0.75, 1.0], rtol=1e-12)
