"""Products with heads that are repeated.

Letters of shapes: B batch, S queries, L keys, H = 4 heads of queries, 2 of keys and values, D = 2 the size of a head.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.passes.repeated_heads import repeated_heads
from tests.optimize.passes.builders import Row, assert_left_alone, assert_same_numbers, build, count, normal, operators

CACHED = "float[B, 4, S, 2] q, float[B, 2, L, 2] keys, float[B, 2, L, 2] values"
SPLIT = """
    k0 = Reshape(k_flat, inside) keys = Transpose <perm=[0, 2, 1, 3]> (k0)
    v0 = Reshape(v_flat, inside) values = Transpose <perm=[0, 2, 1, 3]> (v0)
"""
REPEAT = """
    ku = Unsqueeze(keys, two) ke = Expand(ku, twice) k4 = Reshape(ke, repeated) k = Transpose <perm=[0, 1, 3, 2]> (k4)
    vu = Unsqueeze(values, two) ve = Expand(vu, twice) v = Reshape(ve, repeated)
"""
CAPPED = "s = MatMul(q, k) a = Mul(s, half) b = Div(a, cap) t = Tanh(b) c = Mul(t, cap) p = Softmax(c) y = MatMul(p, v)"
CONSTANTS = {
    "two": np.array([2]),
    "twice": np.array([1, 1, 2, 1, 1]),
    "one": np.array([1]),
    "across": np.array([1, 2, 1, 1, 1]),
    "rows": np.array([3, 1, 1, 1]),
    "repeated": np.array([0, 4, -1, 2]),
    "inside": np.array([0, 0, 2, 2]),
    "half": np.array(0.5, np.float32),
    "cap": np.array(3.0, np.float32),
}


def graph(body: str = REPEAT + CAPPED, inputs: str = CACHED, outputs: str = "float[B, 4, S, 2] y") -> ir.Model:
    """Return a model of capped scores whose keys and values are repeated."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    used = {name: array for name, array in CONSTANTS.items() if name in words}
    return build(f"g ({inputs}) => ({outputs}) {{ {body} }}", used)


FLAT = partial(graph, SPLIT + REPEAT + CAPPED, "float[B, 4, S, 2] q, float[B, L, 4] k_flat, float[B, L, 4] v_flat")
FEEDS = {"q": normal(3, 4, 5, 2), "keys": normal(3, 2, 7, 2, seed=1), "values": normal(3, 2, 7, 2, seed=2)}
FLAT_FEEDS = {"q": FEEDS["q"], "k_flat": normal(3, 7, 4, seed=1), "v_flat": normal(3, 7, 4, seed=2)}


@pytest.mark.parametrize("form", ["cached", "flat"])
def test_heads_that_several_share_are_multiplied_once(form: str) -> None:
    """The scales go into the product: between it and the Tanh nothing is left."""
    model, feeds = (graph(), FEEDS) if form == "cached" else (FLAT(), FLAT_FEEDS)
    assert_same_numbers(repeated_heads, model, feeds)
    assert (count(model, "Expand"), count(model, "FusedMatMul", "com.microsoft")) == (0, 1)
    tail = operators(model)[operators(model).index("FusedMatMul") :]
    assert [name for name in tail if name not in ("Reshape", "Transpose")] == [
        *("FusedMatMul", "Tanh", "Mul", "Softmax", "MatMul"),
    ]


def test_scores_that_are_read_before_they_are_scaled_stay() -> None:
    """The scale is a node of its own then."""
    model = graph(outputs="float[B, 4, S, 2] y, float[B, 4, S, L] s")
    assert_same_numbers(repeated_heads, model, FEEDS)
    assert count(model, "Div") == 1


def test_heads_in_another_order_are_left_alone() -> None:
    """Neighbours share a head, the first two of four the first; here it is the first and the third."""
    across = "ku = Unsqueeze(keys, one) ke = Expand(ku, across) k4 = Reshape(ke, repeated)"
    body = f"{across} k = Transpose <perm=[0, 1, 3, 2]> (k4) y = MatMul(q, k)"
    assert_left_alone(repeated_heads, graph(body, outputs="float[B, 4, S, L] y"))


def test_an_expanded_batch_is_left_alone() -> None:
    """No head is repeated."""
    body = "ke = Expand(keys, rows) k = Transpose <perm=[0, 1, 3, 2]> (ke) y = MatMul(q, k)"
    inputs = "float[3, 4, S, 2] q, float[1, 4, L, 2] keys"
    assert_left_alone(repeated_heads, graph(body, inputs, "float[3, 4, S, L] y"))


ROW = Row(repeated_heads, {"cached": graph}, feeds=FEEDS)
