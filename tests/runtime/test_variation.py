"""Outputs that ignore the inputs are seen, whatever makes them so; outputs that follow them are not mistaken for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool.runtime.comparison import Case, constant_outputs, run_reference
from onnxtool.runtime.input_cases import verification_shapes

Arrays = Mapping[str, NDArray[Any]]
TABLE = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)


def text_cases() -> list[Case]:
    generator = np.random.default_rng(1)
    cases = []
    for shape in verification_shapes(32):
        ids = generator.integers(0, len(TABLE), shape.mask.shape)
        feeds = {"input_ids": ids, "attention_mask": shape.mask.astype(np.int64)}
        cases.append(Case(shape.description, feeds, shape.mask))
    return cases


def states(feeds: Arrays) -> NDArray[np.float32]:
    """Look the words up, as a static embedding does: float32 [B, S, 4]."""
    return TABLE[feeds["input_ids"]]


def positions(feeds: Arrays) -> NDArray[np.float32]:
    """Return what depends on the place of a word alone, float32 [B, S, 1], and another value on padding."""
    place = np.broadcast_to(np.arange(feeds["input_ids"].shape[1]), feeds["input_ids"].shape)
    seen = feeds["attention_mask"].astype(bool)
    return np.where(seen, place, feeds["input_ids"])[..., None].astype(np.float32)


def pooled(feeds: Arrays) -> NDArray[np.float32]:
    """Average the words under the mask: float32 [B, 4]."""
    mask = feeds["attention_mask"][..., None]
    mean: NDArray[np.float32] = (states(feeds) * mask).sum(1) / mask.sum(1)
    return mean


def filled(value: float) -> Callable[[Arrays], NDArray[np.float32]]:
    return lambda feeds: np.full((len(feeds["input_ids"]), 4), value, np.float32)


@pytest.mark.parametrize(
    "make", [filled(0.0), filled(0.25), filled(np.nan), positions], ids=["0", "0.25", "nan", "place"]
)
def test_what_ignores_the_words_is_constant(make: Callable[[Arrays], NDArray[np.float32]]) -> None:
    """Zeros, one vector, NaN, and what depends on places alone; padding is no word."""
    assert run_reference(lambda feeds: {"y": make(feeds)}, text_cases(), name="x").constant == ("y",)


@pytest.mark.parametrize(
    "make",
    [
        states,
        pooled,
        lambda feeds: pooled(feeds) * 1e-20,
        lambda feeds: 100 + pooled(feeds) * 1e-2,
        lambda feeds: np.maximum(states(feeds) - 1.5, 0).max(1),
        lambda feeds: np.sign(pooled(feeds)[:, :1]),
    ],
    ids=["states", "pooled", "tiny", "on an offset", "few terms", "a sign"],
)
def test_what_follows_the_words_is_not_constant(make: Callable[[Arrays], NDArray[np.float32]]) -> None:
    """However small it is, or how seldom it moves."""
    assert run_reference(lambda feeds: {"y": make(feeds)}, text_cases(), name="x").constant == ()


def test_a_probability_of_one_tells_nothing() -> None:
    """A sigmoid that is saturated, and a softmax over one label."""
    assert run_reference(lambda feeds: {"y": filled(1.0)(feeds)}, text_cases(), name="x").constant == ()


def test_one_output_of_two_is_named() -> None:
    """Integers are no measure of anything."""
    found = run_reference(
        lambda feeds: {"y": pooled(feeds), "z": filled(0.5)(feeds), "n": np.zeros(len(feeds["input_ids"]), np.int64)},
        text_cases(),
        name="x",
    )
    assert found.constant == ("z",)


def test_without_two_inputs_to_compare_nothing_is_said() -> None:
    """One row of each shape, and the same row twice."""
    feeds = [{"x": np.ones((1, 3))}, {"x": np.ones((1, 4))}, {"x": np.ones((2, 5))}]
    assert constant_outputs(feeds, [{"y": np.zeros((len(one["x"]), 2))} for one in feeds]) == ()
    assert constant_outputs([], []) == ()


def test_inputs_of_a_file_of_one_row_are_compared_across_runs() -> None:
    """Where a batch cannot tell."""
    feeds = [{"x": np.full((1, 3), float(number))} for number in range(3)]
    assert constant_outputs(feeds, [{"y": np.zeros((1, 2))}] * 3) == ("y",)
    assert constant_outputs(feeds, [{"y": one["x"] * 2} for one in feeds]) == ()


@pytest.mark.parametrize(
    ("make", "ignores"),
    [(states, True), (pooled, False), (lambda feeds: pooled(feeds) * 1e-20, False)],
    ids=["words alone", "pooled", "tiny"],
)
def test_a_mask_without_effect_is_seen(make: Callable[[Arrays], NDArray[np.float32]], ignores: bool) -> None:
    """Relative to what the output is, so that small weights are no reason."""
    found = run_reference(lambda feeds: {"y": make(feeds)}, text_cases(), name="x")
    assert found.ignores_mask is ignores


def test_without_padding_no_mask_is_ignored() -> None:
    """Nobody could tell."""
    cases = [Case(case.description, case.feeds, None) for case in text_cases()]
    assert not run_reference(lambda feeds: {"y": states(feeds)}, cases, name="x").ignores_mask
