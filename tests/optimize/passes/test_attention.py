"""Attentions that are written as one operator, and those that are left alone.

Letters of shapes: B batch, S sequence, H = 2 heads, D = 4 the size of a head.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.attention.masks import NO_MASK
from onnxtool.optimize.passes import attention as module
from onnxtool.optimize.passes.attention import attention
from onnxtool.optimize.pipeline import Context
from tests.optimize.attention.graphs import (
    CONSTANTS,
    MASKINGS,
    PADDING,
    PLACES,
    RESULT,
    SCORES,
    WEIGHTING,
    attention_graph,
    ragged_feeds,
)
from tests.optimize.passes.builders import (
    Arrays,
    Graph,
    Row,
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    count,
    normal,
    of_text,
    operators,
    run,
)

MASK_INPUT, BIAS_INPUT = 3, 5  # of com.microsoft::Attention
# What each masking becomes: whether there is a mask, a bias, and an attribute for causal.
WRITTEN = {
    "nothing": (False, False, False),
    "padding": (True, False, False),
    "padding, added": (True, False, False),
    "causal": (False, False, True),
    "both": (True, False, True),
    "both, one by one": (True, False, True),
    "both, multiplied": (True, False, True),
    "window": (False, True, False),
    "slopes": (False, True, False),
    "padding, inverted": (False, True, False),
}
HEADS = "float[B, 2, S, 4] q, float[B, 2, S, 4] k, float[B, 2, S, 4] v"


def fused_node(model: ir.Model) -> ir.Node:
    """Return the one fused attention."""
    (node,) = [node for node in model.graph if node.domain == "com.microsoft" and "Attention" in node.op_type]
    return node


def has_input(node: ir.Node, index: int) -> bool:
    return len(node.inputs) > index and node.inputs[index] is not None


SEES_LATER = "both, multiplied"


def assert_same_on_real_tokens(model: ir.Model, feeds: Arrays) -> None:
    """Compare before and after: float32 sums of eight numbers around 1, in another order."""
    real = feeds["attention_mask"].astype(bool)
    (expected,) = run(model, feeds)
    outcome = apply(attention, model)
    assert (outcome.num_changes, outcome.note) == (1, "")
    (found,) = run(model, feeds)
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("masking", [name for name in MASKINGS if name != SEES_LATER])
def test_a_mask_becomes_what_it_means(masking: str) -> None:
    """An input for padding, an attribute for causal, and a bias for all else; the numbers stay on ragged rows."""
    model = attention_graph(MASKINGS[masking])
    assert_same_on_real_tokens(model, ragged_feeds())
    node = fused_node(model)
    assert node.op_type == "Attention"
    found = (has_input(node, MASK_INPUT), has_input(node, BIAS_INPUT), "unidirectional" in node.attributes)
    assert found == WRITTEN[masking]
    assert node.attributes["num_heads"].as_int() == 2
    assert "Softmax" not in operators(model)


# What a row of padding alone gets, and padding before a text.
FILLS = {
    **MASKINGS,
    "padding, infinite": f"{PADDING} masked = Where(allowed, scaled, infinity)",
    "both, infinite": f"{MASKINGS['both'].removesuffix('lowest)')} infinity)",
    "padding, added, of thousands": MASKINGS["padding, added"].replace("lowest", "minus"),
    "padding, of thousands": MASKINGS["padding"].replace("lowest", "minus"),
    "window, added": (
        f"{PLACES} apart = Sub(row, column) far = Abs(apart) near = LessOrEqual(far, window) f = Cast <to=1> (near) "
        "g = Sub(one, f) h = Mul(g, lowest) i = Add(scaled, h) m = Cast <to=1> (attention_mask) "
        "n = Unsqueeze(m, outer) o = Sub(one, n) a = Mul(o, lowest) masked = Add(i, a)"
    ),
}
# It adds -1e4 for later keys and the lowest number for padding, so that padding sees the text behind it.
FILLS.pop("both, multiplied")


@pytest.mark.parametrize("masking", FILLS)
def test_a_query_that_may_attend_to_nothing_keeps_its_numbers(masking: str) -> None:
    """The mean of all values behind the lowest number, NaN behind infinities, its own weights behind thousands."""
    model = attention_graph(FILLS[masking], constants={"infinity": np.array(-np.inf, np.float32)})
    feeds = ragged_feeds()
    feeds["attention_mask"][2] = 0
    (expected,) = run(model, feeds)
    assert apply(attention, model).num_changes == 1
    # float32 sums of eight numbers around 1, in another order
    np.testing.assert_allclose(run(model, feeds)[0], expected, atol=1e-5, rtol=0, equal_nan=True)
    assert np.isnan(expected).any() == ("infinite" in masking)


def test_a_mask_that_is_lost_is_seen_by_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted error in the kind of a mask the numbers differ."""
    monkeypatch.setattr(module, "find_mask_kind", lambda *_: NO_MASK)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_on_real_tokens(attention_graph(MASKINGS["padding"]), ragged_feeds())


WINDOW = MASKINGS["window"].removesuffix("masked = Where(both, scaled, lowest)")
# How a model gives rows of zeros to queries that may attend to nothing: the masking, then what follows the Softmax.
ZEROED_ROWS = {
    "behind it": (
        "f = Cast <to=1> (both) o = Sub(one, f) a = Mul(o, lowest) masked = Add(scaled, a)",
        "c0 = MatMul(p0, v) n = ReduceSum (f, minus_one) none = Less(n, one) c = Where(none, zero, c0)",
    ),
    "where it is not a number": (
        "masked = Where(both, scaled, infinity)",
        "nan = IsNaN(p0) p = Where(nan, zero, p0) c = MatMul(p, v)",
    ),
    "where the scores are masked": (
        "masked = Where(both, scaled, lowest)",
        "p = Where(both, p0, zero) c = MatMul(p, v)",
    ),
    "where the scores are masked, inverted": (
        "other = Not(both) masked = Where(other, lowest, scaled)",
        "p = Where(other, zero, p0) c = MatMul(p, v)",
    ),
}


