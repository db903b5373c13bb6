"""Products with a large vocabulary, of which only the maximum over tokens is read.

Letters of shapes: B batch, S sequence, 4 hidden, 9000 numbers of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool.optimize.passes.maxima import blocked_maximum
from tests.optimize.passes.builders import assert_left_alone, assert_same_numbers, build, count, normal
from tests.optimize.passes.properties import Row

V = 9000
WEIGHTS: dict[str, NDArray[Any]] = {
    "w": normal(4, V),
    "bias": normal(V, seed=1),
    "codes": np.random.default_rng(0).integers(-64, 65, (4, V)).astype(np.int8),
    "scales": np.abs(normal(V, seed=2)) + 0.1,
    "zero": np.array(0, np.int8),
    "x_zero": np.array(100, np.uint8),
    "unit": np.array(1, np.float32),
    "last": np.array([-1]),
    "square": normal(4, 4, seed=3),
}
MAXIMUM = "y = ReduceMax <axes=[1], keepdims=0>"
FLOAT = f"s = MatMul(x, w) {MAXIMUM} (s)"
INT8 = f"""
    r = ReduceMax <axes=[-1], keepdims=1> (x) d = Div(x, r) q = QuantizeLinear(d, unit, x_zero)
    p = com.microsoft.MatMulIntegerToFloat(q, codes, unit, scales, x_zero, zero) s = Mul(p, r) b = Add(s, bias)
    {MAXIMUM} (b)
"""
FEEDS = {"x": np.abs(normal(2, 3, 4, seed=4)) + 0.1}


def graph(body: str = FLOAT, outputs: str = f"float[B, {V}] y") -> ir.Model:
    """Return a model of a body with those of the weights that it reads."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    used = {name: array for name, array in WEIGHTS.items() if name in words}
    return build(f"g (float[B, S, 4] x) => ({outputs}) {{ {body} }}", used)


@pytest.mark.parametrize(
    ("body", "operator", "domain"), [(FLOAT, "MatMul", ""), (INT8, "MatMulIntegerToFloat", "com.microsoft")]
)
def test_a_wide_product_is_made_in_blocks(body: str, operator: str, domain: str) -> None:
    """To the bit; the weight is in the file once, and the bias is added to the maxima."""
    model = graph(body)
    assert_same_numbers(blocked_maximum, model, FEEDS, atol=0)
    assert (count(model, operator, domain), count(model, "ReduceMax")) == (3, 3 + (body is INT8))
    held = [value.const_value for value in model.graph.initializers.values()]
    assert sum(tensor.size for tensor in held if tensor is not None and len(tensor.shape) == 2) == 4 * V
    assert count(model, "Add") == (body is INT8)


def test_every_block_has_a_zero_point_of_its_own() -> None:
    """No session loads a model with exact products in which two of them share it."""
    model = graph(INT8)
    assert_same_numbers(blocked_maximum, model, FEEDS, atol=0)
    zeros = [node.inputs[5] for node in model.graph if node.op_type == "MatMulIntegerToFloat"]
    assert len(set(zeros)) == len(zeros) == 3


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        (FLOAT, f"float[B, {V}] y, float[B, S, {V}] s"),
        (f"{FLOAT} t = MatMul(x, w) z = ReduceMean <axes=[1], keepdims=0> (t)", f"float[B, {V}] y, float[B, {V}] z"),
        (FLOAT.replace("axes=[1]", "axes=[2]"), "float[B, S] y"),
        (FLOAT.replace("MatMul(x, w)", "MatMul(x, square)"), "float[B, 4] y"),
        (FLOAT.replace("ReduceMax", "ReduceMin"), f"float[B, {V}] y"),
        (f"p = MatMul(x, w) s = Mul(p, bias) {MAXIMUM} (s)", f"float[B, {V}] y"),
    ],
    ids=["scores are read", "a weight of two", "another axis", "narrow", "a minimum", "a number for each column"],
)
def test_other_products_stay_whole(body: str, outputs: str) -> None:
    """Nothing would be saved, or the weight would be stored twice."""
    assert_left_alone(blocked_maximum, graph(body, outputs))


ROW = Row(blocked_maximum, {"float32": graph, "int8": partial(graph, INT8)}, FEEDS, atol=0)
