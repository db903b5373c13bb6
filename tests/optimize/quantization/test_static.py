"""int8 with activations on a grid that is known before the model runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from onnxtool.optimize.quantization.activations import Activations, Feeds, Recording
from onnxtool.optimize.quantization.adjustments import HEADROOM, choose_adjustments
from onnxtool.optimize.quantization.arithmetic import ActivationGrid, Adjustment, round_weight
from onnxtool.optimize.quantization.error import row_errors
from onnxtool.optimize.quantization.int8 import quantize_int8, to_int8
from onnxtool.optimize.quantization.linear_layers import find_linear_layers
from tests.optimize.passes.builders import Row, apply, build, build_body, normal, operators, run
from tests.optimize.quantization.test_int8 import FEEDS, errors_of, layers
from tests.optimize.quantization.test_int8_linear_layers import FORMS, B, W, X

GRID = ActivationGrid(np.float32(0.03), 120)
STATIC = quantize_int8(adjustments={"w": Adjustment(activations=GRID)})


@pytest.mark.parametrize("form", FORMS)
def test_activations_are_rounded_to_the_grid(form: str) -> None:
    """The numbers are those of NumPy; what is beyond the grid becomes its end."""
    graph, weights = FORMS[form]
    x = 2 * X.reshape(-1, 8) if "S" not in graph else 2 * X
    model = build(graph, weights)
    assert apply(STATIC, model).num_changes == 1
    assert operators(model) == ["QuantizeLinear", "MatMulIntegerToFloat"]
    rounded = (np.clip(np.rint(x / GRID.scale), -120, 135) * GRID.scale).astype(np.float32)
    np.testing.assert_allclose(GRID.round(x), rounded, atol=1e-6, rtol=0)
    expected = rounded @ round_weight(W) + weights.get("b", np.zeros(12, np.float32))
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=1e-4, rtol=0)


def test_products_that_read_the_same_round_it_once() -> None:
    """And once more where one of them has another grid."""
    weights = {"w": normal(8, 8), "v": normal(8, 8), "u": normal(8, 8)}
    body = "p = MatMul(x, w) q = MatMul(x, v) r = MatMul(x, u) s = Add(p, q) y = Add(s, r)"
    adjustments = {name: Adjustment(activations=GRID) for name in weights}
    model = build_body(body, weights)
    apply(quantize_int8(adjustments=adjustments), model)
    assert operators(model).count("QuantizeLinear") == 1
    model = build_body(body, weights)
    apply(quantize_int8(adjustments={**adjustments, "u": Adjustment(activations=replace(GRID, zero=3))}), model)
    assert operators(model).count("QuantizeLinear") == 2


def test_a_divisor_comes_before_the_grid() -> None:
    """As it was chosen for."""
    smoothing_scale = np.array([1, 1, 4, 1, 1, 1, 9, 1], np.float32)
    model = build(*FORMS["MatMul and Add"])
    apply(quantize_int8(adjustments={"w": Adjustment(smoothing_scale, None, GRID)}), model)
    assert operators(model) == ["Mul", "QuantizeLinear", "MatMulIntegerToFloat"]
    expected = GRID.round(X / smoothing_scale) @ round_weight(W * smoothing_scale[:, None]) + B
    np.testing.assert_allclose(run(model, {"x": X})[0], expected, atol=1e-4, rtol=0)


def test_an_answer_does_not_depend_on_the_batch() -> None:
    """Of which dynamic ranges take in all rows."""
    rows = np.concatenate([FEEDS[0]["x"], 3 * FEEDS[1]["x"]])
    for static, same in ((True, True), (False, False)):
        result = to_int8(layers(), FEEDS, activations="static" if static else "dynamic").outcome.model
        alone, together = run(result, {"x": rows[:1]})[0], run(result, {"x": rows})[0]
        assert np.array_equal(alone, together[:1]) == same


def test_the_bound_holds_as_that_of_dynamic_ranges_does() -> None:
    """With the layer in float32 that it takes."""
    model = layers(300.0)
    feeds: list[Feeds] = [{"x": given["x"] * np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32)} for given in FEEDS]
    free = to_int8(model, feeds, activations="static")
    assert operators(free.outcome.model).count("MatMulIntegerToFloat") == 2
    result = to_int8(model, feeds, max_error=free.error / 4, activations="static")
    assert [layer.name for layer in result.kept] == ["w"]
    assert result.error == pytest.approx(errors_of(result, model, feeds), rel=1e-2)
    assert result.error <= free.error / 4


def test_an_outlier_is_cut_off_where_that_costs_less_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no row shows, against a grid over all that there was."""
    monkeypatch.setattr("onnxtool.optimize.quantization.adjustments._WORTHWHILE", 0.0)  # nor is it divided away
    model = build(*FORMS["MatMul"])
    layers, _ = find_linear_layers(model)
    rows = normal(200, 8, seed=3)
    ends = np.abs(rows).max(axis=0)
    outlier = np.where(np.arange(8) == 2, 9 * ends, ends).astype(np.float32)
    grids = []
    for high in (ends, outlier):
        activations = Activations([-ends], [high], [rows])
        recording = Recording((), {"x": activations}, {"w": ("x",)})
        grid = choose_adjustments(layers, recording, "static")["w"].best.by_name["w"].activations
        assert isinstance(grid, ActivationGrid)
        grids.append(float(grid.scale) * 255 / HEADROOM)
    assert grids[0] >= 0.8 * 2 * rows.max()
    assert ends.max() < grids[1] < 0.6 * (outlier.max() + ends.max())


def test_a_fixed_grid_reaches_further_than_the_calibration() -> None:
    """Values half as large again as any of it are rounded, not cut off."""
    model = build(*FORMS["MatMul"])
    result = to_int8(model, [{"x": X}], activations="static").outcome.model
    larger = {"x": 1.45 * X}
    exact, found = run(model, larger)[0], run(result, larger)[0]
    assert row_errors(found, exact, None).max() < 1e-3


def test_layers_that_share_their_weight_share_their_grid() -> None:
    """It spans the activations of both."""
    model = build_body("p = MatMul(x, w) y = MatMul(p, w)", {"w": normal(8, 8) / 4})
    result = to_int8(model, FEEDS, activations="static")
    assert operators(result.outcome.model) == ["QuantizeLinear", "MatMulIntegerToFloat"] * 2


ROW = Row(STATIC, {name: partial(build, *form) for name, form in FORMS.items()}, atol=None)