@pytest.mark.parametrize("form", ZEROED_ROWS)
def test_a_query_that_may_attend_to_nothing_keeps_its_row_of_zeros(form: str) -> None:
    """A head may read such a row: that of a decoder's classifier looks for the last token by its id."""
    model = zeroed_graph(form, WINDOW)
    mask = np.ones((3, 9), np.int64)
    mask[0, 3:] = mask[1, :5] = 0  # more padding than the window of three tokens is wide
    feeds: dict[str, Any] = {"x": normal(3, 9, 8, seed=9), "attention_mask": mask}
    (expected,) = run(model, feeds)
    assert (expected[0, -1] == 0.0).all()
    assert_same_numbers(attention, model, feeds)


@pytest.mark.parametrize("masking", ["padding", "both"])
@pytest.mark.parametrize("form", ZEROED_ROWS)
def test_rows_of_zeros_are_kept_behind_a_mask_of_a_known_kind(form: str, masking: str) -> None:
    """They are told from the padding then, and the mask need not be computed."""
    below = PLACES + " before = LessOrEqual(column, row) both = And(allowed, before)"
    made = {"padding": f"{PADDING} both = Identity(allowed)", "both": f"{PADDING} {below}"}[masking]
    model = zeroed_graph(form, made)
    feeds = ragged_feeds()
    feeds["attention_mask"][2] = 0
    (expected,) = run(model, feeds)
    assert (expected[2] == 0.0).all()
    assert_same_numbers(attention, model, feeds)
    assert not has_input(fused_node(model), BIAS_INPUT)


def test_rows_of_zeros_that_another_mask_tells_are_computed_from_it() -> None:
    """Here a row gets zeros where the first token is padding, whatever it may attend to."""
    masking, weighting = ZEROED_ROWS["behind it"]
    first = "f0 = Cast <to=1> (both) f1 = Gather <axis=3> (f0, zero_index) f = Unsqueeze(f1, three)"
    masking = masking.replace("f = Cast <to=1> (both)", first).replace("Sub(one, f)", "Sub(one, f0)")
    model = zeroed_graph("behind it", f"{PADDING} both = Identity(allowed)", masking, weighting)
    assert_same_numbers(attention, model, ragged_feeds())
    assert has_input(fused_node(model), BIAS_INPUT)


def zeroed_graph(form: str, made: str, masking: str = "", weighting: str = "") -> ir.Model:
    """Return a model whose queries that may attend to nothing get rows of zeros; `made` computes the mask `both`."""
    numbers = {"zero": 0.0, "infinity": -np.inf}
    constants: dict[str, Any] = {name: np.array(number, np.float32) for name, number in numbers.items()}
    return attention_graph(
        f"{made} {masking or ZEROED_ROWS[form][0]}",
        weighting=f"p0 = Softmax <axis=-1> (masked) {weighting or ZEROED_ROWS[form][1]}",
        constants={**constants, "minus_one": np.array([-1]), "three": np.array([3])},
    )


def test_the_kind_of_a_mask_is_that_of_all_queries() -> None:
    """Queries that are padding attend to nothing here, which a mask of keys does not say; a head may read them."""
    masking = f"{PADDING} columns = Transpose <perm=[0, 1, 3, 2]> (allowed) both = And(allowed, columns)"
    model = attention_graph(f"{masking} masked = Where(both, scaled, lowest)")
    assert_same_numbers(attention, model, ragged_feeds())
    assert has_input(fused_node(model), BIAS_INPUT)


def test_layers_share_the_mask_that_they_read() -> None:
    """It is cast once for all of them."""
    again = SCORES.replace("scores", "scores2").replace("scaled", "scaled2")
    masked = "masked2 = Where(allowed, scaled2, lowest) p2 = Softmax <axis=-1> (masked2) c2 = MatMul(p2, v)"
    result = "t2 = Transpose <perm=[0, 2, 1, 3]> (c2) z = Reshape(t2, joined)"
    model = attention_graph(
        f"{MASKINGS['padding']} {again} {masked} {result}", outputs="float[B, S, 8] y, float[B, S, 8] z"
    )
    assert apply(attention, model).num_changes == 2
    assert (count(model, "Cast"), count(model, "MultiHeadAttention", "com.microsoft")) == (1, 2)


def test_layers_that_a_position_bias_reads_are_not_computed_twice() -> None:
    """As in DeBERTa, whose scores have terms of queries and positions: `Attention` would run these layers again."""
    masking = "term = ReduceSum <keepdims=1> (q, minus_one) masked = Add(scaled, term)"
    model = attention_graph(masking, constants={"minus_one": np.array([-1])})
    num_layers = count(model, "MatMul") - 2  # besides the products of the attention
    assert_same_numbers(attention, model, ragged_feeds())
    assert (count(model, "MatMul"), count(model, "MultiHeadAttention", "com.microsoft")) == (num_layers, 1)


@pytest.mark.parametrize(
    ("scores", "scale"),
    [
        ("scaled = MatMul(q, k)", 1.0),
        ("scores = MatMul(q, k) scaled = Div(scores, two)", 0.5),
        ("q5 = Mul(q, third) k5 = Mul(third, k) scaled = MatMul(q5, k5)", 1 / 9),
        ("q5 = Div(q, two) scores = MatMul(q5, k) scaled = Mul(third, scores)", 1 / 6),
    ],
    ids=["none", "of the scores", "of both sides", "in three places"],
)
def test_a_scale_is_found_wherever_it_stands(scores: str, scale: float) -> None:
    """That of the size of a head is the operator's own."""
    constants = {"two": np.array(2.0, np.float32), "third": np.array(1 / 3, np.float32)}
    model = attention_graph(MASKINGS["padding"], scores=scores, constants=constants)
    assert_same_on_real_tokens(model, ragged_feeds())
    node = fused_node(model)
    written = node.attributes["scale"].as_float() if "scale" in node.attributes else 4**-0.5
    assert written == pytest.approx(scale, rel=1e-6)


