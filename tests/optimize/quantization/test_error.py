"""The error of a quantized model is that of its worst row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.quantization.int4 import to_int4
from onnxtool.optimize.quantization.int8 import to_int8
from tests.optimize.passes.builders import build, normal

EXACT = {"states": normal(2, 3, 4), "embedding": normal(2, 4, seed=1)}


def test_equal_outputs_have_no_error() -> None:
    """Six tokens, two texts, and each of the two outputs as a whole."""
    errors = output_errors(EXACT, EXACT, None, {})
    assert errors.shape == (10,)
    np.testing.assert_allclose(errors, 0, atol=1e-12)


def test_one_turned_row_is_the_error() -> None:
    """A right angle in one token of six, which the whole hides."""
    states = EXACT["states"].copy()
    first, second = states[1, 2, :2]
    states[1, 2] = (-second, first, 0, 0)
    wanted = {**EXACT, "states": EXACT["states"].copy()}
    wanted["states"][1, 2, 2:] = 0
    errors = output_errors({**EXACT, "states": states}, wanted, None, {})
    assert errors.max() == pytest.approx(1.0, abs=1e-6)
    assert np.sort(errors)[-2] < 0.9


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 5, 3, 4)], ids=["hidden states", "keys and values"])
def test_padding_does_not_count(shape: tuple[int, ...]) -> None:
    """What stands there means nothing, in [B, S, D] and in a cache of [B, H, S, D]."""
    states = normal(*shape)
    found = states.copy()
    found[0, ..., 2, :] *= -1
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    assert output_errors({"y": found}, {"y": states}, mask, {}).max() < 1e-12
    assert output_errors({"y": found}, {"y": states}, None, {}).max() == pytest.approx(2.0)


def test_nan_is_the_largest_error() -> None:
    """It must never look like none."""
    assert output_errors({"y": np.full((2, 4), np.nan)}, {"y": normal(2, 4)}, None, {}).max() == 2.0


def test_a_single_score_counts_as_a_whole() -> None:
    """A row of one number cannot turn."""
    wanted = {"score": np.array([[1.0], [2.0], [-3.0]])}
    errors = output_errors({"score": np.array([[2.0], [1.0], [-3.0]])}, wanted, None, {})
    assert errors.tolist() == [pytest.approx(1 - 13 / 14)]


def test_the_mask_is_found_by_its_name() -> None:
    """As everywhere in this project."""
    mask = padding_mask({"input_ids": np.ones((1, 2)), "attention_mask": np.array([[1, 0]])})
    assert mask is not None
    assert mask.tolist() == [[True, False]]
    assert padding_mask({"input_ids": np.ones((1, 2))}) is None


def test_values_that_are_not_finite_in_both_are_no_error() -> None:
    """Outputs with NaN or infinity become int8 like others."""
    wanted = normal(4, 64)
    found = wanted + normal(4, 64, seed=1) / np.float32(10)
    expected = output_errors({"y": found[:, 8:]}, {"y": wanted[:, 8:]}, None, {})
    wanted[:, :8] = found[:, :8] = -np.inf
    np.testing.assert_allclose(output_errors({"y": found}, {"y": wanted}, None, {}), expected, rtol=1e-6)
    wanted[:, :8] = found[:, :8] = -1e9
    np.testing.assert_allclose(output_errors({"y": found}, {"y": wanted}, None, {}), expected, rtol=1e-6)


@pytest.mark.parametrize("hidden", ["offset", "channel"])
def test_what_all_rows_share_does_not_hide_an_error(hidden: str) -> None:
    """A common offset and an outlying channel make every cosine one."""
    wanted, noise = normal(32, 64), normal(32, 64, seed=1) / np.float32(10)
    added = np.full(64, 100, np.float32) if hidden == "offset" else np.float32(1e4) * (np.arange(64) == 5)
    plain = output_errors({"y": wanted + noise}, {"y": wanted}, None, {}).max()
    assert output_errors({"y": wanted + noise + added}, {"y": wanted + added}, None, {}).max() > plain / 2


@pytest.mark.parametrize("convert", [to_int8, to_int4])
def test_the_layers_that_stay_do_not_depend_on_the_bias_of_a_score(convert: Any) -> None:
    """The same order of texts has the same error."""
    weights = {"w": normal(32, 32) / np.float32(6), "v": normal(32, 1, seed=1)}
    weights["w"][3] *= 20
    graph = "g (float[B, 32] x) => (float[B, 1] y) { h = MatMul(x, w) t = Tanh(h) s = MatMul(t, v) y = Add(s, c) }"
    feeds = [{"x": normal(8, 32, seed=seed)} for seed in range(10)]
    reports = [
        convert(build(graph, {**weights, "c": np.array([bias], np.float32)}), feeds, max_error=0.002).report
        for bias in (0, 5, -8, 100)
    ]
    assert len({tuple(layer.name for layer in report.kept) for report in reports}) == 1
    np.testing.assert_allclose([report.error for report in reports], reports[0].error, rtol=0.05)
