"""int8 with activations on a grid that is known before the model runs, everywhere or behind normalizations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.quantization import adjustments
from onnxtool.optimize.quantization.activations import Activations, Feeds, Recording
from onnxtool.optimize.quantization.adjustments import HEADROOM, choose_adjustments
from onnxtool.optimize.quantization.arithmetic import ActivationGrid, Adjustment, Floats
from onnxtool.optimize.quantization.error import row_errors
from onnxtool.optimize.quantization.int8 import quantize_int8, to_int8
from onnxtool.optimize.quantization.linear_layers import find_linear_layers
from tests.optimize.passes.builders import (
    Arrays,
    Row,
    apply,
    build,
    build_body,
    count,
    normal,
    of_text,
    operators,
    run,
    run_as_stored,
)
from tests.optimize.quantization.test_int8 import FEEDS, errors_of, layers
from tests.optimize.quantization.test_linear_layers import FORMS, B, W, X, round_weight

GRID = ActivationGrid(np.float32(0.03), 120)
STATIC = quantize_int8(adjustments={"w": Adjustment(activations=GRID)})


@pytest.mark.parametrize("form", FORMS)
def test_activations_are_rounded_to_the_grid(form: str) -> None:
    """The numbers are those of NumPy; what is beyond the grid becomes its end."""
    graph, weights = FORMS[form]
    x = 2 * X.reshape(-1, 8) if "S" not in graph else 2 * X
    model = build(graph, weights)
    apply(STATIC, model)
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


def test_the_bound_holds_as_that_of_dynamic_ranges_does() -> None:
    """With the layer in float32 that it takes."""
    model = layers(300.0)
    feeds: list[Feeds] = [{"x": given["x"] * np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32)} for given in FEEDS]
    free = to_int8(model, feeds, activations="static")
    assert operators(free.outcome.model).count("MatMulIntegerToFloat") == 2
    result = to_int8(model, feeds, max_error=free.report.error / 4, activations="static")
    assert [layer.name for layer in result.report.kept] == ["w"]
    assert result.report.error == pytest.approx(errors_of(result.outcome, model, feeds), rel=1e-2)
    assert result.report.error <= free.report.error / 4


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


def test_divisions_are_searched_for_only_where_the_bound_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is most of the search."""
    searched: list[Activations] = []
    scales = adjustments._smoothing_scales

    def counted(known: Activations) -> list[Floats]:
        searched.append(known)
        return scales(known)

    monkeypatch.setattr(adjustments, "_smoothing_scales", counted)
    result = to_int8(layers(300.0), FEEDS, max_error=1.0, activations="per_row")
    assert not searched
    to_int8(layers(300.0), FEEDS, max_error=result.report.error, activations="per_row")
    assert searched


def test_layers_that_read_the_same_are_rounded_as_if_alone() -> None:
    """At once, with the same factors."""
    weights = {"w": normal(8, 8), "v": normal(8, 5), "u": normal(8, 8)}
    body = "p = MatMul(x, w) q = MatMul(x, v) r = MatMul(x, u)"
    model = build(f"g (float[B, 8] x) => (float[B, 8] p, float[B, 5] q, float[B, 8] r) {{ {body} }}", weights)
    found, _ = find_linear_layers(model)
    rows = normal(200, 8, seed=3)
    activations = {"x": Activations([rows.min(axis=0)], [rows.max(axis=0)], [rows])}
    recording = Recording((), activations, dict.fromkeys(weights, ("x",)))
    together = choose_adjustments(found, recording, "dynamic")
    for layer in found:
        rounding = together[layer.name].free.rounding
        codes = rounding.adjust([layer])[layer.name].codes
        np.testing.assert_array_equal(together[layer.name].free.by_name[layer.name].codes, codes)


def test_a_fixed_grid_reaches_further_than_the_calibration() -> None:
    """Values half as large again as any of it are rounded, not cut off."""
    model = build(*FORMS["MatMul"])
    result = to_int8(model, [{"x": X}], activations="static").outcome.model
    larger = {"x": 1.45 * X}
    exact, found = run(model, larger)[0], run(result, larger)[0]
    assert row_errors(found, exact, None).max() < 1e-3


ROW = Row(
    STATIC,
    fires={name: of_text(*form) for name, form in FORMS.items()},
    after="QuantizeLinear MatMulIntegerToFloat",
    atol=None,
)


WIDTH = 64
BODY = "n = LayerNormalization(x, s, t) p = MatMul(n, w) b = Add(p, c) q = Gelu(b) y = MatMul(q, v)"


def mixed_layers() -> ir.Model:
    """Return a layer behind a normalization, and one behind a function."""
    weights: Arrays = {
        "s": 1 + normal(WIDTH, seed=1) / 10,
        "t": normal(WIDTH, seed=2) / 10,
        "w": normal(WIDTH, WIDTH, seed=3) / 8,
        "c": normal(WIDTH, seed=4),
        "v": normal(WIDTH, WIDTH, seed=5) / 8,
    }
    return build(f"g (float[B, S, {WIDTH}] x) => (float[B, S, {WIDTH}] y) {{ {BODY} }}", weights, 20)


def rows_of_many_sizes(seed: int = 0) -> Floats:
    """Return rows_of_many_sizes of very different sizes, which a normalization makes alike."""
    sizes = np.array([1, 3, 10, 0.1, 30, 2], np.float32)
    return normal(2, 6, WIDTH, seed=seed) * sizes[:, None]


def test_what_a_normalization_gives_has_a_fixed_range() -> None:
    """No operators for rows_of_many_sizes are in front of that product, and its bias is inside."""
    result = to_int8(mixed_layers(), [{"x": rows_of_many_sizes()}]).outcome.model
    assert (count(result, "QuantizeLinear"), count(result, "ReduceMax")) == (2, 1)
    assert (
        count(to_int8(mixed_layers(), [{"x": rows_of_many_sizes()}], activations="per_row").outcome.model, "ReduceMax")
        == 2
    )


def test_rows_that_differ_behind_a_normalization_keep_a_scale_each() -> None:
    """A few have all of their length in one channel, each in another, and most are spread evenly."""
    x = np.concatenate([np.eye(WIDTH, dtype=np.float32)[None], np.sign(normal(9, WIDTH, WIDTH, seed=6))])
    result = to_int8(mixed_layers(), [{"x": x}], activations="mixed").outcome.model
    assert count(result, "ReduceMax") == 2


def test_the_error_is_nearly_that_of_rows_on_inputs_that_nothing_was_calibrated_on() -> None:
    """And the answer for a row is the same to the last bit, whatever else is in the batch."""
    model, feeds, others = mixed_layers(), [{"x": rows_of_many_sizes()}], rows_of_many_sizes(seed=9)
    wanted = run(model, {"x": others})[0]
    errors = {}
    for activations in ("mixed", "per_row"):
        found = to_int8(model, feeds, activations=activations).outcome.model
        y = run_as_stored(found, {"x": others})[0]
        errors[activations] = float(np.square(y - wanted).mean())
        alone = run_as_stored(found, {"x": others[:1]})[0]
        assert np.array_equal(alone, y[:1])
    assert 0 < errors["mixed"] < 2.5 * errors["per_row"] < 1e-3