def test_a_scale_after_a_bias_scales_the_bias() -> None:
    """As DeBERTa's first version has it."""
    added = "a = Add(scores, slopes) masked = Mul(a, half)"
    model = attention_graph(added, scores="scores = MatMul(q, k)")
    assert_same_on_real_tokens(model, ragged_feeds())
    assert has_input(fused_node(model), BIAS_INPUT)


MASKED_TIME_FIRST = [
    f"{PADDING} masked = Where(allowed, scaled, lowest)",
    f"{PADDING} early = Where(allowed, scaled, lowest) masked = Add(early, slopes)",
]


def test_heads_that_are_merged_with_the_batch_are_found() -> None:
    """[B * H, S, D], as models wrote it that came from fairseq."""
    text = """g (float[B, S, 8] x) => (float[B, S, 8] y) {
        q0 = MatMul(x, wq) q1 = Reshape(q0, heads) q2 = Transpose <perm=[0, 2, 1, 3]> (q1)
        k0 = MatMul(x, wk) k1 = Reshape(k0, heads) k2 = Transpose <perm=[0, 2, 1, 3]> (k1)
        v0 = MatMul(x, wv) v1 = Reshape(v0, heads) v2 = Transpose <perm=[0, 2, 1, 3]> (v1)
        shape = Shape <start=0, end=2> (x) b = Gather(shape, zero) s = Gather(shape, one)
        bh = Mul(b, two) merged = Concat <axis=0> (bh, s, four) split = Concat <axis=0> (b, two, s, four)
        q = Reshape(q2, merged) k3 = Reshape(k2, merged) v = Reshape(v2, merged)
        k = Transpose <perm=[0, 2, 1]> (k3)
        scores = MatMul(q, k) whole = Concat <axis=0> (b, two, s, s) flat = Concat <axis=0> (bh, s, s)
        four_axes = Reshape(scores, whole) masked = Add(four_axes, slopes) three_axes = Reshape(masked, flat)
        p = Softmax <axis=-1> (three_axes) c = MatMul(p, v)
        c4 = Reshape(c, split) t = Transpose <perm=[0, 2, 1, 3]> (c4) y = Reshape(t, joined)
    }"""
    weights = {
        **{f"w{name}": normal(8, 8, seed=number) for number, name in enumerate("qkv")},
        "heads": np.array([0, 0, 2, 4]),
        "joined": np.array([0, 0, 8]),
        **{name: np.array([number]) for number, name in enumerate(("zero", "one", "two"))},
        "four": np.array([4]),
        "slopes": normal(1, 2, 1, 1),
    }
    model = build(text, weights)
    assert_same_numbers(attention, model, {"x": normal(3, 7, 8)})
    assert fused_node(model).op_type == "Attention"


@pytest.mark.parametrize("masked", MASKED_TIME_FIRST)
def test_sequences_that_stand_before_the_batch_are_found(masked: str) -> None:
    """[S, B, H * D] before the attention and behind it, as fairseq's translators have it; padded on either side."""
    text = f"""g (float[B, S, 8] x, int64[B, S] attention_mask) => (float[S, B, 8] y) {{
        turned = Transpose <perm=[1, 0, 2]> (x)
        q0 = MatMul(turned, wq) q1 = Add(q0, bq) q2 = Mul(q1, half) q3 = Reshape(q2, merged)
        q = Transpose <perm=[1, 0, 2]> (q3)
        k0 = MatMul(turned, wk) k1 = Add(k0, bk) k2 = Reshape(k1, heads) k3 = Transpose <perm=[1, 2, 0, 3]> (k2)
        v0 = MatMul(turned, wv) v1 = Add(v0, bv) v2 = Reshape(v1, heads) v3 = Transpose <perm=[1, 2, 0, 3]> (v2)
        l = Shape <start=1, end=2> (x) to_merged = Concat <axis=0> (minus_one, l, four)
        k4 = Reshape(k3, to_merged) v = Reshape(v3, to_merged) k = Transpose <perm=[0, 2, 1]> (k4)
        by_heads = Concat <axis=0> (minus_one, two, l, l) squares = Concat <axis=0> (minus_one, l, l)
        scores = MatMul(q, k) scaled = Reshape(scores, by_heads) {masked} rows = Reshape(masked, squares)
        p = Softmax <axis=-1> (rows) c = MatMul(p, v)
        b = Shape <start=0, end=1> (x) joined = Concat <axis=0> (l, b, eight)
        t = Transpose <perm=[1, 0, 2]> (c) y = Reshape(t, joined)
    }}"""
    weights = {
        **{name: array for name, array in CONSTANTS.items() if re.search(rf"\b{name}\b", text)},
        "merged": np.array([0, -1, 4]),
        **{name: np.array([size]) for name, size in (("minus_one", -1), ("two", 2), ("four", 4), ("eight", 8))},
    }
    del weights["joined"]
    model = build(text, weights)
    feeds = ragged_feeds()
    (expected,) = run(model, feeds)
    assert apply(attention, model).num_changes == 1
    (found,) = run(model, feeds)
    real = feeds["attention_mask"].astype(bool).T
    np.testing.assert_allclose(found[real], expected[real], atol=1e-5, rtol=0)
    assert has_input(fused_node(model), 5) == ("slopes" in masked)


