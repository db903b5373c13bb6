"""Sums in front of normalizations and of Gelu."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtool.optimize.passes.gelu import bias_gelu
from onnxtool.optimize.passes.normalizations import sums
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build_body,
    normal,
    operators,
)
from tests.optimize.passes.properties import Row

WEIGHTS = {"w": normal(8, 8), "bias": normal(8), "scale": normal(8), "shift": normal(8)}
POST = "p = MatMul(x, w) q = Add(p, bias) r = Add(q, x) y = LayerNormalization(r, scale, shift)"
GELU = "p = MatMul(x, w) y = com.microsoft.BiasGelu(p, bias)"
UNFUSED = "p = MatMul(x, w) q = Add(p, bias) y = com.microsoft.Gelu(q)"
PRE = "r = Add(x, h) n = LayerNormalization(r, scale, shift) m = MatMul(n, w) y = Add(m, r)"


def test_the_residual_and_the_bias_are_summed_at_once() -> None:
    """Two additions become one node, and the numbers stay the same to the bit."""
    model = build_body(POST, WEIGHTS)
    assert_same_numbers(sums, model, atol=0)
    assert operators(model) == ["MatMul", "Sum", "LayerNormalization"]


def test_a_sum_that_others_read_is_one_still() -> None:
    """As in layers that normalize first."""
    model = build_body(f"h = Neg(x) {PRE}", WEIGHTS)
    assert_same_numbers(sums, model, atol=0)
    assert operators(model) == ["Neg", "Sum", "LayerNormalization", "MatMul", "Add"]


def test_a_bias_and_gelu_are_two_operators() -> None:
    """Their numbers are those of the operator for both, to the last digits."""
    model = build_body(GELU, WEIGHTS)
    assert_same_numbers(sums, model, atol=1e-6)
    assert operators(model) == ["MatMul", "Sum", "Gelu"]


def test_root_mean_square_normalizations_count() -> None:
    """These are fused by onnxruntime as well."""
    body = "h = Neg(x) w2 = MatMul(h, w) r = Add(w2, x) y = SimplifiedLayerNormalization(r, scale)"
    model = build_body(body, {"w": WEIGHTS["w"], "scale": WEIGHTS["scale"]})
    assert_same_numbers(sums, model, atol=0)
    assert "Sum" in operators(model)


@pytest.mark.parametrize(
    "body",
    [
        "q = Add(x, bias) y = LayerNormalization(q, scale, shift)",
        "q = Mul(x, x) y = LayerNormalization(q, scale, shift)",
        "q = Add(x, x) y = Mul(q, scale)",
    ],
    ids=["a bias alone", "no sum", "no normalization"],
)
def test_other_sums_are_left_alone(body: str) -> None:
    """No session fuses them either."""
    assert_left_alone(sums, build_body(body, WEIGHTS))


@pytest.mark.parametrize("body", [POST, GELU], ids=["a normalization", "Gelu"])
def test_half_precision_is_left_alone(body: str) -> None:
    """The CPU has no Sum of it."""
    weights = {name: array.astype(np.float16) for name, array in WEIGHTS.items()}
    assert_left_alone(sums, build_body(body, weights, dtype="float16"))


def test_a_bias_that_others_read_with_its_product_stays() -> None:
    """Its sum is needed."""
    body = "p = MatMul(x, w) q = Add(p, bias) r = Add(q, x) n = LayerNormalization(r, scale, shift) y = Add(n, q)"
    model = build_body(body, WEIGHTS)
    assert_same_numbers(sums, model, atol=0)
    assert operators(model) == ["MatMul", "Add", "Sum", "LayerNormalization", "Add"]


@pytest.mark.parametrize(
    ("body", "operator"), [(POST, "SkipLayerNormalization"), (UNFUSED, "BiasGelu")], ids=["a normalization", "Gelu"]
)
def test_a_session_as_everybody_opens_it_fuses_nothing_that_is_slower(tmp_path: Path, body: str, operator: str) -> None:
    """Without the pass it does, which is the reason for it."""
    model = build_body(body, WEIGHTS)
    assert operator in loaded_operators(model, tmp_path)
    apply(bias_gelu, model)
    apply(sums, model)
    assert operator not in loaded_operators(model, tmp_path)


def loaded_operators(model: ir.Model, folder: Path) -> list[str]:
    """Return the operators that a session with the default settings runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "loaded.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "loaded.onnx").graph.node]


ROW = Row(
    sums,
    {"normalized last": partial(build_body, POST, WEIGHTS), "gelu": partial(build_body, GELU, WEIGHTS)},
    atol=1e-6,
)
