"""Residuals in front of a normalization."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.normalizations import skip_layer_normalization
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    count,
    normal,
    operators,
    ragged_feeds,
)
from tests.optimize.passes.properties import Row
from tests.workshop import Workshop

WEIGHTS = {"gamma": normal(8), "beta": normal(8, seed=1), "w": normal(8, 8, seed=2), "b": normal(8, seed=3)}
SIGNATURE = "g (float[B, S, 8] x, float[B, S, 8] r) => (float[B, S, 8] y)"
NORM = "LayerNormalization <axis=-1, epsilon=0.01> (s, gamma, beta)"
SIMPLE = "SimplifiedLayerNormalization <axis=-1, epsilon=0.01, stash_type=1> (s, gamma)"
LINEAR = "m = MatMul(x, w) l = Add(m, b)"
# Each with the names of the operator's inputs.
FORMS = {
    "sum": (f"s = Add(x, r) y = {NORM}", ["x", "r", "gamma", "beta"]),
    "no shift": (f"s = Add(x, r) y = {NORM}".replace(", beta", ""), ["x", "r", "gamma"]),
    "linear": (f"{LINEAR} s = Add(l, r) y = {NORM}", ["m", "r", "gamma", "beta", "b"]),
    "linear second": (f"{LINEAR} s = Add(r, l) y = {NORM}", ["m", "r", "gamma", "beta", "b"]),
    "linear, no shift": (f"{LINEAR} s = Add(r, l) y = {NORM}".replace(", beta", ""), ["m", "r", "gamma", None, "b"]),
    "simplified": (f"s = Add(x, r) y = {SIMPLE}", ["x", "r", "gamma"]),
    "simplified linear": (f"{LINEAR} s = Add(l, r) y = {SIMPLE}", ["m", "r", "gamma", "b"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_becomes_one_node(form: str) -> None:
    """With the bias of the linear layer in front of it."""
    body, inputs = FORMS[form]
    model = build(f"{SIGNATURE} {{ {body} }}", WEIGHTS)
    assert apply(skip_layer_normalization, model).num_changes == 1
    node = model.graph[-1]
    assert node.op_type == ("SkipSimplifiedLayerNormalization" if "simpl" in form else "SkipLayerNormalization")
    assert [None if value is None else value.name for value in node.inputs] == inputs
    assert node.attributes["epsilon"].as_float() == pytest.approx(0.01)
    assert "Add" not in operators(model)


@pytest.mark.parametrize("norm", [NORM, SIMPLE], ids=["full", "simplified"])
@pytest.mark.parametrize("total", ["s = Add(x, r)", f"{LINEAR} s = Add(l, r)"], ids=["sum", "linear"])
def test_a_sum_that_others_read_is_the_fourth_output(norm: str, total: str) -> None:
    """In a pre-norm model the residual goes on from there; a reader may stand in front of the normalization."""
    model = build(f"{SIGNATURE} {{ {total} a = Abs(s) n = {norm} y = Add(n, a) }}", WEIGHTS)
    assert_same_numbers(skip_layer_normalization, model)
    fused = next(node for node in model.graph if node.domain)
    assert [value.name for value in fused.outputs] == ["n", "", "", "s"]


def test_a_sum_that_is_an_output_keeps_its_name() -> None:
    """And its numbers."""
    text = f"{SIGNATURE[:-1]}, float[B, S, 8] s) {{ {FORMS['sum'][0]} }}"
    assert_same_numbers(skip_layer_normalization, build(text, WEIGHTS))


def test_a_layer_behind_a_layer_is_found_as_well() -> None:
    """The shape of the second one's residual is known by the name of what the first replaced."""
    first, second = (FORMS["sum"][0].replace("y =", "n ="), f"t = Add(n, r) y = {NORM.replace('(s', '(t')}")
    model = build(f"{SIGNATURE} {{ {first} {second} }}", WEIGHTS)
    assert_same_numbers(skip_layer_normalization, model)
    assert operators(model) == ["SkipLayerNormalization"] * 2


