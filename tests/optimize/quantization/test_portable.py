"""int8 whose numbers are those of every CPU, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtool.errors import PassError
from onnxtool.graph.edit import tensor_of
from onnxtool.model_file.metadata import EXACT_PRODUCTS_KEY, REQUIRED
from onnxtool.model_file.weights import write_inline
from onnxtool.optimize.options import ACTIVATIONS
from onnxtool.optimize.quantization.activations import Feeds, open_written
from onnxtool.optimize.quantization.arithmetic import (
    LARGEST_PAIR,
    Adjustment,
    Floats,
    RowGrid,
    damped_factors,
    nearest_codes,
    round_channel,
    round_together,
    weight_scale,
)
from onnxtool.optimize.quantization.int8 import quantize_int8, to_int8
from onnxtool.runtime.providers import EXACT_PRODUCTS_OPTION, products_saturate
from tests.optimize.exact_products import with_exact_products
from tests.optimize.passes.builders import apply, build, build_body, normal, operators, run_as_stored
from tests.optimize.quantization.test_linear_layers import FORMS, W, X, round_weight

GRID = RowGrid(100)
PER_ROW = quantize_int8(adjustments={"w": Adjustment(activations=GRID)})
# Activations and weights of one sign, all large: what saturates where anything does.
WIDE = np.abs(normal(3, 6, 64)) + 1
LARGE: dict[str, Floats] = {"w": np.abs(normal(64, 64, seed=1)) + 2, "v": np.abs(normal(64, 64, seed=2)) + 2}
BODY = "p = MatMul(x, w) q = Relu(p) y = MatMul(q, v)"


def wide() -> ir.Model:
    """Return two layers, 64 wide."""
    return build(f"g (float[B, S, 64] x) => (float[B, S, 64] y) {{ {BODY} }}", LARGE)


def with_option(model: ir.Model, feeds: Feeds, path: Path) -> Floats:
    """Run `model` with products that a session makes exact."""
    write_inline(model, path)
    options = ort.SessionOptions()
    options.add_session_config_entry(EXACT_PRODUCTS_OPTION, "1")
    output: Floats = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, dict(feeds))[0]
    return output


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opset", [17, 21])
def test_each_row_is_rounded_by_its_own_scale(form: str, opset: int) -> None:
    """By the operators of either opset, in every form of a layer, with rows of very different sizes."""
    graph, weights = FORMS[form]
    x = X * np.array([1, 1e3, 1e-3, 0, 1], np.float32)[:, None]
    x = x.reshape(-1, 8) if "S" not in graph else x
    model = build(graph, weights, opset=opset)
    assert apply(PER_ROW, model).num_changes == 1
    assert ("Div" in operators(model)) == (opset == 17)
    expected = GRID.round(x.reshape(-1, 8)) @ round_weight(W) + weights.get("b", np.zeros(12, np.float32))
    found = run_as_stored(model, {"x": x})[0].reshape(-1, 12)
    sizes = np.abs(x.reshape(-1, 8)).max(axis=1, keepdims=True)
    assert (np.abs(found - expected) <= 1e-4 * np.maximum(sizes, 1)).all()


def test_the_smallest_element_is_not_looked_for_where_it_is_known() -> None:
    """Behind a Gelu, whose values are never below -0.1701; the numbers stay."""
    graph = "g (float[B, S, 8] x) => (float[B, S, 12] y) { a = com.microsoft.Gelu(x) y = MatMul(a, w) }"
    gelu = build(graph, {"w": W})
    found = build(graph, {"w": W})
    apply(PER_ROW, found)
    assert "ReduceMin" not in operators(found)
    np.testing.assert_allclose(run_as_stored(found, {"x": X})[0], run_as_stored(gelu, {"x": X})[0], atol=0.1, rtol=0)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_the_numbers_are_those_of_exact_products(activations: str, tmp_path: Path) -> None:
    """By the kernels of this CPU, by those that a session may be asked for, and by those of other types.

    Kernels for one row are others than those for several.
    """
    result = to_int8(wide(), [{"x": WIDE}], activations=activations).outcome.model
    for x in (WIDE, WIDE[:1, :1]):
        found = run_as_stored(result, {"x": x})[0]
        np.testing.assert_allclose(found, with_option(result, {"x": x}, tmp_path / "m.onnx"), rtol=1e-6)
        np.testing.assert_allclose(found, run_as_stored(with_exact_products(result), {"x": x})[0], rtol=1e-6)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_model_for_exact_cpus_is_exact_on_this_one(activations: str, tmp_path: Path) -> None:
    """Its stamp tells a session of onnxtool to ask for it; without it, the sums of some CPUs saturate."""
    model = wide()
    model.metadata_props[EXACT_PRODUCTS_KEY] = REQUIRED
    result = to_int8(model, [{"x": WIDE}], activations=activations, exact=True).outcome.model
    codes = tensor_of(result.graph.initializers["w_int8"]).numpy().astype(int)
    assert (codes[0::2] + codes[1::2]).max() > LARGEST_PAIR
    expected = run_as_stored(with_exact_products(result), {"x": WIDE})[0]
    np.testing.assert_allclose(open_written(result, tmp_path).run({"x": WIDE})["y"], expected, rtol=1e-6)
    difference = np.abs(run_as_stored(result, {"x": WIDE})[0] / expected - 1).max()
    assert (difference > 0.01) == products_saturate()


def test_shared_weights_are_not_for_exact_cpus_alone() -> None:
    """No session loads such a model with the option that other CPUs need."""
    model = build_body("p = MatMul(x, w) y = MatMul(p, w)", {"w": normal(8, 8)})
    with pytest.raises(PassError, match="layers share a weight") as caught:
        to_int8(model, [{"x": X}], exact=True)
    assert caught.value.hint == "pass --cpu any"


def test_an_answer_per_row_does_not_depend_on_the_batch() -> None:
    """To the last bit; one range for all is another one in a larger batch."""
    together = np.concatenate([WIDE[:1], 5 * WIDE[1:]])
    for activations, same in (("mixed", True), ("per_row", True), ("static", True), ("dynamic", False)):
        result = to_int8(wide(), [{"x": WIDE}], activations=activations).outcome.model
        alone, among = run_as_stored(result, {"x": WIDE[:1]})[0], run_as_stored(result, {"x": together})[0][:1]
        assert np.array_equal(alone, among) == same


def test_layers_that_share_a_weight_have_rows_of_their_own() -> None:
    """Also where the weight is read as its transpose, for which nothing is known."""
    for body in ("p = MatMul(x, w) y = MatMul(p, w)", "p = MatMul(x, w) y = com.microsoft.FusedMatMul<transB=1>(p, w)"):
        result = to_int8(build_body(body, {"w": normal(8, 8) / 4}), [{"x": X}])
        found = operators(result.outcome.model)
        assert (found.count("ReduceMax"), found.count("DynamicQuantizeLinear")) == (2, 0)
        assert result.report.error < 1e-3


def test_errors_of_channels_make_up_for_each_other() -> None:
    """On rows whose channels vary together; neighbours stay within what 16 bits hold."""
    rows = normal(500, 6, seed=4) @ normal(6, 70, seed=5) + 0.1 * normal(500, 70, seed=6)
    weight = normal(70, 30, seed=7)
    scale = weight_scale(weight)
    codes = np.empty(weight.shape, np.int8)

    def one(place: int, values: Floats) -> Floats:
        before = codes[place - 1].astype(np.float32) if place % 2 else None
        codes[place] = round_channel(values, scale, before)
        rounded: Floats = codes[place] * scale
        return rounded

    round_together(weight, damped_factors(rows), one)
    together, nearest = (
        np.square(rows @ (found * scale - weight)).mean() for found in (codes, nearest_codes(weight, scale))
    )
    assert together < 0.5 * nearest
    wide_codes = codes.astype(int)
    for sign in (1, -1):
        parts = np.maximum(sign * wide_codes, 0)
        assert (parts[0::2] + parts[1::2]).max() <= LARGEST_PAIR


def test_factors_are_those_of_the_damped_moments() -> None:
    """One matrix for each block of channels: F.T @ D @ F, with ones on the diagonal of F."""
    rows = normal(300, 1100, seed=8)
    blocks = damped_factors(rows)
    assert [len(factor) for factor in blocks] == [1024, 76]
    for factor, part in zip(blocks, (rows[:, :1024], rows[:, 1024:]), strict=True):
        moments = part.astype(np.float64).T @ part
        moments += np.eye(len(moments)) * moments.trace() / len(moments) * max(1, len(moments) / 300)
        exact = factor.astype(np.float64)
        scaled = np.linalg.solve(exact.T, moments)
        np.testing.assert_allclose(np.linalg.solve(exact.T, scaled.T), np.diag(np.diag(scaled)), atol=1e-3, rtol=1e-4)
        np.testing.assert_array_equal(factor, np.tril(factor))
