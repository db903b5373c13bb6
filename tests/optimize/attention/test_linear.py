"""Linear layers in front of an attention, in the forms that exporters give them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.graph.shapes import find_shapes
from onnxtool.optimize.attention.views import Linear, find_linear
from tests.optimize.passes.builders import build, normal

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
