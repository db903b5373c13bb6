"""Rotated queries and keys."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.passes.attention import attention
from onnxtool.optimize.passes.rotary_embedding import rotary_embedding
from onnxtool.runtime.quiet import quiet
from tests.optimize.passes.builders import (
    Row,
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    count,
    normal,
    operators,
)
from tests.optimize.passes.exports import ARCHITECTURES, ask, ask_torch
from tests.optimize.passes.test_attention_of_exports import distance, settled
from tests.workshop import Workshop

# Three heads of eight numbers each. The angles are those of a position times four frequencies, twice.
CONSTANTS = (
    "<int64[4] split = {0, 0, 3, 8}, int64[1] zero = {0}, int64[1] half = {4}, int64[1] end = {9223372036854775807}, "
    "int64[1] last = {-1}, int64[1] one = {1}, int64[1] two = {2}, "
    "float[4] frequencies = {1.0, 0.3, 0.1, 0.03}>"
)
HEADS = "r = Reshape(q, split) x = Transpose <perm=[0, 2, 1, 3]> (r)"
ANGLES = (
    "p = Unsqueeze(positions, two) c = Cast <to=1> (p) f = Mul(c, frequencies) e = Concat <axis=-1> (f, f) "
    "cs = Cos(e) sn = Sin(e) cosine = Unsqueeze(cs, one) sine = Unsqueeze(sn, one)"
)
HALVES = "a = Slice(x, zero, half, last) b = Slice(x, half, end, last)"
ROTATE = f"{HALVES} n = Neg(b) t = Concat <axis=-1> (n, a) u = Mul(x, cosine) v = Mul(t, sine) y = Add(u, v)"
# The same of other heads, every sum and product the other way round.
ROTATE_KEYS = (
    "c0 = Slice(k, zero, half, last) c1 = Slice(k, half, end, last) c2 = Neg(c1) c3 = Concat <axis=-1> (c2, c0) "
    "c4 = Mul(cosine, k) c5 = Mul(sine, c3) keys = Add(c5, c4)"
)
FEEDS = {"q": normal(2, 5, 24), "positions": np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])}


def rotation(body: str = f"{HEADS} {ANGLES} {ROTATE}", batch: int | str = "B") -> ir.Model:
    """Return a model that rotates queries [B, S, 24] by positions [B, S] or, for all texts alike, [1, S]."""
    inputs = f"float[B, S, 24] q, int64[{batch}, S] positions"
    return build(f"g ({inputs}) => (float[B, 3, S, 8] y) {CONSTANTS} {{ {body} }}")


def test_a_rotation_by_positions_of_each_text_is_one_operator() -> None:
    """The table of angles has a part for each text, and what it reads is the flat queries."""
    model = rotation()
    assert_same_numbers(rotary_embedding, model, FEEDS)
    fused = next(node for node in model.graph if node.op_type == "RotaryEmbedding")
    assert fused.inputs[0] is model.graph.inputs[0]
    assert count(model, "Neg") == count(model, "Concat") - 1 == 0  # that of the frequencies stays


def test_a_rotation_by_positions_that_all_texts_share_needs_the_first_place_alone() -> None:
    """It is a constant."""
    model = rotation(batch=1)
    assert_same_numbers(rotary_embedding, model, {**FEEDS, "positions": FEEDS["positions"][:1]})
    assert count(model, "Range") == 0


def test_queries_and_keys_share_the_table() -> None:
    """It is made once for all layers."""
    queries = ROTATE.replace("y =", "queries =")
    body = f"{HEADS} {ANGLES} {queries} k = Neg(x) {ROTATE_KEYS} y = Sub(queries, keys)"
    model = rotation(body)
    assert_same_numbers(rotary_embedding, model, FEEDS)
    assert count(model, "RotaryEmbedding", "com.microsoft") == 2
    assert count(model, "Range") == 1


def test_a_split_into_halves_counts() -> None:
    """Some exporters write it so."""
    body = f"{HEADS} {ANGLES} {ROTATE}".replace(HALVES, "a, b = Split <axis=-1> (x)")
    assert_same_numbers(rotary_embedding, rotation(body), FEEDS)


def test_heads_that_were_normalized_one_by_one_are_laid_flat() -> None:
    """As Qwen 3's."""
    body = f"r0 = Reshape(q, split) r = Tanh(r0) x = Transpose <perm=[0, 2, 1, 3]> (r) {ANGLES} {ROTATE}"
    model = rotation(body)
    assert_same_numbers(rotary_embedding, model, FEEDS)
    assert "RotaryEmbedding" in operators(model)


