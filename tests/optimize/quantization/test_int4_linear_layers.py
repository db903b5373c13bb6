"""Products with weights in blocks of 4 bits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.graph.edit import attribute, tensor_of
from onnxtool.graph.operators import MICROSOFT
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.quantization.blocks import find_grid
from onnxtool.optimize.quantization.error import row_errors
from onnxtool.optimize.quantization.int4 import quantize_int4
from tests.optimize.passes.builders import (
    Row,
    apply,
    build,
    build_body,
    count,
    normal,
    of_text,
    operators,
    ragged_feeds,
    run,
)
from tests.optimize.quantization.test_blocks import dequantize
from tests.optimize.quantization.test_int8_linear_layers import ATTENTION, FORMS, OTHERS, QKV, W, X
from tests.workshop import Workshop

INT4 = quantize_int4()
CUDA = quantize_int4(provider="cuda")
WIDE, WIDE_WEIGHTS = "g (float[B, S, 40] x) => (float[B, S, 7] y) { p = MatMul(x, w) y = Add(p, b) }", (40, 7)


def rounded(bits: int = 4) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return dequantize(W, find_grid(W, bits))


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_the_rounded_weight(form: str) -> None:
    """Dequantized by NumPy. On the CPU activations are rounded to int8 as well, on CUDA they are not."""
    graph, weights = FORMS[form]
    x = X.reshape(-1, 8) if "S" not in graph else X
    expected = x @ rounded() + weights.get("b", np.zeros(12, np.float32))
    for step, atol in ((INT4, 0.05), (CUDA, 1e-5)):  # half of 1/127 of the largest activation, 8 times; float32
        model = build(graph, weights)
        apply(step, model)
        held = {"w_int4_blocks", "w_int4_scale", "w_int4_zero", *weights} - {"w"}
        assert sorted(model.graph.initializers) == sorted(held)
        assert tensor_of(model.graph.initializers["w_int4_blocks"]).dtype == ir.DataType.UINT8
        np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kept", [{}, {"w": "int8"}])
def test_a_width_that_no_block_divides_is_padded(kept: dict[str, str]) -> None:
    """As onnxruntime expects it: K of 40, N of 7."""
    weights = {"w": normal(*WIDE_WEIGHTS, seed=4), "b": normal(7, seed=5)}
    model = build(WIDE, weights)
    apply(quantize_int4(kept, provider="cuda"), model)
    x = normal(2, 3, 40)
    expected = x @ dequantize(weights["w"], find_grid(weights["w"], 8 if kept else 4)) + weights["b"]
    np.testing.assert_allclose(run(model, {"x": x})[0], expected, atol=1e-5, rtol=0)


def test_what_the_operator_is_told_follows_the_provider() -> None:
    """Integer layers and a bias inside on the CPU; neither on CUDA."""
    for step, level, names in ((INT4, 4, ["MatMulNBits"]), (CUDA, None, ["MatMulNBits", "Add"])):
        model = build(*FORMS["MatMul and Add"])
        apply(step, model)
        assert operators(model) == names
        assert attribute(next(iter(model.graph)), "accuracy_level") == level


def test_layers_are_kept_in_8_bits_and_in_float32() -> None:
    """By the names of their weights."""
    weights = {"w": normal(8, 8), "v": normal(8, 8), "u": normal(8, 8)}
    model = build_body("p = MatMul(x, w) q = MatMul(p, v) y = MatMul(q, u)", weights)
    assert apply(quantize_int4({"v": "int8", "u": "float32"}), model).num_changes == 2
    assert operators(model) == ["MatMulNBits", "MatMulNBits", "MatMul"]
    first, second, _ = model.graph
    assert [attribute(node, "bits") for node in (first, second)] == [4, 8]
    assert "u" in model.graph.initializers


def test_layers_that_share_a_weight_share_its_blocks() -> None:
    """As those of ALBERT do."""
    model = build_body("p = MatMul(x, w) y = MatMul(p, w)", {"w": normal(8, 8)})
    assert apply(INT4, model).num_changes == 2
    assert sorted(model.graph.initializers) == ["w_int4_blocks", "w_int4_scale", "w_int4_zero"]


def test_a_packed_attention_is_opened() -> None:
    """The numbers are those of the packed one with its weight rounded in NumPy."""
    graph = f"{ATTENTION} {{ y = com.microsoft.Attention<num_heads=2>(x, w, b, m) }}"
    model = build(graph, QKV)
    feeds = {"x": X, "m": np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], np.int32)}
    exact = dequantize(np.asarray(QKV["w"]), find_grid(np.asarray(QKV["w"]), 4))
    expected = run(build(graph, {**QKV, "w": exact}), feeds)[0]
    assert apply(CUDA, model).num_changes == 3
    assert operators(model) == ["MatMulNBits", "Add"] * 3 + ["MultiHeadAttention"]
    real = feeds["m"].astype(bool)
    np.testing.assert_allclose(run(model, feeds)[0][real], expected[real], atol=1e-4, rtol=0)


def test_an_attention_that_is_kept_stays_packed() -> None:
    """In float32; in 8 bits it is opened."""
    graph = f"{ATTENTION} {{ y = com.microsoft.Attention<num_heads=2>(x, w, b, m) }}"
    exact, eight = build(graph, QKV), build(graph, QKV)
    parts = ("w_query", "w_key", "w_value")
    assert apply(quantize_int4(dict.fromkeys(parts, "float32")), exact).num_changes == 0
    assert operators(exact) == ["Attention"]
    assert apply(quantize_int4(dict.fromkeys(parts, "int8")), eight).num_changes == 3


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_export_runs_in_int4(workshop: Workshop, exporter: str) -> None:
    """Every row points about where it did in float32, as far as four bits go through two layers of random weights."""
    model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    expected = run(model, ragged_feeds())[0]
    assert apply(INT4, model).num_changes == count(model, "MatMulNBits", MICROSOFT) >= 12
    real = ragged_feeds()["attention_mask"].astype(bool)
    assert row_errors(run(model, ragged_feeds())[0], expected, real).max() < 0.15


SQUARE = "g (float[B, 32] x) => (float[B, 32] y, float[B, 32] z) { y = MatMul(x, w) z = Gemm<transB=1>(x, w) }"


def test_a_square_weight_and_its_transpose_are_stored_apart() -> None:
    """They have one name in the graph and one shape, and other columns."""
    weight, x = normal(32, 32), normal(3, 32, seed=1)
    model = build(SQUARE, {"w": weight})
    assert apply(CUDA, model).num_changes == 2
    plain, transposed = (dequantize(one, find_grid(one, 4)) for one in (weight, weight.T))
    for found, expected in zip(run(model, {"x": x}), (x @ plain, x @ transposed), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


ROW = Row(
    INT4, fires={name: of_text(*form) for name, form in FORMS.items()}, after="MatMulNBits", stays=OTHERS, atol=None
)
