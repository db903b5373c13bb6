"""Which tensor a view shows, and how, is found by moving the indices of its elements; linear layers are in front.

Letters of shapes: B batch, S sequence, H = 2 heads, D = 4 the size of a head, G groups of keys.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.graph.shapes import find_shapes
from onnxtool.optimize.attention.views import HeadLayout, Heads, Linear, find_heads, find_joined, find_linear
from tests.optimize.passes.builders import build, normal

NUMBERS = {
    "heads": np.array([0, 0, 2, 4]),
    "more": np.array([0, 0, 2, 4, 1]),
    "joined": np.array([0, 0, 8]),
    "crossed": np.array([0, 2, -1, 4]),
    "squeezed": np.array([4]),
    "group": np.array([0, 0, 1, 8]),
    "repeated": np.array([0, 2, -1, 8]),
    "two": np.array(2.0, np.float32),
    "five": np.array(5.0, np.float32),
    "lone": np.array([2]),
    "many": np.array([1, 1, 2, 1, 1]),
    "by_heads": np.array([0, 4, -1, 2]),
}
FLAT, INSIDE, OUTSIDE = "float[B, S, 8] x", "float[B, S, 2, 4] x", "float[B, 2, S, 4] x"
# What a MatMul reads as `y`, with the input and the layout that it shows.
VIEWS = {
    "flat": (FLAT, "r = Reshape(x, heads) y = Transpose <perm=[0, 2, 1, 3]> (r)", HeadLayout.FLAT),
    "heads inside": (INSIDE, "y = Transpose <perm=[0, 2, 1, 3]> (x)", HeadLayout.HEADS_INSIDE),
    "heads outside": (OUTSIDE, "y = Identity(x)", HeadLayout.HEADS_OUTSIDE),
    "turned twice": (
        FLAT,
        "r = Reshape(x, heads) a = Transpose <perm=[2, 0, 1, 3]> (r) y = Transpose <perm=[1, 0, 2, 3]> (a)",
        HeadLayout.FLAT,
    ),
    "through five axes": (
        FLAT,
        "r = Reshape(x, more) a = Transpose <perm=[0, 2, 1, 3, 4]> (r) y = Squeeze(a, squeezed)",
        HeadLayout.FLAT,
    ),
}


def model_of(inputs: str, body: str) -> ir.Model:
    """Return a model that makes `y`."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    used = {name: array for name, array in NUMBERS.items() if name in words}
    return build(f"g ({inputs}) => (float y) {{ {body} }}", used)


def heads_of(inputs: str, body: str, *, transposed: bool = False, num_heads: int = 2) -> Heads | None:
    """Return the heads that the output of a graph shows."""
    model = model_of(inputs, body)
    return find_heads(model.graph.outputs[0], find_shapes(model), num_heads, transposed=transposed)


@pytest.mark.parametrize("view", VIEWS)
def test_the_layout_of_what_a_view_shows_is_found(view: str) -> None:
    """With the tensor itself, which is the input here; also of keys, whose last two axes are exchanged."""
    inputs, body, layout = VIEWS[view]
    turned = f"{body.replace('y =', 'z =')} y = Transpose <perm=[0, 1, 3, 2]> (z)"
    for heads in (heads_of(inputs, body), heads_of(inputs, turned, transposed=True)):
        assert heads is not None
        assert (heads.source.name, heads.layout, heads.num_heads, heads.head_size) == ("x", layout, 2, 4)
        assert heads.scale == 1.0


@pytest.mark.parametrize(
    ("body", "source", "scale"),
    [
        ("r = Reshape(x, heads) d = Div(r, two) e = Mul(five, d) y = Transpose <perm=[0, 2, 1, 3]> (e)", "x", 2.5),
        ("m = Mul(x, two) r = Reshape(m, heads) y = Transpose <perm=[0, 2, 1, 3]> (r)", "m", 1.0),
        ("a = Abs(x) r = Reshape(a, heads) y = Transpose <perm=[0, 2, 1, 3]> (r)", "a", 1.0),
    ],
    ids=["scales", "the flat tensor", "computed"],
)
def test_a_view_ends_at_the_flat_tensor_that_a_layer_gives(body: str, source: str, scale: float) -> None:
    """Scales on the way are multiplied, on whichever side they stand; nothing is looked for above its end."""
    heads = heads_of(FLAT, body)
    assert heads is not None
    assert (heads.source.name, heads.scale, heads.layout) == (source, scale, HeadLayout.FLAT)


@pytest.mark.parametrize(
    "body",
    [
        "r = Reshape(x, heads) y = Transpose <perm=[0, 2, 3, 1]> (r)",
        "r = Reshape(x, by_heads) y = Transpose <perm=[0, 3, 2, 1]> (r)",
        "y = Reshape(x, crossed)",
    ],
    ids=["not turned back", "heads innermost", "cut across the sequence"],
)
def test_another_order_of_the_elements_is_no_view_of_the_flat_tensor(body: str) -> None:
    """Shapes alone would not tell."""
    heads = heads_of(FLAT, body)
    assert heads is None or heads.source.name != "x"


