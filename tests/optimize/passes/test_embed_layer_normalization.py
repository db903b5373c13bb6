"""Embedding layers."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.normalizations import embed_layer_normalization
from tests.optimize.passes.builders import (
    Arrays,
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

WEIGHTS: Arrays = {
    "words": normal(30, 8),
    "places": normal(16, 8, seed=1),
    "kinds": normal(2, 8, seed=2),
    "gamma": normal(8, seed=3),
    "beta": normal(8, seed=4),
    "row": np.arange(16)[None],
    "zero": np.array([0]),
    "one": np.array([1]),
    "two": np.array(2),
    "first": np.array(1),
}
FEEDS = {
    "ids": np.array([[3, 29, 0, 7, 7], [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]),
    "kind": np.array([[0, 1, 1, 0, 1], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]),
}
SIGNATURE = "g (int64[B, S] ids, int64[B, S] kind) => (float[B, S, 8] y)"
NORM = "y = LayerNormalization <axis=-1, epsilon=0.01> (s, gamma, beta)"
CUT = "i = Shape <start=1, end=2> (ids) p = Slice(row, zero, i, one, one)"
GATHERED = "h = Shape(ids) j = Gather(h, first) i = Unsqueeze(j, zero) p = Slice(row, zero, i, one)"
COMPUTED = "p = Add(kind, two)"  # as in RoBERTa: [B, S], from the ids
LOOKUPS = "a = Gather(words, ids) b = Gather(kinds, kind) c = Gather(places, p)"
SUM = "t = Add(a, b) s = Add(t, c)"
FORMS = {
    "positions cut": f"{CUT} {LOOKUPS} {SUM} {NORM}",
    "positions cut to a gathered length": f"{GATHERED} {LOOKUPS} {SUM} {NORM}",
    "positions computed": f"{COMPUTED} {LOOKUPS} {SUM} {NORM}",
    "another order": f"{CUT} {LOOKUPS} t = Add(c, a) s = Add(b, t) {NORM}",
    "no segments": f"{COMPUTED} {LOOKUPS} s = Add(c, a) {NORM}".replace("b = Gather(kinds, kind)", ""),
    "length of the lookup": (
        f"a = Gather(words, ids) {GATHERED} {LOOKUPS.replace('a = Gather(words, ids)', '')} {SUM} {NORM}"
    ).replace("Shape(ids)", "Shape(a)"),
}
FORM = FORMS["positions cut"]


def embedding(body: str, opset: int = 17) -> ir.Model:
    return build(f"{SIGNATURE} {{ {body} }}", WEIGHTS, opset)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_becomes_one_node(form: str) -> None:
    """With int32 ids, and the tables in their places."""
    model = embedding(FORMS[form])
    assert apply(embed_layer_normalization, model).num_changes == 1
    assert not {"LayerNormalization", "Add"} & set(operators(model)) or form in ("positions computed", "no segments")
    node = next(node for node in model.graph if node.op_type == "EmbedLayerNormalization")
    segments = None if form == "no segments" else "kinds"
    names = [None if value is None else value.name for value in node.inputs]
    assert names[2:8] == ["words", "places", segments, "gamma", "beta", None]
    assert node.attributes["epsilon"].as_float() == pytest.approx(0.01)
    assert {value.dtype for value in (node.inputs[0], node.inputs[8]) if value} == {ir.DataType.INT32}


def test_ids_of_int32_need_no_cast() -> None:
    """They are what the operator takes."""
    text = f"{SIGNATURE} {{ {CUT} {LOOKUPS} {SUM} {NORM} }}".replace("int64[B", "int32[B")
    model = build(text, WEIGHTS)
    apply(embed_layer_normalization, model)
    assert count(model, "Cast") == 1  # of the positions


def test_two_embeddings_share_their_casts() -> None:
    """One for each input."""
    body = f"{CUT} {LOOKUPS} {SUM} {NORM} d = Gather(words, ids) e = Gather(places, p) f = Add(d, e)"
    text = f"{SIGNATURE[:-1]}, float[B, S, 8] z) {{ {body} z = {NORM[4:].replace('(s', '(f')} }}"
    model = build(text, WEIGHTS)
    assert_same_numbers(embed_layer_normalization, model, FEEDS)
    assert count(model, "EmbedLayerNormalization", "com.microsoft") == 2
    assert count(model, "Cast") == 3


def test_a_table_that_others_read_stays_one_tensor() -> None:
    """An output layer may be tied to it."""
    model = build(f"{SIGNATURE[:-1]}, float[30, 8] z) {{ {FORM} z = Neg(words) }}", WEIGHTS)
    assert_same_numbers(embed_layer_normalization, model, FEEDS)
    assert "words" in model.graph.initializers


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("axis=-1", "axis=1", "not over the last axis"),
        ("(s, gamma, beta)", "(s, gamma)", "scale or shift"),
        ("Slice(row, zero, i, one, one)", "Slice(row, one, i, one, one)", "words and positions cannot be told apart"),
        ("Slice(row, zero, i, one, one)", "Identity(row)", "words and positions cannot be told apart"),
        ("start=1, end=2", "start=0, end=1", "words and positions cannot be told apart"),
        ("Gather(words, ids)", "Gather <axis=1> (words, ids)", ""),
        ("t = Add(a, b)", "t = Mul(a, b)", ""),
    ],
)
def test_what_looks_like_it_is_left_alone(old: str, new: str, note: str) -> None:
    """Another axis, no shift, other positions, another sum."""
    assert_left_alone(embed_layer_normalization, embedding(FORM.replace(old, new)), note)


def test_segments_of_one_row_are_left_alone() -> None:
    """The operator takes [B, S] only."""
    text = f"{SIGNATURE} {{ {FORM} }}".replace("int64[B, S] kind", "int64[1, S] kind")
    assert_left_alone(embed_layer_normalization, build(text, WEIGHTS), "words and positions cannot be told apart")


def test_tables_of_other_widths_are_left_alone() -> None:
    """One of a column would be broadcast."""
    model = build(f"{SIGNATURE} {{ {FORM} }}", {**WEIGHTS, "kinds": normal(2, 1)})
    assert_left_alone(embed_layer_normalization, model, "of different widths")


@pytest.mark.parametrize("name", ["s", "t", "a"])
def test_a_sum_or_lookup_that_others_read_is_kept(name: str) -> None:
    """In a pre-norm model the residual goes on from there."""
    body = FORM.replace("y =", "n =") + f" y = Add(n, {name})"
    assert_left_alone(embed_layer_normalization, embedding(body))


def test_the_width_of_a_lookup_keeps_it() -> None:
    """The ids do not have it."""
    body = f"{FORM.replace('y =', 'n =')} h = Shape(a) k = Gather(h, two) f = Cast <to=1> (k) y = Mul(n, f)"
    assert_left_alone(embed_layer_normalization, embedding(body))


def test_doubles_are_left_alone() -> None:
    """The operator has no float64."""
    weights = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in WEIGHTS.items()}
    text = f"{SIGNATURE} {{ {FORM} }}".replace("float[", "double[")
    assert_left_alone(embed_layer_normalization, build(text, weights), "neither float32 nor float16")


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", ["tiny-encoder", "tiny-classifier"])
def test_an_export_has_one(workshop: Workshop, name: str, exporter: str) -> None:
    """BERT has segments, DistilBERT has none, and asks for the shape of its lookup."""
    model = load_model(workshop.exported(name, exporter=exporter))
    apply(fold_constants, model)
    feeds = {name: ids for name, ids in ragged_feeds().items() if name in {value.name for value in model.graph.inputs}}
    assert_same_numbers(embed_layer_normalization, model, feeds, atol=2e-5)  # hidden states of about 3
    assert count(model, "EmbedLayerNormalization", "com.microsoft") == 1
    assert "Gather" not in [node.op_type for node in model.graph if node.inputs[0] and node.inputs[0].is_initializer()]


ROW = Row(embed_layer_normalization, {name: partial(embedding, body) for name, body in FORMS.items()}, FEEDS)
