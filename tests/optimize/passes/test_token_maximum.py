"""The maximum over tokens behind a vocabulary head.

Letters of shapes: B batch, S sequence, 8 hidden, 24 numbers of the vocabulary.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.passes.maxima import token_maximum
from tests.optimize.passes.builders import apply, assert_left_alone, assert_same_numbers, build, normal, operators, run
from tests.optimize.passes.properties import Row

WEIGHTS = {"w": normal(8, 24, seed=1), "bias": normal(24, seed=2)}
CONSTANTS = {
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
FEEDS = {"x": 3 * normal(5, 5, 8), "mask": FLAGS}


def graph(body: str = MASKED_FIRST, opset: int = 17, mask: str = "int64", outputs: str = "float[B, 24] y") -> ir.Model:
    """Return a model of a body with those of the constants that it reads."""
    if opset >= 18:
        body = body.replace("<axes=[1], keepdims=0> (a)", "<keepdims=0> (a, first)")
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    used = {name: array for name, array in {**WEIGHTS, **CONSTANTS}.items() if name in words}
    return build(f"g (float[B, S, 8] x, {mask}[B, S] mask) => ({outputs}) {{ {body} }}", used, opset)


@pytest.mark.parametrize("body", [MASKED_FIRST, MASKED_LAST, UNMASKED, KEPT])
def test_only_product_and_maximum_see_every_token(body: str) -> None:
    """All else runs on one number for each word of the vocabulary; a text without tokens keeps its zeros."""
    model = graph(body)
    assert_same_numbers(token_maximum, model, FEEDS, atol=1e-6)
    names = operators(model)
    assert names.index("ReduceMax") == names.index("MatMul") + 1


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("mask", ["int32", "bool"])
def test_masks_of_any_dtype_and_opset_are_understood(mask: str, opset: int) -> None:
    """Flags are flags."""
    feeds = {**FEEDS, "mask": FLAGS.astype(mask)}
    assert_same_numbers(token_maximum, graph(MASKED_FIRST, opset, mask), feeds, atol=1e-6)


def test_padding_counts_nothing_however_large_it_is() -> None:
    """Its state is replaced, not multiplied: infinity times zero would be no number."""
    model = graph()
    before = run(model, FEEDS)[0]
    states = FEEDS["x"].copy()
    states[FLAGS == 0] = np.inf
    apply(token_maximum, model)
    np.testing.assert_allclose(run(model, {**FEEDS, "x": states})[0][:4], before[:4], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (MASKED_FIRST.replace("Relu(h)", "Identity(h)"), "padding counts"),
        (MASKED_LAST.replace("Add(one, r)", "Add(r, low)"), "padding counts"),
        (MASKED_LAST.replace("Relu(s)", "Tanh(s)"), "padding counts"),
        (MASKED_LAST.replace("Relu(s)", "Cos(s)"), ""),
        (MASKED_LAST.replace("Add(one, r)", "Mul(r, negative)"), ""),
        (MASKED_LAST.replace("Log(t)", "Div(one, t)"), ""),
        (MASKED_FIRST.replace("axes=[1]", "axes=[1, 0]"), ""),
        (
            MASKED_FIRST.replace("ReduceMax", "ReduceSum").replace(
                "<axes=[1], keepdims=0> (a)", "<keepdims=0> (a, first)"
            ),
            "",
        ),
        (MASKED_FIRST.replace("Unsqueeze(c, last)", "Unsqueeze(c, first)").replace("Mul(s, m)", "Add(s, s)"), ""),
        (MASKED_FIRST.replace("Cast <to=1> (mask)", "ReduceMean <axes=[2], keepdims=0> (x)"), ""),
    ],
    ids=[
        "may be negative",
        "falls below zero",
        "Tanh",
        "falls somewhere",
        "turned",
        "a number over it",
        "over texts as well",
        "a sum",
        "twice the same",
        "weights and no flags",
    ],
)
def test_what_padding_or_order_could_change_stays(body: str, note: str) -> None:
    """Nothing is proved about it."""
    assert_left_alone(token_maximum, graph(body), note)


def test_logits_that_others_read_stay() -> None:
    """They are computed for every token anyway."""
    assert_left_alone(token_maximum, graph(outputs="float[B, 24] y, float[B, S, 24] s"))


ROW = Row(
    token_maximum,
    {"masked first": graph, "masked last": partial(graph, MASKED_LAST), "opset 18": partial(graph, opset=18)},
    FEEDS,
)
