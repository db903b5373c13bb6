"""Maxima in front of a Softmax, over tokens, and over the blocks of a wide product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool.optimize.passes.maxima import blocked_maximum, softmax_maximum, token_maximum
from tests.optimize.passes.builders import (
    Graph,
    Row,
    apply,
    assert_same_numbers,
    count,
    normal,
    of_body,
    of_text,
    operators,
    run,
)

SOFTMAX = "m = ReduceMax <axes=[-1]> (x) d = Sub(x, m) y = Softmax <axis=-1> (d)"

CONSTANTS: dict[str, NDArray[Any]] = {
    "w": normal(8, 24, seed=1),
    "bias": normal(24, seed=2),
    "first": np.array([1]),
    "last": np.array([-1]),
    "one": np.array(1, np.float32),
    "negative": np.array(-1, np.float32),
    "twice": np.array(2, np.float32),
    "low": normal(24, seed=3) - 4,
}
MASK = "c = Cast <to=1> (mask) m = Unsqueeze(c, last)"
SCORES = "p = MatMul(x, w) s = Add(p, bias)"
# As this project exports SPLADE, as its authors write it, and without a mask.
MASKED_FIRST = (
    f"{MASK} {SCORES} a = Mul(s, m) h = ReduceMax <axes=[1], keepdims=0> (a) r = Relu(h) t = Add(r, one) y = Log(t)"
)
MASKED_LAST = (
    f"{MASK} {SCORES} r = Relu(s) t = Add(one, r) l = Log(t) a = Mul(l, m) y = ReduceMax <axes=[1], keepdims=0> (a)"
)
UNMASKED = f"""
    {MASK} {SCORES} d = Div(s, twice) e = Exp(d) h = ReduceMax <axes=[1], keepdims=0> (e)
    o = ReduceMax <axes=[1], keepdims=0> (m) y = Mul(h, o)