def test_keys_of_groups_are_shown_where_they_are_repeated() -> None:
    """One group for two heads: what the fused operator reads has to have both."""
    body = (
        "r = Reshape(x, group) k = Transpose <perm=[0, 2, 1, 3]> (r) u = Unsqueeze(k, lone) e = Expand(u, many) "
        "y = Reshape(e, repeated)"
    )
    heads = heads_of(FLAT, body)
    assert heads is not None
    assert (heads.source.name, heads.layout) == ("y", HeadLayout.HEADS_OUTSIDE)


def test_a_width_that_moves_is_no_size_of_a_head() -> None:
    """The last axis has to be one number for all inputs."""
    assert heads_of("float[B, 2, S, D] x", "y = Identity(x)") is None


def test_a_cast_to_another_dtype_ends_a_view() -> None:
    """The numbers before it are others."""
    heads = heads_of("float16[B, 2, S, 4] x", "y = Cast <to=1> (x)")
    assert heads is not None
    assert heads.source.name == "y"


JOINED = "t = Transpose <perm=[0, 2, 1, 3]> (c)"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"c = Abs(x) {JOINED} y = Reshape(t, joined)", "y"),
        (f"c = Abs(x) {JOINED} j = Reshape(t, joined) y = Neg(j)", "j"),
        (f"c = Abs(x) {JOINED} y = Neg(t)", None),
        ("c = Abs(x) j = Reshape(c, joined) y = Neg(j)", None),
        (f"c = Abs(x) {JOINED} j = Reshape(t, joined) a = Neg(c) s = ReduceSum(a) y = Add(j, s)", None),
    ],
    ids=["at the end", "in the middle", "never joined", "joined otherwise", "read elsewhere"],
)
def test_the_heads_are_joined_where_their_indices_say_so(body: str, expected: str | None) -> None:
    """And where nothing reads what stands in between."""
    model = model_of(OUTSIDE, body)
    result = next(node.outputs[0] for node in model.graph if node.op_type == "Abs")
    found = find_joined(result, find_shapes(model), 2)
    assert (None if found is None else found.name) == expected


WEIGHTS = {
    "w": normal(8, 4),
    "b": normal(4),
    "wide": normal(8, 12),
    "wide_b": normal(12),
    "row": normal(1, 4),
    "rows": np.array([-1, 8]),
    "width": np.array([4]),
    "back": np.array([-1, 5, 4]),
    "mixed": np.array([5, -1, 4]),
}
FORMS = {
    "product": "y = MatMul(x, w)",
    "with bias": "p = MatMul(x, w) y = Add(p, b)",
    "bias first": "p = MatMul(x, w) y = Add(b, p)",
    "flattened": "f = Reshape(x, rows) g = Gemm(f, w, b) y = Reshape(g, back)",
}
OTHERS = {
    "of another input": "p = MatMul(x, w) y = Add(p, p)",
    "a bias of two axes": "p = MatMul(x, w) y = Add(p, row)",
    "computed weights": "v = Abs(w) y = MatMul(x, v)",
    "scaled": "f = Reshape(x, rows) g = Gemm <alpha=0.5> (f, w, b) y = Reshape(g, back)",
    "rows mixed": "f = Reshape(x, rows) g = Gemm(f, w, b) y = Reshape(g, mixed)",
}


def linear_of(body: str, output: str = "y") -> Linear | None:
    """Return the linear layer that gives an output of a graph."""
    model = build(f"g (float[B, 5, 8] x) => (float {output}) {{ {body} }}", WEIGHTS)
    return find_linear(model.graph.outputs[0], find_shapes(model))


def name(value: ir.Value | None) -> str | None:
    return None if value is None else value.name


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_found_with_its_bias(form: str) -> None:
    """Whichever side the bias is added on."""
    linear = linear_of(FORMS[form])
    assert linear is not None
    assert (linear.x.name, linear.weight.name, linear.part) == ("x", "w", None)
    assert name(linear.bias) == (None if form == "product" else "b")


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_no_linear_layer_is_none(form: str) -> None:
    """Nothing is guessed."""
    assert linear_of(OTHERS[form]) is None


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_third_of_a_layer_is_known_by_its_place(part: int) -> None:
    """As GPT-2 has its queries, keys and values."""
    body = "p = MatMul(x, wide) s = Add(p, wide_b) t0, t1, t2 = Split <axis=-1> (s)"
    linear = linear_of(body, f"t{part}")
    assert linear is not None
    assert (linear.weight.name, name(linear.bias), linear.part) == ("wide", "wide_b", part)


def test_parts_of_other_sizes_are_no_thirds() -> None:
    """Grouped queries make them."""
    weights = {**WEIGHTS, "sizes": np.array([4, 2, 6])}
    text = "g (float[B, 5, 8] x) => (float a) { p = MatMul(x, wide) a, b0, c = Split <axis=-1> (p, sizes) }"
    model = build(text, weights)
    assert find_linear(model.graph.outputs[0], find_shapes(model)) is None