def test_a_sum_that_two_normalize_is_added_once() -> None:
    """In GPT-NeoX attention and the linear layers stand side by side."""
    text = f"{SIGNATURE} {{ s = Add(x, r) p = {NORM} q = {NORM} y = Add(p, q) }}"
    model = build(text, WEIGHTS)
    outcome = apply(skip_layer_normalization, model)
    assert (outcome.num_changes, outcome.note) == (1, "1 left alone: another normalization has fused the sum")
    assert sorted(operators(model)) == ["Add", "LayerNormalization", "SkipLayerNormalization"]


@pytest.mark.parametrize(
    ("x", "r"), [("B, S, 8", "1, S, 8"), ("B, S, 8", "B, S, 1"), ("B, 8", "B, 8"), ("B, S, 8", "8")]
)
def test_only_two_of_one_shape_of_three_axes_are_taken(x: str, r: str) -> None:
    """Some kernels of the operator broadcast, and some do not."""
    model = build(f"g (float[{x}] x, float[{r}] r) => (float y) {{ {FORMS['sum'][0]} }}", WEIGHTS)
    assert_left_alone(skip_layer_normalization, model, "same shape [B, S, D]")


def test_two_lengths_that_only_may_be_the_same_are_left_alone() -> None:
    """One of them may be 1."""
    model = build(f"g (float[B, S, 8] x, float[B, T, 8] r) => (float y) {{ {FORMS['sum'][0]} }}", WEIGHTS)
    assert_left_alone(skip_layer_normalization, model, "same shape [B, S, D]")


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("axis=-1", "axis=1", "not over the last axis"),
        ("(s, gamma, beta)", "(s, r, beta)", "no vector as long"),
        ("Add(x, r)", "Sub(x, r)", ""),
        ("Add(x, r)", "Add(x, b)", ""),
    ],
)
def test_what_looks_like_it_is_left_alone(old: str, new: str, note: str) -> None:
    """Another axis, no weight, no sum, no residual."""
    model = build(f"{SIGNATURE} {{ {FORMS['sum'][0].replace(old, new)} }}", WEIGHTS)
    assert_left_alone(skip_layer_normalization, model, note)


def test_a_mean_that_is_read_is_kept() -> None:
    """The operator has none at inference."""
    text = f"{SIGNATURE[:-1]}, float[B, S, 1] mean) {{ s = Add(x, r) y, mean = {NORM} }}"
    assert_left_alone(skip_layer_normalization, build(text, WEIGHTS), "its mean or deviation is read")


def test_a_linear_layer_that_others_read_keeps_its_bias() -> None:
    """The sum takes its result as it is."""
    model = build(f"{SIGNATURE} {{ {LINEAR} s = Add(l, r) n = {NORM} y = Add(n, l) }}", WEIGHTS)
    assert_same_numbers(skip_layer_normalization, model)
    assert operators(model) == ["MatMul", "Add", "SkipLayerNormalization", "Add"]


def test_doubles_are_left_alone() -> None:
    """The operator has no float64."""
    weights = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    model = build(f"{SIGNATURE} {{ {FORMS['sum'][0]} }}".replace("float", "double"), weights)
    assert_left_alone(skip_layer_normalization, model, "neither float32 nor float16")


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_export_has_two_in_each_layer(workshop: Workshop, exporter: str) -> None:
    """Behind attention and behind the linear layers, each with the bias in front of it."""
    model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    apply(fold_constants, model)
    assert_same_numbers(skip_layer_normalization, model, ragged_feeds(), atol=2e-5)  # hidden states of about 3
    fused = [node for node in model.graph if node.op_type == "SkipLayerNormalization"]
    assert [len(node.inputs) for node in fused] == [5] * 4
    assert count(model, "LayerNormalization") == 1  # of the embeddings, whose positions are [1, S, D]


ROW = Row(
    skip_layer_normalization,
    {name: partial(build, f"{SIGNATURE} {{ {form[0]} }}", WEIGHTS) for name, form in FORMS.items()},
)
