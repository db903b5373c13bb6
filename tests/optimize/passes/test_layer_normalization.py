"""Layer normalization in elementary operators."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.normalizations import layer_normalization
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    build_body,
    count,
    exported,
    normal,
    operators,
)
from tests.optimize.passes.properties import Row

WEIGHTS = {
    "gamma": normal(8),
    "beta": normal(8, seed=1),
    "two": np.array(2, np.float32),
    "one": np.array(1, np.float32),
    "epsilon": np.array(1e-3, np.float32),
    "last": np.array([-1]),
}
MEAN = "m = ReduceMean <axes=[-1]> (x) d = Sub(x, m) p = Pow(d, two)"
ROOT = "v = ReduceMean <axes=[-1]> (p) e = Add(v, epsilon) r = Sqrt(e)"
DIV = f"{MEAN} {ROOT} n = Div(d, r)"
SCALE = "g = Mul(n, gamma) y = Add(g, beta)"
FORMS = {
    "div": f"{DIV} {SCALE}",
    "weights first": f"{DIV} g = Mul(gamma, n) y = Add(beta, g)",
    "product": f"{DIV} {SCALE}".replace("Pow(d, two)", "Mul(d, d)"),
    "reciprocal": f"{MEAN} {ROOT} i = Reciprocal(r) n = Mul(d, i) {SCALE}",
    "one by the root": f"{MEAN} {ROOT} i = Div(one, r) n = Mul(i, d) {SCALE}",
    "two differences": f"{MEAN.replace('Pow(d', 'Pow(c')} {ROOT} n = Div(d, r) {SCALE}".replace(
        "d =", "c = Sub(x, m) d ="
    ),
    "epsilon first": f"{DIV} {SCALE}".replace("Add(v, epsilon)", "Add(epsilon, v)"),
}
FORM = FORMS["div"]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_becomes_one_node(form: str) -> None:
    """With its epsilon."""
    model = build_body(FORMS[form], WEIGHTS)
    assert apply(layer_normalization, model).num_changes == 1
    assert operators(model) == ["LayerNormalization"]
    assert model.graph[0].attributes["epsilon"].as_float() == pytest.approx(1e-3)


def test_axes_are_an_input_from_opset_18() -> None:
    """And no attribute any more."""
    body = FORM.replace(" <axes=[-1]> (x)", "(x, last)").replace(" <axes=[-1]> (p)", "(p, last)")
    assert_same_numbers(layer_normalization, build_body(body, WEIGHTS, opset=18))


def test_without_a_shift_it_has_two_inputs() -> None:
    """As with ModernBERT, whose normalizations have no bias."""
    model = build_body(f"{DIV} y = Mul(n, gamma)", WEIGHTS)
    assert_same_numbers(layer_normalization, model)
    assert len(model.graph[0].inputs) == 2


def test_a_normalization_of_a_normalization_is_found_as_well() -> None:
    """The shape of the second one's input is known by the name of what the first replaced."""
    first = re.sub(r"\b([mdpvernigy])\b", r"\g<1>_1", FORM)
    model = build_body(first + re.sub(r"\bx\b", "y_1", FORM), WEIGHTS)
    assert apply(layer_normalization, model).num_changes == 2


def test_opset_16_has_no_such_operator() -> None:
    """And the note tells."""
    assert_left_alone(layer_normalization, build_body(FORM, WEIGHTS, opset=16), "needs opset 17")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Pow(d, two)", "Pow(d, one)"),
        ("Pow(d, two)", "Mul(d, x)"),
        ("ReduceMean <axes=[-1]> (x)", "ReduceMean <axes=[1]> (x)"),
        ("ReduceMean <axes=[-1]> (p)", "ReduceMean <axes=[1]> (p)"),
        ("ReduceMean <axes=[-1]> (p)", "ReduceMean <axes=[1, 2]> (p)"),
        ("ReduceMean <axes=[-1]> (p)", "ReduceMax <axes=[-1]> (p)"),
        ("Add(v, epsilon)", "Add(v, gamma)"),
        ("Div(d, r)", "Div(x, r)"),
        ("Sub(x, m)", "Sub(m, x)"),
    ],
)
def test_what_looks_like_it_is_left_alone(old: str, new: str) -> None:
    """Another power, another axis, another statistic."""
    assert_left_alone(layer_normalization, build_body(FORM.replace(old, new), WEIGHTS))


@pytest.mark.parametrize("shape", [(1,), (1, 8), ()])
def test_a_scale_that_is_no_vector_of_the_last_axis_is_left_alone(shape: tuple[int, ...]) -> None:
    """The operator broadcasts nothing else."""
    model = build_body(FORM, {**WEIGHTS, "gamma": normal(*shape)})
    assert_left_alone(layer_normalization, model, "the scale is no vector")


@pytest.mark.parametrize("name", "dvn")
def test_an_inner_value_that_is_an_output_is_kept(name: str) -> None:
    """It has to be there."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 8] {name}) {{ {FORM} }}", WEIGHTS)
    assert apply(layer_normalization, model).num_changes == 0


def test_doubles_are_left_alone() -> None:
    """Their precision is wanted."""
    weights = {name: array if name == "last" else array.astype(np.float64) for name, array in WEIGHTS.items()}
    assert_left_alone(layer_normalization, build_body(FORM, weights, dtype="double"), "neither float32 nor float16")


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_debertas_normalization_is_found(dynamo: bool) -> None:
    """Transformers spells it out there, in Python."""
    from transformers.models.deberta.modeling_deberta import DebertaLayerNorm

    model = exported(DebertaLayerNorm(8), 2, 3, 8, dynamo=dynamo)
    apply(fold_constants, model)
    assert_same_numbers(layer_normalization, model)
    assert operators(model) == ["LayerNormalization"]
    assert count(model, "LayerNormalization") == 1


ROW = Row(layer_normalization, {name: partial(build_body, body, WEIGHTS) for name, body in FORMS.items()})