def test_heads_that_are_no_view_stay_where_they_are() -> None:
    """The operator takes [B, H, S, D] as well."""
    body = f"r = Reshape(q, split) x0 = Transpose <perm=[0, 2, 1, 3]> (r) x = Tanh(x0) {ANGLES} {ROTATE}"
    model = rotation(body)
    assert_same_numbers(rotary_embedding, model, FEEDS)
    assert count(model, "Transpose") == 1


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("t = Concat <axis=-1> (n, a)", "t = Concat <axis=-1> (a, n)", ""),
        ("n = Neg(b)", "n = Neg(a)", ""),
        ("n = Neg(b)", "n = Abs(b)", ""),
        ("y = Add(u, v)", "y = Sub(u, v)", ""),
        ("e = Concat <axis=-1> (f, f)", "f2 = Neg(f) e = Concat <axis=-1> (f, f2)", "two equal halves"),
        ("sn = Sin(e)", "sn0 = Sin(e) sn = CumSum(sn0, two)", "two equal halves"),
        ("x = Transpose <perm=[0, 2, 1, 3]> (r)", "x = Expand(r, sizes)", "[B, 1, S, D]"),
    ],
    ids=["order", "one half", "no sign", "difference", "other angles", "other sines", "heads inside"],
)
def test_what_is_no_rotation_is_left_alone(old: str, new: str, note: str) -> None:
    """It would turn by other angles, or not at all."""
    body = f"sizes = Constant <value_ints=[1, 1, 1, 1]> () {HEADS} {ANGLES} {ROTATE}".replace(old, new)
    assert_left_alone(rotary_embedding, rotation(body), note)


def test_numbers_that_are_looked_up_one_by_one_have_no_equal_halves() -> None:
    """The table has, and what is taken from it goes by the indices."""
    table = "float[8] table = {0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4}>"
    angles = "cosine = Gather(table, places) sine = Gather(table, places)"
    constants = CONSTANTS.replace(">", ", " + table)
    graph = f"g (float[B, S, 24] q, int64[1, 1, S, 8] places) => (float[B, 3, S, 8] y) {constants}"
    assert_left_alone(rotary_embedding, build(f"{graph} {{ {HEADS} {angles} {ROTATE} }}"), "two equal halves")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "modernbert"])
def test_queries_and_keys_of_every_layer_are_rotated_so(workshop: Workshop, name: str) -> None:
    """And what comes out is what PyTorch computes, on padding on either side."""
    architecture = ARCHITECTURES[name]
    model = settled(workshop, name, "eager")
    assert apply(rotary_embedding, model).num_changes == 2 * architecture.num_layers
    assert apply(attention, model).num_changes == architecture.num_layers
    fused = [node for node in model.graph if node.op_type in ("Attention", "MultiHeadAttention")]
    assert all(node.op_type == "MultiHeadAttention" for node in fused)
    feeds = architecture.feeds()
    with quiet():
        expected = ask_torch(architecture, "eager", feeds)
    assert distance(ask(model, feeds), expected, feeds["attention_mask"].astype(bool)) < 1e-4


ROW = Row(rotary_embedding, {"positions of each text": rotation}, feeds=FEEDS)