"""
KEPT = (
    MASKED_LAST.replace("y = ReduceMax <axes=[1], keepdims=0>", "k = ReduceMax <axes=[1], keepdims=1>")
    + " y = Squeeze(k, first)"
)
# Rows padded right, left, in the middle, not at all, and without a token.
FLAGS = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
TOKENS = {"x": 3 * normal(5, 5, 8), "mask": FLAGS}

V = 9000
WIDE: dict[str, NDArray[Any]] = {
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
BLOCKS = {"x": np.abs(normal(2, 3, 4, seed=4)) + 0.1}


def read_by(body: str, constants: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return those of the constants that a body reads."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return {name: array for name, array in constants.items() if name in words}


def tokens(body: str = MASKED_FIRST, opset: int = 17, mask: str = "int64", outputs: str = "float[B, 24] y") -> Graph:
    """Return the builder of a model that takes a maximum over tokens."""
    if opset >= 18:
        body = body.replace("<axes=[1], keepdims=0> (a)", "<keepdims=0> (a, first)")
    text = f"g (float[B, S, 8] x, {mask}[B, S] mask) => ({outputs}) {{ {body} }}"
    return of_text(text, read_by(body, CONSTANTS), opset)


def blocks(body: str = FLOAT, outputs: str = f"float[B, {V}] y") -> Graph:
    """Return the builder of a model of a wide product."""
    return of_text(f"g (float[B, S, 4] x) => ({outputs}) {{ {body} }}", read_by(body, WIDE))


ROWS = (
    Row(
        softmax_maximum,
        fires={
            "opset 17": of_body(SOFTMAX),
            "opset 18": of_body(SOFTMAX.replace(" <axes=[-1]> (x)", " (x, last)"), {"last": np.array([-1])}, 18),
            "of logarithms": of_body(SOFTMAX.replace("Soft", "LogSoft")),
        },
        after={"opset 17": "Softmax", "opset 18": "Softmax", "of logarithms": "LogSoftmax"},
        atol=1e-7,
        stays={
            "another axis": (of_body(SOFTMAX.replace("axes=[-1]", "axes=[1]")), ""),
            "more axes": (of_body(SOFTMAX.replace("axes=[-1]", "axes=[0, -1]")), ""),
            "of another tensor": (
                of_body(SOFTMAX.replace("axes=[-1]> (x)", "axes=[-1]> (n)").replace("m =", "n = Neg(x) m =")),
                "",
            ),
            "turned": (of_body(SOFTMAX.replace("Sub(x, m)", "Sub(m, x)")), ""),
            "another softmax": (of_body(SOFTMAX.replace("axis=-1", "axis=1")), ""),
            "no softmax": (of_body(SOFTMAX.replace("Max", "Min").replace("Softmax <axis=-1>", "Identity")), ""),
        },
    ),
    Row(
        token_maximum,
        fires={
            "masked first": tokens(),
            "masked last": tokens(MASKED_LAST),
            "unmasked": tokens(UNMASKED),
            "axes kept": tokens(KEPT),
            "opset 13": tokens(opset=13),
            "opset 18": tokens(opset=18),
        },
        feeds=TOKENS,
        atol=1e-6,
        # Nothing is proved about what padding or order could change.
        stays={
            "may be negative": (tokens(MASKED_FIRST.replace("Relu(h)", "Identity(h)")), "padding counts"),
            "falls below zero": (tokens(MASKED_LAST.replace("Add(one, r)", "Add(r, low)")), "padding counts"),
            "Tanh": (tokens(MASKED_LAST.replace("Relu(s)", "Tanh(s)")), "padding counts"),
            "falls somewhere": (tokens(MASKED_LAST.replace("Relu(s)", "Cos(s)")), ""),
            "turned": (tokens(MASKED_LAST.replace("Add(one, r)", "Mul(r, negative)")), ""),
            "a number over it": (tokens(MASKED_LAST.replace("Log(t)", "Div(one, t)")), ""),
            "over texts as well": (tokens(MASKED_FIRST.replace("axes=[1]", "axes=[1, 0]")), ""),
            "a sum": (tokens(MASKED_FIRST.replace("ReduceMax", "ReduceSum"), opset=18), ""),
            "twice the same": (
                tokens(MASKED_FIRST.replace("Unsqueeze(c, last)", "Unsqueeze(c, first)").replace("(s, m)", "(s, s)")),
                "",
            ),
            "weights and no flags": (
                tokens(MASKED_FIRST.replace("Cast <to=1> (mask)", "ReduceMean <axes=[2], keepdims=0> (x)")),
                "",
            ),
            "others read the logits": (tokens(outputs="float[B, 24] y, float[B, S, 24] s"), ""),
        },
    ),
    Row(
        blocked_maximum,
        fires={"float32": blocks(), "int8": blocks(INT8)},
        feeds=BLOCKS,
        atol=0,
        # Nothing would be saved, or the weight would be stored twice.
        stays={
            "scores are read": (blocks(FLOAT, f"float[B, {V}] y, float[B, S, {V}] s"), ""),
            "a weight of two": (
                blocks(
                    f"{FLOAT} t = MatMul(x, w) z = ReduceMean <axes=[1], keepdims=0> (t)",
                    f"float[B, {V}] y, float[B, {V}] z",
                ),
                "",
            ),
            "another axis": (blocks(FLOAT.replace("axes=[1]", "axes=[2]"), "float[B, S] y"), ""),
            "narrow": (blocks(FLOAT.replace("MatMul(x, w)", "MatMul(x, square)"), "float[B, 4] y"), ""),
            "a minimum": (blocks(FLOAT.replace("ReduceMax", "ReduceMin")), ""),
            "a number for each column": (blocks(f"p = MatMul(x, w) s = Mul(p, bias) {MAXIMUM} (s)"), ""),
        },
    ),
)


@pytest.mark.parametrize("body", [MASKED_FIRST, MASKED_LAST, UNMASKED, KEPT])
def test_only_product_and_maximum_see_every_token(body: str) -> None:
    """All else runs on one number for each word of the vocabulary."""
    model = tokens(body)()
    apply(token_maximum, model)
    names = operators(model)
    assert names.index("ReduceMax") == names.index("MatMul") + 1


@pytest.mark.parametrize("mask", ["int32", "bool"])
def test_masks_of_any_dtype_are_understood(mask: str) -> None:
    """Flags are flags."""
    assert_same_numbers(token_maximum, tokens(mask=mask)(), {**TOKENS, "mask": FLAGS.astype(mask)}, atol=1e-6)


def test_padding_counts_nothing_however_large_it_is() -> None:
    """Its state is replaced, not multiplied: infinity times zero would be no number."""
    model = tokens()()
    before = run(model, TOKENS)[0]
    states = TOKENS["x"].copy()
    states[FLAGS == 0] = np.inf
    apply(token_maximum, model)
    np.testing.assert_allclose(run(model, {**TOKENS, "x": states})[0][:4], before[:4], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "operator", "domain"), [(FLOAT, "MatMul", ""), (INT8, "MatMulIntegerToFloat", "com.microsoft")]
)
def test_a_wide_product_is_made_in_blocks(body: str, operator: str, domain: str) -> None:
    """The weight is in the file once, and the bias is added to the maxima.

    Every block has a zero point of its own: no session loads a model with exact products in which two share it.
    """
    model: ir.Model = blocks(body)()
    apply(blocked_maximum, model)
    assert (count(model, operator, domain), count(model, "ReduceMax")) == (3, 3 + (body is INT8))
    held = [value.const_value for value in model.graph.initializers.values()]
    assert sum(tensor.size for tensor in held if tensor is not None and len(tensor.shape) == 2) == 4 * V
    assert count(model, "Add") == (body is INT8)
    zeros = [node.inputs[5] for node in model.graph if node.op_type == "MatMulIntegerToFloat"]
    assert len(set(zeros)) == len(zeros)