def test_values_of_another_size_than_keys_are_joined() -> None:
    """The operator reads heads that stand outside only where keys and values have one shape."""
    text = """g (float[B, 2, S, 4] q, float[B, 2, S, 4] k, float[B, 2, S, 6] v) => (float[B, S, 12] y) {
        t = Transpose <perm=[0, 1, 3, 2]> (k) scores = MatMul(q, t) p = Softmax <axis=-1> (scores) c = MatMul(p, v)
        outside = Transpose <perm=[0, 2, 1, 3]> (c) y = Reshape(outside, joined)
    }"""
    model = build(text, {"joined": np.array([0, 0, 12])})
    feeds = {name: normal(3, 2, 5, size, seed=size) for name, size in (("q", 4), ("v", 6))}
    assert_same_numbers(attention, model, {**feeds, "k": normal(3, 2, 5, 4, seed=9)})
    assert fused_node(model).op_type == "MultiHeadAttention"


@pytest.mark.parametrize("size", [4, 5], ids=["as many keys as numbers in a head", "others"])
def test_keys_that_a_convolution_gives_are_turned(size: int) -> None:
    """[B, H, D, L], with which the queries are multiplied as they are."""
    text = """g (float[B, 2, S, 4] q, float[B, 8, L] k, float[B, 2, L, 4] v) => (float[B, S, 8] y) {
        columns = Reshape(k, split) scores = MatMul(q, columns) p = Softmax <axis=-1> (scores) c = MatMul(p, v)
        outside = Transpose <perm=[0, 2, 1, 3]> (c) y = Reshape(outside, joined)
    }"""
    model = build(text, {"split": np.array([0, 2, 4, -1]), "joined": np.array([0, 0, 8])})
    feeds = {"q": normal(3, 2, 6, 4, seed=1), "k": normal(3, 8, size, seed=2), "v": normal(3, 2, size, 4, seed=3)}
    assert_same_numbers(attention, model, feeds)
    assert fused_node(model).op_type == "MultiHeadAttention"


# Four heads of queries, of which two share a head of the keys and values, by the layout of the queries.
QUERIES_OF_FOUR = {
    "flat": "q0 = MatMul(x, wq) q2 = Reshape(q0, fours) q = Transpose <perm=[0, 2, 1, 3]> (q2)",
    "heads outside": "q0 = MatMul(x, wq) q2 = Reshape(q0, fours) q3 = Transpose <perm=[0, 2, 1, 3]> (q2) q = Neg(q3)",
}
REPEATED = """
    ku = Unsqueeze(keys, inner) ke = Expand(ku, twice) k4 = Reshape(ke, repeated)
    k = Transpose <perm=[0, 1, 3, 2]> (k4) scores = MatMul(q, k) scaled = Mul(scores, half)
    vu = Unsqueeze(values, inner) ve = Expand(vu, twice) v = Reshape(ve, repeated)
"""
CAUSAL = f"{PLACES} before = LessOrEqual(column, row) masked = Where(before, scaled, lowest)"
CACHE = "float[B, 2, L, 8] keys, float[B, 2, L, 8] values"
MASKS_OF_FOUR = {
    "nothing": ("", "masked = Identity(scaled)"),
    "padding": ("int64[B, L] attention_mask", f"{PADDING} masked = Where(allowed, scaled, lowest)"),
    "a bias": ("float[B, 1, S, L] bias", "masked = Add(scaled, bias)"),
    "a bias of each head": ("float[B, 4, S, L] bias", "masked = Add(scaled, bias)"),
    "a bias of heads alone": ("", "masked = Add(scaled, slopes)"),
    "a bias of batch and heads in one axis": (
        "float[M, S, L] bias",
        "m = Reshape(scaled, merged) n = Add(m, bias) masked = Reshape(n, unmerged)",
    ),
}


SIZES = {"B": 3, "S": 5, "L": 7, "M": 12}


def grouped_graph(
    queries: str,
    masking: str,
    inputs: str = "",
    cache: str = CACHE,
    weighting: str = "p = Softmax <axis=-1> (masked) c = MatMul(p, v)",
) -> ir.Model:
    """Return a model of one attention of four heads of queries, and two of keys and values that are handed to it."""
    numbers = {
        **CONSTANTS,
        "inner": np.array([2]),
        "twice": np.array([1, 1, 2, 1, 1]),
        "repeated": np.array([0, 4, -1, 8]),
        "fours": np.array([0, 0, 4, 8]),
        "wq": normal(8, 32),
        "joined": np.array([0, 0, 32]),
        "slopes": normal(1, 4, 1, 1),
        "sinks": normal(1, 4, 1, 1, seed=4),
        "minus_one": np.array([-1]),
        "three": np.array([3]),
        "four": np.array([4]),
        "merged": np.array([12, 5, 7]),
        "unmerged": np.array([3, 4, 5, 7]),
    }
    body = f"{queries} {REPEATED} {masking} {weighting} {RESULT}"
    given = ", ".join(part for part in ("float[B, S, 8] x", cache, inputs) if part)
    if "M" in inputs:  # no axis is B * H for all sizes
        given = re.sub("[BSLM](?=[],])", lambda letter: str(SIZES[letter[0]]), given)
    used = {name: array for name, array in numbers.items() if re.search(rf"\b{name}\b", body)}
    return build(f"g ({given}) => (float[B, S, 32] y) {{ {body} }}", used)


def grouped_feeds(inputs: str = "", length: int = SIZES["L"]) -> dict[str, Any]:
    """Return five queries for `length` keys in three rows."""
    cache = {name: normal(3, 2, length, 8, seed=seed) for seed, name in enumerate(("keys", "values"), 1)}
    feeds: dict[str, Any] = {"x": normal(3, 5, 8), **cache}
    if "attention_mask" in inputs:
        feeds["attention_mask"] = (np.arange(length) % 3 != np.arange(3)[:, None]).astype(np.int64)
    elif inputs:
        axes = inputs[inputs.find("[") + 1 : inputs.find("]")].split(", ")
        feeds["bias"] = normal(*(SIZES.get(axis) or int(axis) for axis in axes), seed=3)
    return feeds


