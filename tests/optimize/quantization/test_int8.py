"""A model in int8 keeps the promise of its error, and says what that took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.errors import PassError
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization import int8
from onnxtool.optimize.quantization.activations import Feeds
from onnxtool.optimize.quantization.arithmetic import Adjustment
from onnxtool.optimize.quantization.error import output_errors
from onnxtool.optimize.quantization.int8 import quantize_int8, to_int8
from onnxtool.runtime.difference import spreads_of
from tests.optimize.passes.builders import build_body, count, normal, run

BODY = "p = MatMul(x, w) q = Tanh(p) y = MatMul(q, v)"
FEEDS: list[Feeds] = [{"x": normal(2, 6, 8, seed=seed)} for seed in range(4)]


def layers(factor: float = 1.0) -> ir.Model:
    """Return two layers, and multiply the weights of one channel of the first with `factor`."""
    first = normal(8, 8, seed=1)
    first[3] *= factor
    return build_body(BODY, {"w": first, "v": normal(8, 8, seed=2)})


def errors_of(result: Outcome, model: ir.Model, feeds: list[Feeds]) -> float:
    """Measure the error with the sessions of the tests."""
    expected, found = ([{"y": run(one, given)[0]} for given in feeds] for one in (model, result.model))
    spreads = spreads_of(expected, [None] * len(feeds))
    pairs = zip(found, expected, strict=True)
    return float(max(output_errors(one, wanted, None, spreads).max() for one, wanted in pairs))


def test_without_a_bound_all_layers_are_int8() -> None:
    """And the error is the one that a session outside measures; the model that went in stays."""
    model = layers()
    result = to_int8(model, FEEDS)
    assert (result.report.num_layers, result.report.kept, result.outcome.num_changes) == (2, (), 2)
    assert count(model, "MatMul") == 2
    # The two run with other graph optimizations.
    assert result.report.error == pytest.approx(errors_of(result.outcome, model, FEEDS), rel=1e-3)
    assert 0 < result.report.mean_error < result.report.error < 0.01


def test_the_layer_that_costs_most_error_is_kept_and_named() -> None:
    """Large weights of a channel that is always zero leave all others a coarse grid; a bound keeps that layer."""
    model = layers(300.0)
    feeds: list[Feeds] = [{"x": given["x"] * np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32)} for given in FEEDS]
    free = to_int8(model, feeds)
    result = to_int8(model, feeds, max_error=free.report.error / 4)
    assert [layer.name for layer in result.report.kept] == ["w"]
    assert (result.report.kept[0].error or 0) > free.report.error / 4
    assert result.report.error <= free.report.error / 4
    assert count(result.outcome.model, "MatMul") == 1


def test_a_bound_that_no_int8_holds_ends_with_the_best_that_was_reached() -> None:
    """With all layers but one in float32."""
    with pytest.raises(PassError, match=r"int8 cannot hold an error of 1e-09: with 1 of 2 layers .* it is \d"):
        to_int8(layers(), FEEDS, max_error=1e-9)


def test_outliers_in_one_channel_cost_little() -> None:
    """Divided away, they leave the grid to the other channels; their weights are small, as those of trained models."""
    model = layers(1 / 60)
    feeds: list[Feeds] = [{"x": given["x"] * np.array([1, 1, 1, 60, 1, 1, 1, 1], np.float32)} for given in FEEDS]
    result = to_int8(model, feeds)
    plain = replace(result, outcome=quantize_int8().apply(model.clone(), Context()))
    assert result.report.error < errors_of(plain.outcome, model, feeds) / 4


@pytest.mark.parametrize("activations", ["per_row", "dynamic"])
def test_zeros_stay_zeros_where_there_is_no_bias(activations: str) -> None:
    """As padding is whose embedding is zero: a normalization behind a layer would make any other number large."""
    model = layers()
    result = to_int8(model, [{"x": given["x"] + 1} for given in FEEDS], activations=activations)
    padded = np.concatenate([FEEDS[0]["x"], np.zeros((2, 1, 8), np.float32)], axis=1)
    assert not run(result.outcome.model, {"x": padded})[0][:, -1].any()


@pytest.mark.parametrize(("factor", "num_divisions"), [(20.0, 0), (1 / 3, 1)])
def test_activations_are_divided_only_where_the_error_needs_it(factor: float, num_divisions: int) -> None:
    """A bound that all layers hold without costs no multiplication, and a division comes before float32."""
    model = layers(1 / 60)
    feeds: list[Feeds] = [{"x": given["x"] * np.array([1, 1, 1, 60, 1, 1, 1, 1], np.float32)} for given in FEEDS]
    plain = errors_of(quantize_int8().apply(model.clone(), Context()), model, feeds)
    result = to_int8(model, feeds, max_error=plain * factor, activations="dynamic")
    assert (result.report.kept, count(result.outcome.model, "Mul")) == ((), num_divisions)
    assert result.report.error <= plain * factor


def test_a_scale_that_is_off_by_two_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is measured on the file itself, not on a simulation that would share the mistake."""

    def damaged(fallbacks: frozenset[str], adjustments: Mapping[str, Adjustment], *, exact: bool) -> Pass:
        def apply(model: ir.Model, context: Context) -> Outcome:
            outcome = quantize_int8(fallbacks, adjustments, exact=exact).apply(model, context)
            scale = model.graph.initializers["v_scale"]
            assert scale.const_value is not None
            array = scale.const_value.numpy().copy()
            array[2] *= 2
            scale.const_value = ir.tensor(array)
            return outcome

        return Pass("damaged", apply)

    monkeypatch.setattr(int8, "quantize_int8", damaged)
    with pytest.raises(PassError, match=r"the error in int8 is 0\.\d+ with 0 layers in higher precision"):
        to_int8(layers(), FEEDS, max_error=0.01)


def test_a_model_without_float32_weights_is_refused() -> None:
    """There is nothing to do."""
    with pytest.raises(PassError, match="no linear layer has a float32 weight"):
        to_int8(build_body("y = Relu(x)"), FEEDS)


def test_calibration_inputs_are_needed() -> None:
    """Without them nothing could be promised."""
    with pytest.raises(PassError, match="no calibration inputs"):
        to_int8(layers(), [])
