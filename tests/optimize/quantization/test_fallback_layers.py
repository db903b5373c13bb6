"""Layers rise in precision one after another, until the error is what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from onnxtool.errors import PassError
from onnxtool.optimize.quantization.bounded import MARGIN, find_fallback_layers

# What each layer adds to the error at each level; float32 adds nothing.
ERRORS = {"a": (0.08, 0.008), "b": (0.02, 0.002), "c": (0.4, 0.04), "d": (0.01, 0.001)}
SIZES = {"a": 100, "b": 100, "c": 1000, "d": 100}


class Model:
    """A model whose layers add up their errors, on inputs which show so much of them."""

    def __init__(self, num_levels: int, precisions: tuple[str, ...], *feeds: float) -> None:
        self.num_weights = SIZES
        self.precisions = precisions[-num_levels:]
        self.feeds = feeds

    def error(self, levels: Mapping[str, int], place: int) -> float:
        """Return the sum, times what the input is worth."""
        first = len(ERRORS["a"]) - len(self.precisions)
        return self.feeds[place] * sum(ERRORS[name][first + level] for name, level in levels.items())


def switchable(num_levels: int) -> Any:
    """Return the model with two inputs, of which the second shows twice as much."""
    return Model(num_levels, ("int4", "int8"), 0.5, 1.0)


def find(max_error: float, num_levels: int = 2) -> dict[str, str]:
    layers = find_fallback_layers(switchable(num_levels), max_error)
    return {layer.name: layer.precision for layer in layers}


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (0.51, {}),
        (0.439, {"a": "int8"}),
        # By their size: `c` costs most error, and is ten times as large.
        (0.07, {"a": "int8", "c": "int8", "b": "int8"}),
        (0.052, {"a": "int8", "c": "int8", "b": "int8", "d": "int8"}),
        (0.044, {"a": "float32", "c": "int8", "b": "int8", "d": "int8"}),
        (0.0011, {"a": "float32", "c": "float32", "b": "float32", "d": "int8"}),
    ],
)
def test_all_layers_rise_once_before_one_rises_twice(total: float, expected: dict[str, str]) -> None:
    """The sum of the errors, on the worst input, stays below the bound with its margin."""
    assert find(total / MARGIN) == expected


def test_of_levels_of_one_precision_the_last_tells_what_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose error the exact way of writing it takes away is not kept for what it cost before."""
    monkeypatch.setitem(ERRORS, "a", (0.08, 0.0001))
    model: Any = Model(2, ("int8", "int8"), 1.0)
    layers = find_fallback_layers(model, 0.042 / MARGIN)
    assert {layer.name: layer.precision for layer in layers if layer.precision != "int8"} == {"c": "float32"}
    assert {layer.error for layer in layers if layer.name == "c"} == {0.04}


def test_with_one_level_they_rise_to_float32() -> None:
    """As those of int8 do."""
    assert find(0.0431 / MARGIN, num_levels=1) == {"a": "float32"}
    assert find(0.004 / MARGIN, num_levels=1) == {"a": "float32", "c": "float32"}


def test_a_bound_that_only_float32_holds_is_an_error() -> None:
    """With the best that was reached."""
    with pytest.raises(PassError, match=r"int4 cannot hold an error of 0\.0001: with 3 of 4 layers .* it is 0\.001"):
        find(0.0001)


def test_the_error_of_a_layer_is_that_at_the_lowest_level() -> None:
    """On the worst input, alone."""
    layers = find_fallback_layers(switchable(2), 0.07 / MARGIN)
    assert {layer.name: layer.error for layer in layers} == {"a": 0.08, "c": 0.4, "b": 0.02}
