"""Half precision inside, and the same inputs and outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.quantization.float16 import to_float16
from tests.optimize.passes.builders import Arrays, apply, assert_left_alone, build, normal, ragged_feeds, run
from tests.workshop import Workshop


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_the_numbers_are_those_of_eleven_bits(workshop: Workshop, exporter: str) -> None:
    """On real tokens; hidden states are about 3 large, and each layer rounds anew."""
    path, feeds = workshop.exported("tiny-encoder", exporter=exporter), ragged_feeds()
    expected = run(ir.load(path), feeds)
    model = ir.load(path)
    outcome = apply(to_float16(), model)
    assert outcome.num_changes > 0
    found = run(outcome.model, feeds)
    real = feeds["attention_mask"].astype(bool)
    np.testing.assert_allclose(found[0][real], expected[0][real], atol=2e-2, rtol=0)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-2, rtol=0)


def test_inputs_and_outputs_keep_their_types_and_the_weights_are_halved(workshop: Workshop, tmp_path: Path) -> None:
    """Whoever calls the model calls it as before."""
    path = workshop.exported("tiny-encoder", exporter="torchscript")
    model = apply(to_float16(), ir.load(path)).model
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT}
    ir.save(ir.external_data.load_to_model(model), tmp_path / "half.onnx")
    assert (tmp_path / "half.onnx").stat().st_size < 0.52 * path.stat().st_size


def test_twice_is_once(workshop: Workshop) -> None:
    """There is nothing left to round."""
    model = apply(to_float16(), ir.load(workshop.exported("tiny-encoder", exporter="torchscript"))).model
    assert apply(to_float16(), model).num_changes == 0


def test_a_model_without_matrices_is_left_alone() -> None:
    """There is nothing to halve."""
    model = build("g (int64[B] x) => (int64[B] y) { y = Neg(x) }")
    assert_left_alone(to_float16(), model, "no weight of two axes or more is float32")


def test_angles_of_far_positions_keep_their_digits() -> None:
    """A position of thousands has no half steps left in float16, and its cosine is another number."""
    body = "a = Mul(x, f) c = Cos(a) y = MatMul(c, w)"
    model = build(
        f"g (float[N, 4] x) => (float[N, 4] y) {{ {body} }}",
        {"f": np.array([1.0, 0.3, 0.1, 0.03], np.float32), "w": np.eye(4, dtype=np.float32)},
    )
    feeds = {"x": np.full((2, 4), 3001.7, np.float32)}
    (expected,) = run(model, feeds)
    (found,) = run(apply(to_float16(), model).model, feeds)
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)


def test_branches_read_float32_of_what_is_computed_in_half() -> None:
    """Nothing inside of them is converted, neither what they read nor what they make of it."""
    branches = [
        f"b{number} () => (float[N, 4] z) {{ z = {body} }}" for number, body in enumerate(("Add(y, y)", "Exp(y)"))
    ]
    body = f"y = MatMul(x, w) z = If<then_branch = {branches[0]}, else_branch = {branches[1]}>(c) o = MatMul(z, w)"
    weights = {"w": np.diag(np.array([1.0, 0.3, 0.1, 0.03], np.float32))}
    model = build(f"g (float[N, 4] x, bool c) => (float[N, 4] o) {{ {body} }}", weights)
    for choice in (True, False):
        feeds = {"x": normal(2, 4), "c": np.array(choice)}
        converted = apply(to_float16(), model.clone())
        assert converted.num_changes == 2
        np.testing.assert_allclose(run(converted.model, feeds)[0], run(model, feeds)[0], atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape(y) z = ConstantOfShape(s) o = Add(y, z)",
        "z = EyeLike<dtype = 1>(y) o = Add(y, z)",
        "a, m = LayerNormalization(y, g) o = Sub(a, m)",
        "a, m = LayerNormalization(y, g) o = Mul(a, a)",
        "q = QuantizeLinear(y, s, z) d = DequantizeLinear(q, s, z) o = Add(d, d)",
        "q, qs, qz = DynamicQuantizeLinear(y) o = DequantizeLinear(q, qs, qz)",
    ],
    ids=["fill by default", "dtype", "mean of a normalization", "unread mean", "quantized", "dynamically quantized"],
)
def test_what_is_of_one_dtype_meets_what_is_half(body: str) -> None:
    """Operators that say their dtype, have one by default, or know float32 alone: the file loads and is right."""
    constants = "<float s = {0.05}, uint8 z = {128}>" if "(y, s, z)" in body else ""
    weights: Arrays = {"w": normal(4, 4, seed=1)} | ({"g": normal(4, seed=2)} if " g)" in body else {})
    model = build(f"g (float[N, 4] x) => (float[N, 4] o) {constants} {{ y = MatMul(x, w) {body} }}", weights)
    feeds = {"x": normal(2, 4, seed=3)}
    (expected,) = run(model, feeds)
    converted = apply(to_float16(), model)
    assert converted.num_changes > 0
    np.testing.assert_allclose(run(converted.model, feeds)[0], expected, atol=6e-2, rtol=0)  # one step of the quantized
