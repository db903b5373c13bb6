"""One large number does not set the scale for all others, and what carries no information is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool.runtime.difference import TOLERANCES, OutputError, Spread, measure, spreads_of

FP32 = TOLERANCES["fp32"]


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def off(array: NDArray[Any], share: float = 0.1) -> NDArray[np.float32]:
    """Return an array with other numbers of the same size, in a share of their size."""
    moved: NDArray[np.float32] = (array + share * array.std() * normal(*array.shape, seed=99)).astype(np.float32)
    return moved


@pytest.mark.parametrize("fill", [-20.0, -1e4, -65504.0, -1e9, 1e30, np.finfo(np.float32).min, np.nan, np.inf])
def test_fills_are_counted_and_do_not_hide_the_others(fill: float) -> None:
    """A tenth of the largest score is an error next to any fill, and the scale is that of the scores."""
    scores = normal(4, 64)
    masked, wrong = scores.copy(), off(scores)
    masked[:, ::4] = wrong[:, ::4] = fill
    error = measure(wrong, masked)
    assert not error.passed
    assert (error.num_equal, error.num_measured) == (64, 192)
    assert error.scale == np.abs(scores[:, np.arange(64) % 4 > 0]).max()
    assert measure(masked, masked).passed


def test_a_fill_in_one_of_the_two_is_an_error() -> None:
    scores = normal(4, 64)
    masked = scores.copy()
    masked[0, 0] = -1e9
    assert not measure(scores, masked, None, TOLERANCES["int4"]).passed
    assert not measure(masked, scores, None, TOLERANCES["int4"]).passed


def test_masks_that_are_added_do_not_hide_the_others() -> None:
    """-1e4 plus a score is no constant, and most of the scores may be masked."""
    scores = normal(64, 64)
    mask = np.where(np.tri(64, dtype=bool), 0, -1e4).astype(np.float32)
    assert not measure(off(scores, 0.01) + mask, scores + mask).passed
    assert measure(scores + mask, scores + mask).passed


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_saturated_probabilities_are_no_fill(value: float) -> None:
    """Without them, only noise would be left to compare."""
    probabilities = np.full((8, 64), value, np.float32)
    probabilities[:, 0] = np.float32(1e-9)
    noise = probabilities.copy()
    noise[:, 0] *= 2
    assert measure(noise, probabilities).passed


def test_clipped_values_are_measured() -> None:
    """They are as far from the others as these are from each other."""
    clipped = np.clip(10 * normal(8, 64), -5, 5)
    assert measure(clipped, clipped).num_equal == 0


@pytest.mark.parametrize("offset", [100.0, -8.0, 1e4])
def test_a_shared_offset_does_not_hide_the_others(offset: float) -> None:
    """Errors are relative to how the numbers differ; what float32 cannot tell apart is allowed."""
    logits = normal(8, 64) / 4
    moved = (logits + np.float32(offset)).astype(np.float32)
    assert not measure((off(logits) + np.float32(offset)).astype(np.float32), moved).passed
    assert not measure(moved + np.float32(0.1), moved).passed
    rounded = np.nextafter(moved, np.float32(np.inf))
    assert measure(rounded, moved).passed


def test_a_row_that_is_huge_has_a_scale_of_its_own() -> None:
    """As a sample of a batch, and as a token; its own rounding is allowed."""
    rows = normal(4, 64)
    rows[2] *= 1e4
    wrong = rows.copy()
    wrong[0] = off(rows[0])
    rounded = rows.copy()
    rounded[2] += np.float32(1e-2)
    for batched in (True, False):
        assert not measure(wrong, rows, batched=batched).passed
        assert measure(rounded, rows, batched=batched).passed


def test_a_small_sample_has_its_own_scale_where_most_of_a_batch_are_huge() -> None:
    """The median of all rows is that of the huge ones then."""
    samples = normal(4, 8, 64)
    samples[1:] *= 1e4
    wrong = samples.copy()
    wrong[0] = off(samples[0])
    assert not measure(wrong, samples, batched=True).passed
    assert measure(samples, samples, batched=True).passed


@pytest.mark.parametrize("constant", [True, False])
def test_an_outlying_channel_has_a_scale_of_its_own(constant: bool) -> None:
    """Also where a token has a value near zero in it."""
    states = normal(32, 64)
    states[:, 7] = 1e4 + normal(32) if constant else 1e4 * normal(32, seed=3)
    wrong = np.where(np.arange(64) == 7, states, off(states / 1e4) * 1e4).astype(np.float32)
    rounded = states.copy()
    rounded[:, 7] += np.float32(1e-2)
    assert not measure(wrong, states).passed
    assert measure(rounded, states).passed


def test_integers_are_ids_whose_size_says_nothing() -> None:
    """A wrong token of 250,000 is not rounding; codes of vectors are numbers."""
    ids = np.arange(250_000, dtype=np.int64)
    wrong = ids.copy()
    wrong[:10] += 1
    assert not measure(wrong, ids).passed
    assert measure(wrong, ids, None, TOLERANCES["int8"]).passed
    assert not measure(~(ids > 9), ids > 9, None, TOLERANCES["int8"]).passed
    codes = np.arange(-100, 100, dtype=np.int8)
    assert measure(codes + np.int8(1), codes, None, TOLERANCES["int8"]).passed


@pytest.mark.parametrize("bias", [0.0, 5.0, -8.0, 100.0])
def test_the_error_of_scores_is_relative_to_their_spread(bias: float) -> None:
    """Whatever their bias is, and the same for a single text as for all."""
    scores = normal(40, 1) / 4
    found = off(scores, 0.1)
    spread = Spread.of([scores[:20] + np.float32(bias), scores[20:] + np.float32(bias)])
    error = measure(found + np.float32(bias), scores + np.float32(bias), spread=spread)
    deviations = float(np.sqrt(np.square(found - scores).mean() / scores.var()))
    assert error.cosine == pytest.approx(np.cos(np.arctan(deviations)), rel=1e-4)
    assert not error.passed
    moved = scores + np.float32(bias + 0.05)
    assert not measure(moved, scores + np.float32(bias), spread=spread).passed


def test_what_all_labels_share_is_ignored_as_softmax_ignores_it() -> None:
    """Large logits that rise and fall together do not hide that their differences are wrong."""
    together, apart = 100 * normal(50, 1), normal(50, 3, seed=1)
    spread = Spread.of([together + apart])
    assert not measure(together + off(apart, 0.2), together + apart, None, TOLERANCES["fp16"], spread=spread).passed
    assert measure(together + apart, together + apart, spread=spread).passed


def test_spreads_are_those_of_scores_labels_and_boxes() -> None:
    """Vectors, outputs of other widths from run to run, ids, and a handful of rows have none."""
    outputs: list[dict[str, NDArray[Any]]] = [
        {
            "score": normal(8),
            "labels": normal(8, 3),
            "boxes": normal(2, 9, 4),
            "vectors": normal(8, 384),
            "spans": normal(8, size),
            "ids": np.zeros((8, 1), np.int64),
        }
        for size in (5, 6)
    ]
    assert spreads_of(outputs, [None, None]).keys() == {"score", "labels", "boxes"}
    assert spreads_of([{"score": normal(7, 1)}], [None]) == {}


def test_scores_that_do_not_vary_in_this_precision_are_compared_as_they_are() -> None:
    """Rounding is all that is left of them in half precision."""
    scores = (np.float32(100) + normal(40, 1) / 1000).astype(np.float32)
    rounded = scores.astype(np.float16).astype(np.float32)
    assert measure(rounded, scores, None, TOLERANCES["fp16"], spread=Spread.of([scores])).passed
    assert measure(rounded + 1, scores, None, TOLERANCES["fp16"], spread=Spread.of([scores])) != OutputError()
    assert not measure(rounded + 1, scores, None, TOLERANCES["fp16"], spread=Spread.of([scores])).passed