@pytest.mark.parametrize("masking", MASKS_OF_FOUR)
@pytest.mark.parametrize("layout", QUERIES_OF_FOUR)
def test_keys_that_heads_share_are_not_repeated(layout: str, masking: str) -> None:
    """The heads that share one are sequences of one head: keys and values are read as they are cached."""
    inputs, masked = MASKS_OF_FOUR[masking]
    model = grouped_graph(QUERIES_OF_FOUR[layout], masked, inputs)
    assert_same_numbers(attention, model, grouped_feeds(inputs))
    node = fused_node(model)
    assert node.attributes["num_heads"].as_int() == 2
    assert [value and value.name for value in node.inputs[1:3]] == ["keys", "values"]


@pytest.mark.parametrize("is_causal", [False, True], ids=["a bias", "causal"])
def test_a_head_of_keys_that_the_product_broadcasts_is_shared_by_all(is_causal: bool) -> None:
    """As Falcon has it: one head, which nothing repeats; the operator counts no places of queries then."""
    masking, length = ("masked = Add(scaled, bias)", "L") if not is_causal else (CAUSAL, "S")
    cache = ", ".join(f"float[B, 1, {length}, 8] {name}" for name in ("keys", "values"))
    body = f"k = Transpose <perm=[0, 1, 3, 2]> (keys) scaled = MatMul(q, k) {masking}"
    model = build(
        f"g (float[B, 4, S, 8] q, float[B, S, 8] x, float[B, 1, S, L] bias, {cache}) => (float[B, 4, S, 8] y) "
        f"{{ {body} p = Softmax <axis=-1> (masked) y = MatMul(p, values) }}",
        {name: array for name, array in CONSTANTS.items() if re.search(rf"\b{name}\b", body)},
    )
    feeds = {"q": normal(3, 4, 5, 8), "bias": normal(3, 1, 5, 7, seed=3), "x": normal(3, 5, 8, seed=4)}
    keys = {name: normal(3, 1, 5 if is_causal else 7, 8, seed=seed) for seed, name in enumerate(("keys", "values"), 1)}
    assert_same_numbers(attention, model, {**feeds, **keys})
    assert fused_node(model).attributes["num_heads"].as_int() == 1


def test_keys_that_heads_share_are_repeated_where_the_operator_masks_what_is_later() -> None:
    """It counts the places of the queries, which have to be one sequence then."""
    model = grouped_graph(QUERIES_OF_FOUR["flat"], CAUSAL, cache=CACHE.replace("L", "S"))
    assert_same_numbers(attention, model, grouped_feeds(length=SIZES["S"]))
    node = fused_node(model)
    assert (node.attributes["num_heads"].as_int(), "unidirectional" in node.attributes) == (4, True)


SINKS = (
    "b = Shape <start=0, end=1> (x) l = Shape <start=1, end=2> (x) rows = Concat <axis=0> (b, four, l, last) "
    "sink = Expand(sinks, rows) beside = Concat <axis=-1> (masked, sink) p0 = Softmax <axis=-1> (beside) "
    "p = Slice(p0, first, minus_one, three)"
)
OF_FOUR = "int64[B, S] attention_mask"
SEEN = f"seen = And(before, near) {PADDING} both = And(allowed, seen) masked = Where(both, scaled, lowest)"
WITH_SINKS = {
    "causal": (CAUSAL, ""),
    "both": (MASKINGS["both"], OF_FOUR),
    "a window": (
        f"{PLACES} apart = Sub(row, column) near = Less(apart, window) before = LessOrEqual(column, row) {SEEN}",
        OF_FOUR,
    ),
}


def sinks_graph(masking: str, inputs: str = "", cache: str = CACHE.replace("L", "S")) -> ir.Model:
    """Return a model of an attention of grouped heads with a sink for each, as gpt-oss has it."""
    return grouped_graph(QUERIES_OF_FOUR["heads outside"], masking, inputs, cache, f"{SINKS} c = MatMul(p, v)")


@pytest.mark.parametrize("masking", WITH_SINKS)
def test_sinks_are_an_input_of_the_operator(masking: str) -> None:
    """On rows that are padded on either side, where padding may attend to nothing but the sink."""
    masked, inputs = WITH_SINKS[masking]
    model = sinks_graph(masked, inputs)
    feeds = grouped_feeds(length=SIZES["S"])
    if inputs:
        feeds["attention_mask"] = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert_same_numbers(attention, model, feeds)
    node = fused_node(model)
    assert node.op_type == "GroupQueryAttention"
    assert [node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads")] == [4, 2]
    assert has_input(node, 10) == bool(inputs)


@pytest.mark.parametrize(
    ("masking", "inputs", "cache", "provider", "note"),
    [
        (CAUSAL, "", CACHE.replace("L", "S"), "cuda", "for float32 on the CPU alone"),
        ("masked = Add(scaled, bias)", "float[B, 1, S, L] bias", CACHE, "cpu", "and a cache"),
        ("masked = Identity(scaled)", "", CACHE.replace("L", "S"), "cpu", "that see later keys"),
        ("masked = Add(scaled, slopes)", "", CACHE.replace("L", "S"), "cpu", "that see later keys"),
    ],
    ids=["CUDA", "with a cache", "not causal", "each head otherwise"],
)
def test_sinks_that_the_operator_has_no_way_for_are_left_alone(
    masking: str, inputs: str, cache: str, provider: str, note: str
) -> None:
    """With the reason."""
    model = sinks_graph(masking, inputs, cache)
    outcome = attention.apply(model, Context(provider=provider))
    assert (outcome.num_changes, count(model, "Softmax")) == (0, 1)
    assert note in outcome.note


def test_sinks_with_heads_of_a_size_that_the_operator_refuses_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes multiples of 8; here 16 stands for it, and the heads have 8."""
    monkeypatch.setattr(module, "_BLOCK", 16)
    assert_left_alone(attention, sinks_graph(CAUSAL), "heads of 8 and 8: the operator takes a multiple of 16 for both")


def of_operator(attributes: str = "", mask: str = "", inputs: str = HEADS) -> ir.Model:
    """Return a model of one `Attention` of ai.onnx, opset 23, of heads that are graph inputs."""
    body = f"y = Attention {attributes} (q, k, v{', mask' if mask else ''})"
    return build(f"g ({inputs}{', ' + mask if mask else ''}) => (float[B, 2, S, 4] y) {{ {body} }}", opset=23)


@pytest.mark.parametrize(
    ("attributes", "mask"),
    [
        ("", ""),
        ("<scale=0.25>", ""),
        ("<is_causal=1>", ""),
        ("", "bool[B, 1, S, S] mask"),
        ("", "bool[S, S] mask"),
        ("", "float[B, 2, S, S] mask"),
        ("", "float[S, S] mask"),
        ("<is_causal=1, scale=0.3>", "float[B, 1, S, S] mask"),
    ],
)
def test_an_attention_of_onnx_itself_is_one_of_onnxruntime(attributes: str, mask: str) -> None:
    """Against the graph before, in onnxruntime, which has kernels for both."""
    model = of_operator(attributes, mask)
    shape = [{"B": 2, "S": 5}.get(part, part) for part in mask[mask.find("[") + 1 : mask.find("]")].split(", ")]
    feeds: dict[str, Any] = {name: normal(2, 2, 5, 4, seed=number) for number, name in enumerate("qkv")}
    if mask:
        numbers = normal(*(int(size) for size in shape), seed=5)
        # A query that may attend to nothing is another matter: each may attend to itself.
        feeds["mask"] = (numbers > 0) | np.eye(5, dtype=bool) if mask.startswith("bool") else numbers
    assert_same_numbers(attention, model, feeds)
    node = fused_node(model)
    assert node.op_type == "MultiHeadAttention"
    assert ("unidirectional" in node.attributes) == ("is_causal" in attributes)
    assert ("scale" in node.attributes) == ("scale" in attributes)
    assert has_input(node, 5) == bool(mask)


# Masks that leave some queries nothing, and none of a known kind; with what is causal, also the first ones.
EMPTY = np.ones((2, 1, 5, 5), np.bool_)
EMPTY[0, :, :, :2] = EMPTY[1, :, 3] = False
LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize("attributes", ["", "<is_causal=1>"])
@pytest.mark.parametrize("fill", [None, -np.inf, LOWEST, -1e4], ids=["bool", "infinite", "lowest", "of thousands"])
def test_a_query_that_an_attention_of_onnx_leaves_nothing_gets_zeros(fill: float | None, attributes: str) -> None:
    """Onnxruntime's own operator gives the mean of all values."""
    dtype, mask = ("bool", EMPTY) if fill is None else ("float", np.where(EMPTY, 0.0, fill).astype(np.float32))
    model = of_operator(attributes, f"{dtype}[B, 1, S, S] mask")
    feeds: dict[str, Any] = {name: normal(2, 2, 5, 4, seed=number) for number, name in enumerate("qkv")}
    feeds["mask"] = mask
    (expected,) = run(model, feeds)
    assert (expected[1, :, 3] == 0.0).all() == (fill != -1e4)
    # -1e4 beside a score leaves it three digits.
    assert_same_numbers(attention, model, feeds, atol=5e-3 if fill == -1e4 else 1e-5)


@pytest.mark.parametrize("attributes", ["", ", is_causal=1", ", scale=0.3"])
def test_an_attention_of_onnx_may_have_its_heads_in_one_axis(attributes: str) -> None:
    """[B, S, H * D], of which the attributes tell the number of heads."""
    text = f"y = Attention <q_num_heads=2, kv_num_heads=2{attributes}> (q, k, v)"
    model = build(f"g ({HEADS.replace('2, S, 4', 'S, 8')}) => (float[B, S, 8] y) {{ {text} }}", opset=23)
    assert_same_numbers(attention, model, {name: normal(2, 5, 8, seed=seed) for seed, name in enumerate("qkv")})
    assert operators(model) == ["MultiHeadAttention"]


PAST = "float[2, B, 2, P, 4] past"
STACKED = (
    "k1 = Gather <axis=0> (past, zero_index) v1 = Gather <axis=0> (past, one_index) "
    "keys = Concat <axis=2> (k1, k0) values = Concat <axis=2> (v1, v0)"
)
CACHES = {
    "stacked": (PAST, STACKED, "ku = Unsqueeze(keys, first) vu = Unsqueeze(values, first)"),
    "split": (
        PAST,
        (
            "ks, vs = Split <axis=0, num_outputs=2> (past) k1 = Squeeze(ks, first) v1 = Squeeze(vs, first) "
            "keys = Concat <axis=2> (k1, k0) values = Concat <axis=2> (v1, v0)"
        ),
        "ku = Unsqueeze(keys, first) vu = Unsqueeze(values, first)",
    ),
    "apart": (
        "float[B, 2, P, 4] past_key, float[B, 2, P, 4] past_value",
        "keys = Concat <axis=2> (past_key, k0) values = Concat <axis=2> (past_value, v0)",
        "ku = Unsqueeze(keys, first) vu = Unsqueeze(values, first)",
    ),
}


@pytest.mark.parametrize("masked", [True, False], ids=["padding", "no padding"])
@pytest.mark.parametrize("cache", CACHES)
def test_an_attention_of_gpt2_with_a_cache_is_fused(cache: str, masked: bool) -> None:
    """New keys follow those of the past, and a table hides what comes later; the present is an output."""
    past, joined, present = CACHES[cache]
    added = "m = Cast <to=1> (attention_mask) n = Unsqueeze(m, outer) o = Sub(one, n) a = Mul(o, minus)"
    body = f"""
        x0 = MatMul(x, w) x1 = Add(x0, b) q0, kn, vn = Split <axis=2, num_outputs=3> (x1)
        q1 = Reshape(q0, heads) q = Transpose <perm=[0, 2, 1, 3]> (q1)
        k2 = Reshape(kn, heads) k0 = Transpose <perm=[0, 2, 1, 3]> (k2)
        v2 = Reshape(vn, heads) v0 = Transpose <perm=[0, 2, 1, 3]> (v2)
        {joined} {present} y2 = Concat <axis=0> (ku, vu)
        t = Transpose <perm=[0, 1, 3, 2]> (keys) scores = MatMul(q, t) scaled = Mul(scores, half)
        total = Shape <start=2, end=3> (keys) new = Shape <start=1, end=2> (x) before = Sub(total, new)
        rows = Slice(table, before, total, first) places = Slice(rows, first, total, last)
        kept = Cast <to=9> (places) hidden = Where(kept, scaled, minus)
        {added if masked else ""} biased = {"Add(hidden, a)" if masked else "Identity(hidden)"}
        p = Softmax <axis=-1> (biased) c = MatMul(p, values)
        c2 = Transpose <perm=[0, 2, 1, 3]> (c) y = Reshape(c2, joined)
    """
    weights = {**CONSTANTS, "w": normal(8, 24), "b": normal(24, seed=1)}
    padding = ", int64[B, U] attention_mask" if masked else ""
    model = build(
        f"g (float[B, S, 8] x, {past}{padding}) => (float[B, S, 8] y, y2) {{ {body} }}",
        {name: array for name, array in weights.items() if re.search(rf"\b{name}\b", body)},
        18,
    )
    if masked:
        model.graph.inputs[-1].shape = ir.Shape(["B", "P + S"])  # no name in ONNX's text form
    held = (3, 2, 4, 4)
    feeds: dict[str, Any] = {"x": normal(3, 5, 8, seed=2), "past": normal(2, *held, seed=3)}
    feeds |= {"past_key": normal(*held, seed=4), "past_value": normal(*held, seed=5)}
    feeds["attention_mask"] = (np.arange(9) >= np.arange(3)[:, None]).astype(np.int64)
    names = {value.name for value in model.graph.inputs}
    assert_same_numbers(attention, model, {name: array for name, array in feeds.items() if name in names})
    assert fused_node(model).op_type == "MultiHeadAttention"


TANH = "scores = MatMul(q, k) fifth = Mul(scores, half) bent = Tanh(fifth) scaled = Mul(bent, five)"
REFUSALS = {
    "another axis": ("nothing", SCORES, WEIGHTING.replace("-1", "1"), "a Softmax over another axis than the last"),
    "capped": ("nothing", TANH, WEIGHTING, "scores that are capped by a Tanh"),
    "capped and masked": ("padding, added", TANH, WEIGHTING, "scores that are capped by a Tanh"),
    "capped, then blocked": ("padding", TANH, WEIGHTING, "scores that are capped by a Tanh"),
    "changed": ("nothing", SCORES.replace(" Mul(", " Pow("), WEIGHTING, "scores that are changed by Pow"),
    "with sinks": (
        "nothing",
        SCORES,
        "w = Concat <axis=-1> (masked, sink) p0 = Softmax (w) p = Slice(p0, zeros, ends, three) c = MatMul(p, v)",
        "scores with sinks beside them, which are not one number a head",
    ),
    "dropped": (
        "nothing",
        SCORES,
        "p0 = Softmax <axis=-1> (masked) p = Where(kept, p0, zero) c = MatMul(p, v)",
        "probabilities that are masked otherwise than the scores",
    ),
    "multiplied": (
        "nothing",
        SCORES.replace("scaled", "plain")
        + " product = Mul(plain, near) o = Sub(one, near) low = Mul(o, lowest) scaled = Add(product, low)",
        WEIGHTING,
        "scores that are changed by Mul",
    ),
    "side by side": (
        "nothing",
        f"{SCORES.replace('scaled', 'plain')} scaled = Concat <axis=-1> (plain, scores)",
        "p0 = Softmax <axis=-1> (masked) p = Slice(p0, zeros, fives, three) c = MatMul(p, v)",
        "scores of several products side by side, which are block-sparse",
    ),
    "of rank 5": (
        "nothing",
        "q5 = Unsqueeze(q, zeros) k5 = Unsqueeze(k, zeros) " + SCORES.replace("(q, k)", "(q5, k5)"),
        "p = Softmax <axis=-1> (masked) c5 = MatMul(p, v) c = Squeeze(c5, zeros)",
        "scores of rank 5, for which the nodes take less time",
    ),
    "by an Einsum": (
        "nothing",
        SCORES,
        'p = Softmax <axis=-1> (masked) c0 = Einsum <equation="bhij,bhjd->bhid"> (p, v) c = Neg(c0)',
        "probabilities that are read by an Einsum that is not a product of two matrices",
    ),
    "squared": ("nothing", SCORES, "p0 = Softmax <axis=-1> (masked) p = Mul(p0, p0) c = MatMul(p, v)", ""),
}


def test_scores_that_are_read_elsewhere_stay_beside_the_fused_operator() -> None:
    """Their product is computed twice then, and the numbers are the same."""
    model = attention_graph(outputs="float[B, S, 8] y, float[B, 2, S, S] scaled")
    assert_same_numbers(attention, model, ragged_feeds())
    assert sorted(operators(model)).count("Attention") == 1


def refused(refusal: str) -> ir.Model:
    """Return a model of what is no plain attention."""
    masking, scores, weighting, _ = REFUSALS[refusal]
    constants = {
        "five": np.array(5.0, np.float32),
        "zero": np.array(0.0, np.float32),
        "kept": np.array([True, False]).reshape(2, 1, 1),
        "sink": normal(2, 2, 5, 1),
        "near": np.linspace(0, 1, 25, dtype=np.float32).reshape(1, 1, 5, 5),
        "zeros": np.array([0]),
        "ends": np.array([-1]),
        "fives": np.array([5]),
        "three": np.array([3]),
    }
    inputs = "float[2, 5, 8] x, int64[2, 5] attention_mask"
    return attention_graph(
        MASKINGS[masking], scores=scores, weighting=weighting, inputs=inputs, outputs="float y", constants=constants
    )


def of_onnx(graph: str) -> Graph:
    """Return the builder of a graph with an operator of opset 23."""
    return of_text(graph, opset=23)


LONGER_KEYS = HEADS.replace("S, 4] k", "L, 4] k").replace("S, 4] v", "L, 4] v")
ONE_HEAD = HEADS.replace("2, S, 4] k", "1, S, 4] k").replace("2, S, 4] v", "1, S, 4] v")
DOUBLES = HEADS.replace("float", "double")
TO_SOFTMAX = "t = Transpose <perm=[0, 1, 3, 2]> (k) s = MatMul(q, t) p = Softmax (s)"
IN_A_BRANCH = (
    "y = If <then_branch = a () => (float c) { c = MatMul(p, v) }, else_branch = b () => (float n) { n = Neg(v) }> (is)"
)
HALF = "values of dtype float16, and queries of dtype float32"
STAYS: dict[str, tuple[Graph, str]] = {
    **{
        refusal: (partial(refused, refusal), f"1 left alone: {reason}" if reason else "")
        for refusal, (*_, reason) in REFUSALS.items()
    },
    # What is later has a higher score than padding then, before a text; no fused operator computes that.
    "two masks by which padding sees later keys": (
        partial(attention_graph, MASKINGS[SEES_LATER]),
        "see later keys",
    ),
    # A fused operator has no probabilities.
    "probabilities that are an output": (
        partial(attention_graph, outputs="float[B, S, 8] y, float[B, 2, S, S] p"),
        "1 left alone: probabilities that are read elsewhere as well",
    ),
    "probabilities that weight twice": (
        partial(
            attention_graph,
            weighting=f"{WEIGHTING} k3 = Transpose <perm=[0, 1, 3, 2]> (k) c2 = MatMul(p, k3)",
            outputs="float[B, S, 8] y, float[B, 2, S, 4] c2",
        ),
        "1 left alone: probabilities that weight several tensors of values",
    ),
    # Nothing of the main graph can take the place of what stands in a branch.
    "values that are weighted in a branch": (
        of_text(f"g ({HEADS}, bool is) => (float[B, 2, S, 4] y) {{ {TO_SOFTMAX} {IN_A_BRANCH} }}"),
        "probabilities that",
    ),
    "a Softmax that classifies": (
        of_text("g (float[B, S, 8] x) => (float[B, S, 8] y) { y = Softmax <axis=-1> (x) }"),
        "",
    ),
    "doubles": (
        of_text(f"g ({DOUBLES}) => (double[B, 2, S, 4] y) {{ {TO_SOFTMAX} y = MatMul(p, v) }}"),
        "queries of dtype float64",
    ),
    # A learned mixing of tokens has a weight where the keys would be.
    "scores of one side": (
        of_text(
            "g (float[3, 2, 5, 4] q, float[3, 2, 5, 4] v) => (float y) "
            "{ s = MatMul(q, w) p = Softmax(s) y = MatMul(p, v) }",
            {"w": normal(4, 5)},
        ),
        "keys whose heads cannot be told apart",
    ),
    # The fused operators have one dtype.
    "values behind a Softmax of another dtype": (
        of_onnx(f"g ({HEADS}) => (y) {{ {TO_SOFTMAX} r = Cast <to=10> (p) w = Cast <to=10> (v) y = MatMul(r, w) }}"),
        HALF,
    ),
    "ONNX's, values of another dtype": (
        of_onnx(f"g ({HEADS}) => (y) {{ w = Cast <to=10> (v) y = Attention (q, k, w) }}"),
        HALF,
    ),
    "ONNX's, a mask of another dtype": (
        of_onnx(f"g ({HEADS}, float16[S, S] m) => (y) {{ y = Attention (q, k, v, m) }}"),
        "a mask of dtype float16",
    ),
    "ONNX's, scores that are an output": (
        of_onnx(f"g ({HEADS}) => (float[B, 2, S, 4] y, float[B, 2, S, S] s) {{ y, , , s = Attention (q, k, v) }}"),
        "whose scores are read elsewhere",
    ),
    "ONNX's, capped": (partial(of_operator, "<softcap=5.0>"), "capped by a Tanh"),
    "ONNX's, one head of keys": (partial(of_operator, inputs=ONE_HEAD), "fewer heads"),
    "ONNX's, any number of heads": (
        partial(of_operator, inputs=HEADS.replace("2, S, 4]", "N, S, 4]")),
        "number of heads that is not known",
    ),
    "ONNX's, doubles": (
        of_onnx(f"g ({DOUBLES}) => (double[B, 2, S, 4] y) {{ y = Attention (q, k, v) }}"),
        "dtype float64",
    ),
    # ONNX counts their places from the first key on, onnxruntime back from the last.
    "ONNX's, fewer causal queries than keys": (
        partial(of_operator, "<is_causal=1>", inputs=LONGER_KEYS),
        "as many queries as keys",
    ),
}
ROW = Row(
    attention,
    {name: partial(attention_graph, masking) for name, masking in MASKINGS.items() if name != SEES_LATER},
    stays=STAYS,
    atol=None,
)
