"""Normalizations in elementary operators, and with the residuals and embeddings in front of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.gelu import bias_gelu
from onnxtool.optimize.passes.normalizations import (
    embed_layer_normalization,
    layer_normalization,
    rms_normalization,
    skip_layer_normalization,
    sums,
)
from tests.optimize.passes.builders import (
    Arrays,
    Row,
    apply,
    as_type,
    assert_same_numbers,
    build,
    build_body,
    count,
    exported,
    normal,
    of_body,
    of_text,
    operators,
    ragged_feeds,
)
from tests.workshop import Workshop

DTYPES = "neither float32 nor float16"
INNER = "an inner value is read elsewhere"

# Layer normalization and RMS normalization in elementary operators.
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
LAYER_FORMS = {
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
LAYER = LAYER_FORMS["div"]
RMS_WEIGHTS = {"w": WEIGHTS["gamma"], **{name: WEIGHTS[name] for name in ("two", "one", "epsilon", "last")}}
RMS_ROOT = f"p = Pow(x, two) {ROOT}"
RMS_FORMS = {
    "one by the root": f"{RMS_ROOT} i = Div(one, r) n = Mul(x, i) y = Mul(w, n)",
    "reciprocal": f"{RMS_ROOT} i = Reciprocal(r) n = Mul(i, x) y = Mul(n, w)",
    "div": f"{RMS_ROOT} n = Div(x, r) y = Mul(n, w)",
    "product": f"{RMS_ROOT} n = Div(x, r) y = Mul(n, w)".replace("Pow(x, two)", "Mul(x, x)"),
    "gemma": f"{RMS_ROOT} n = Div(x, r) g = Add(w, one) y = Mul(n, g)",
    "casts": f"z = Cast <to=1> (x) p = Pow(z, two) {ROOT} m = Div(z, r) n = Cast <to=1> (m) y = Mul(n, w)",
}
RMS = RMS_FORMS["reciprocal"]

# Residuals; each form with the names of the fused operator's inputs.
SKIP_WEIGHTS = {"gamma": normal(8), "beta": normal(8, seed=1), "w": normal(8, 8, seed=2), "b": normal(8, seed=3)}
SKIP_SIGNATURE = "g (float[B, S, 8] x, float[B, S, 8] r) => (float[B, S, 8] y)"
NORM = "LayerNormalization <axis=-1, epsilon=0.01> (s, gamma, beta)"
SIMPLE = "SimplifiedLayerNormalization <axis=-1, epsilon=0.01, stash_type=1> (s, gamma)"
LINEAR = "m = MatMul(x, w) l = Add(m, b)"
SKIP_FORMS = {
    "sum": (f"s = Add(x, r) y = {NORM}", ["x", "r", "gamma", "beta"]),
    "no shift": (f"s = Add(x, r) y = {NORM}".replace(", beta", ""), ["x", "r", "gamma"]),
    "linear": (f"{LINEAR} s = Add(l, r) y = {NORM}", ["m", "r", "gamma", "beta", "b"]),
    "linear second": (f"{LINEAR} s = Add(r, l) y = {NORM}", ["m", "r", "gamma", "beta", "b"]),
    "linear, no shift": (f"{LINEAR} s = Add(r, l) y = {NORM}".replace(", beta", ""), ["m", "r", "gamma", None, "b"]),
    "simplified": (f"s = Add(x, r) y = {SIMPLE}", ["x", "r", "gamma"]),
    "simplified linear": (f"{LINEAR} s = Add(l, r) y = {SIMPLE}", ["m", "r", "gamma", "b"]),
}
SKIP = SKIP_FORMS["sum"][0]

# Embeddings.
TABLES: Arrays = {
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
IDS = {
    "ids": np.array([[3, 29, 0, 7, 7], [1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]),
    "kind": np.array([[0, 1, 1, 0, 1], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]),
}
EMBED_SIGNATURE = "g (int64[B, S] ids, int64[B, S] kind) => (float[B, S, 8] y)"
EMBED_NORM = "y = LayerNormalization <axis=-1, epsilon=0.01> (s, gamma, beta)"
CUT = "i = Shape <start=1, end=2> (ids) p = Slice(row, zero, i, one, one)"
GATHERED = "h = Shape(ids) j = Gather(h, first) i = Unsqueeze(j, zero) p = Slice(row, zero, i, one)"
COMPUTED = "p = Add(kind, two)"  # as in RoBERTa: [B, S], from the ids
LOOKUPS = "a = Gather(words, ids) b = Gather(kinds, kind) c = Gather(places, p)"
SUM = "t = Add(a, b) s = Add(t, c)"
EMBED_FORMS = {
    "positions cut": f"{CUT} {LOOKUPS} {SUM} {EMBED_NORM}",
    "positions cut to a gathered length": f"{GATHERED} {LOOKUPS} {SUM} {EMBED_NORM}",
    "positions computed": f"{COMPUTED} {LOOKUPS} {SUM} {EMBED_NORM}",
    "another order": f"{CUT} {LOOKUPS} t = Add(c, a) s = Add(b, t) {EMBED_NORM}",
    "no segments": f"{COMPUTED} {LOOKUPS} s = Add(c, a) {EMBED_NORM}".replace("b = Gather(kinds, kind)", ""),
    "length of the lookup": (
        f"a = Gather(words, ids) {GATHERED} {LOOKUPS.replace('a = Gather(words, ids)', '')} {SUM} {EMBED_NORM}"
    ).replace("Shape(ids)", "Shape(a)"),
}
EMBED = f"{EMBED_SIGNATURE} {{ {EMBED_FORMS['positions cut']} }}"
APART = "words and positions cannot be told apart"

# Sums in front of normalizations and of Gelu.
SUM_WEIGHTS = {"w": normal(8, 8), "bias": normal(8), "scale": normal(8), "shift": normal(8)}
POST = "p = MatMul(x, w) q = Add(p, bias) r = Add(q, x) y = LayerNormalization(r, scale, shift)"
GELU = "p = MatMul(x, w) y = com.microsoft.BiasGelu(p, bias)"
UNFUSED = "p = MatMul(x, w) q = Add(p, bias) y = com.microsoft.Gelu(q)"

ROWS = (
    Row(
        layer_normalization,
        fires={
            **{name: of_body(body, WEIGHTS) for name, body in LAYER_FORMS.items()},
            "opset 18": of_body(
                LAYER.replace(" <axes=[-1]> (x)", "(x, last)").replace(" <axes=[-1]> (p)", "(p, last)"), WEIGHTS, 18
            ),
            "no shift": of_body(f"{DIV} y = Mul(n, gamma)", WEIGHTS),  # as with ModernBERT
        },
        after="LayerNormalization",
        stays={
            "opset 16": (of_body(LAYER, WEIGHTS, 16), "needs opset 17"),
            # Another power, another axis, another statistic.
            **{
                new: (of_body(LAYER.replace(old, new), WEIGHTS), "")
                for old, new in (
                    ("Pow(d, two)", "Pow(d, one)"),
                    ("Pow(d, two)", "Mul(d, x)"),
                    ("ReduceMean <axes=[-1]> (x)", "ReduceMean <axes=[1]> (x)"),
                    ("ReduceMean <axes=[-1]> (p)", "ReduceMean <axes=[1]> (p)"),
                    ("ReduceMean <axes=[-1]> (p)", "ReduceMean <axes=[1, 2]> (p)"),
                    ("ReduceMean <axes=[-1]> (p)", "ReduceMax <axes=[-1]> (p)"),
                    ("Add(v, epsilon)", "Add(v, gamma)"),
                    ("Div(d, r)", "Div(x, r)"),
                    ("Sub(x, m)", "Sub(m, x)"),
                )
            },
            **{
                f"a scale {shape}": (of_body(LAYER, {**WEIGHTS, "gamma": normal(*shape)}), "the scale is no vector")
                for shape in ((1,), (1, 8), ())
            },
            "doubles": (of_body(LAYER, as_type(np.float64, WEIGHTS), dtype="double"), DTYPES),
        },
    ),
    Row(
        rms_normalization,
        fires={
            **{name: of_body(body, RMS_WEIGHTS) for name, body in RMS_FORMS.items()},
            "opset 18": of_body(RMS.replace(" <axes=[-1]> (p)", "(p, last)"), RMS_WEIGHTS, 18),
            # As in Qwen3.
            "heads of a query": of_text(f"g (float[B, N, S, 8] x) => (float[B, N, S, 8] y) {{ {RMS} }}", RMS_WEIGHTS),
        },
        after={
            **dict.fromkeys((*RMS_FORMS, "opset 18", "heads of a query"), "SimplifiedLayerNormalization"),
            "gemma": "Add SimplifiedLayerNormalization",
        },
        stays={
            **{
                new: (of_body(RMS.replace(old, new), RMS_WEIGHTS), "")
                for old, new in (
                    ("Pow(x, two)", "Pow(x, one)"),
                    ("ReduceMean <axes=[-1]> (p)", "ReduceMean <axes=[1]> (p)"),
                    ("ReduceMean <axes=[-1]> (p)", "ReduceSum (p, last)"),
                    ("ReduceMean <axes=[-1]> (p)", "ReduceMean (p)"),
                    ("Add(v, epsilon)", "Add(v, w)"),
                    ("Mul(i, x)", "Mul(i, p)"),
                    ("Pow(x, two)", "Mul(x, w)"),
                )
            },
            "a layer normalization": (
                of_body(f"{MEAN} {ROOT} n = Div(d, r) y = Mul(n, w)", RMS_WEIGHTS),
                "",
            ),
            "ONNX's operator": (of_body("y = RMSNormalization <axis=-1> (x, w)", RMS_WEIGHTS, 23), ""),
            "no scale": (of_body(f"{RMS_ROOT} y = Div(x, r)", RMS_WEIGHTS), "no scale follows"),
            **{
                f"a scale {shape}": (of_body(RMS, {**RMS_WEIGHTS, "w": normal(*shape)}), "the scale is no vector")
                for shape in ((1,), (3, 8), ())
            },
            "an inner value is read": (of_body(RMS.replace("y =", "z =") + " y = Mul(z, i)", RMS_WEIGHTS), INNER),
            "an inner value is an output": (
                of_text(f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 1] r) {{ {RMS} }}", RMS_WEIGHTS),
                INNER,
            ),
            "doubles": (of_body(RMS, as_type(np.float64, RMS_WEIGHTS), dtype="double"), DTYPES),
        },
    ),
    Row(
        skip_layer_normalization,
        fires={
            **{name: of_text(f"{SKIP_SIGNATURE} {{ {body} }}", SKIP_WEIGHTS) for name, (body, _) in SKIP_FORMS.items()},
            "the sum is an output": of_text(f"{SKIP_SIGNATURE[:-1]}, float[B, S, 8] s) {{ {SKIP} }}", SKIP_WEIGHTS),
            # The shape of the second one's residual is known by the name of what the first replaced.
            "a layer behind a layer": of_text(
                f"{SKIP_SIGNATURE} {{ {SKIP.replace('y =', 'n =')} t = Add(n, r) y = {NORM.replace('(s', '(t')} }}",
                SKIP_WEIGHTS,
            ),
            "others read the linear layer": of_text(
                f"{SKIP_SIGNATURE} {{ {LINEAR} s = Add(l, r) n = {NORM} y = Add(n, l) }}", SKIP_WEIGHTS
            ),
        },
        after={
            "a layer behind a layer": "SkipLayerNormalization SkipLayerNormalization",
            "others read the linear layer": "MatMul Add SkipLayerNormalization Add",
        },
        stays={
            # Some kernels of the operator broadcast, and some do not; one of two lengths may be 1.
            **{
                f"[{x}] and [{r}]": (
                    of_text(f"g (float[{x}] x, float[{r}] r) => (float y) {{ {SKIP} }}", SKIP_WEIGHTS),
                    "same shape [B, S, D]",
                )
                for x, r in (
                    ("B, S, 8", "1, S, 8"),
                    ("B, S, 8", "B, S, 1"),
                    ("B, 8", "B, 8"),
                    ("B, S, 8", "8"),
                    ("B, S, 8", "B, T, 8"),
                )
            },
            **{
                new: (of_text(f"{SKIP_SIGNATURE} {{ {SKIP.replace(old, new)} }}", SKIP_WEIGHTS), note)
                for old, new, note in (
                    ("axis=-1", "axis=1", "not over the last axis"),
                    ("(s, gamma, beta)", "(s, r, beta)", "no vector as long"),
                    ("Add(x, r)", "Sub(x, r)", ""),
                    ("Add(x, r)", "Add(x, b)", ""),
                )
            },
            "the mean is read": (
                of_text(
                    f"{SKIP_SIGNATURE[:-1]}, float[B, S, 1] mean) {{ s = Add(x, r) y, mean = {NORM} }}", SKIP_WEIGHTS
                ),
                "its mean or deviation is read",
            ),
            "doubles": (
                of_text(f"{SKIP_SIGNATURE} {{ {SKIP} }}".replace("float", "double"), as_type(np.float64, SKIP_WEIGHTS)),
                DTYPES,
            ),
        },
    ),
    Row(
        embed_layer_normalization,
        fires={name: of_text(f"{EMBED_SIGNATURE} {{ {body} }}", TABLES) for name, body in EMBED_FORMS.items()},
        feeds=IDS,
        stays={
            # Another axis, no shift, other positions, another sum.
            **{
                f"{new} for {old}": (of_text(EMBED.replace(old, new), TABLES), note)
                for old, new, note in (
                    ("axis=-1", "axis=1", "not over the last axis"),
                    ("(s, gamma, beta)", "(s, gamma)", "scale or shift"),
                    ("Slice(row, zero, i, one, one)", "Slice(row, one, i, one, one)", APART),
                    ("Slice(row, zero, i, one, one)", "Identity(row)", APART),
                    ("start=1, end=2", "start=0, end=1", APART),
                    ("Gather(words, ids)", "Gather <axis=1> (words, ids)", ""),
                    ("t = Add(a, b)", "t = Mul(a, b)", ""),
                    ("int64[B, S] kind", "int64[1, S] kind", APART),
                )
            },
            "a table of another width": (of_text(EMBED, {**TABLES, "kinds": normal(2, 1)}), "of different widths"),
            # In a pre-norm model the residual goes on from there.
            **{
                f"others read {name}": (
                    of_text(EMBED.replace("y = ", "n = ").replace(" }", f" y = Add(n, {name}) }}"), TABLES),
                    "",
                )
                for name in "sta"
            },
            "the width of a lookup is read": (
                of_text(
                    EMBED.replace("y = ", "n = ").replace(
                        " }", " h = Shape(a) k = Gather(h, two) f = Cast <to=1> (k) y = Mul(n, f) }"
                    ),
                    TABLES,
                ),
                "",
            ),
            "doubles": (of_text(EMBED.replace("float[", "double["), as_type(np.float64, TABLES)), DTYPES),
        },
    ),
    Row(
        sums,
        fires={
            "normalized last": of_body(POST, SUM_WEIGHTS),
            "normalized first": of_body(
                "h = Neg(x) r = Add(x, h) n = LayerNormalization(r, scale, shift) m = MatMul(n, w) y = Add(m, r)",
                SUM_WEIGHTS,
            ),
            "gelu": of_body(GELU, SUM_WEIGHTS),
            "root mean square": of_body(
                "h = Neg(x) w2 = MatMul(h, w) r = Add(w2, x) y = SimplifiedLayerNormalization(r, scale)", SUM_WEIGHTS
            ),
            "others read the biased product": of_body(
                "p = MatMul(x, w) q = Add(p, bias) r = Add(q, x) n = LayerNormalization(r, scale, shift) y = Add(n, q)",
                SUM_WEIGHTS,
            ),
        },
        after={
            "normalized last": "MatMul Sum LayerNormalization",
            "normalized first": "Neg Sum LayerNormalization MatMul Add",
            "gelu": "MatMul Sum Gelu",
            "root mean square": "Neg MatMul Sum SimplifiedLayerNormalization",
            "others read the biased product": "MatMul Add Sum LayerNormalization Add",
        },
        atol=1e-6,
        stays={
            "a bias alone": (of_body("q = Add(x, bias) y = LayerNormalization(q, scale, shift)", SUM_WEIGHTS), ""),
            "no sum": (of_body("q = Mul(x, x) y = LayerNormalization(q, scale, shift)", SUM_WEIGHTS), ""),
            "no normalization": (of_body("q = Add(x, x) y = Mul(q, scale)", SUM_WEIGHTS), ""),
            # The CPU has no Sum of it.
            **{
                f"half precision, {name}": (of_body(body, as_type(np.float16, SUM_WEIGHTS), dtype="float16"), "")
                for name, body in (("normalized", POST), ("gelu", GELU))
            },
        },
    ),
)


@pytest.mark.parametrize(
    ("step", "body", "weights"),
    [(layer_normalization, LAYER, WEIGHTS), (rms_normalization, RMS_FORMS["div"], RMS_WEIGHTS)],
    ids=["layer", "rms"],
)
def test_a_form_keeps_its_epsilon(step: object, body: str, weights: Arrays) -> None:
    """And the operator computes in float32."""
    model = build_body(body, weights)
    apply(layer_normalization if step is layer_normalization else rms_normalization, model)
    attributes = {name: attribute.value for name, attribute in model.graph[-1].attributes.items()}
    assert attributes == {"axis": -1, "epsilon": pytest.approx(1e-3), "stash_type": 1}


def test_a_normalization_of_a_normalization_is_found_as_well() -> None:
    """The shape of the second one's input is known by the name of what the first replaced."""
    first = re.sub(r"\b([mdpvernigy])\b", r"\g<1>_1", LAYER)
    model = build_body(first + re.sub(r"\bx\b", "y_1", LAYER), WEIGHTS)
    assert_same_numbers(layer_normalization, model)
    assert operators(model) == ["LayerNormalization"] * 2


def test_of_two_rms_normalizations_in_a_row_both_are_fused() -> None:
    from torch import nn
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = exported(nn.Sequential(LlamaRMSNorm(8), LlamaRMSNorm(8)), 2, 3, 8, dynamo=False)
    apply(fold_constants, model)
    assert_same_numbers(rms_normalization, model)
    assert operators(model) == ["SimplifiedLayerNormalization"] * 2


@pytest.mark.parametrize("name", "dvn")
def test_an_inner_value_that_is_an_output_is_kept(name: str) -> None:
    """It has to be there."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 8] {name}) {{ {LAYER} }}", WEIGHTS)
    assert apply(layer_normalization, model).num_changes == 0


def test_a_float16_model_that_normalizes_in_float32_loses_its_casts() -> None:
    """The operator computes in float32 by itself."""
    weights = {**RMS_WEIGHTS, "w": RMS_WEIGHTS["w"].astype(np.float16)}
    model = build_body(RMS_FORMS["casts"].replace("n = Cast <to=1>", "n = Cast <to=10>"), weights, dtype="float16")
    assert apply(rms_normalization, model).num_changes == 1
    assert operators(model) == ["SimplifiedLayerNormalization"]


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_those_of_real_models_are_found(dynamo: bool) -> None:
    """As transformers writes them in Python, and PyTorch exports them, here one after the other."""
    from torch import nn
    from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    kinds = (LlamaRMSNorm, DebertaLayerNorm, GemmaRMSNorm, T5LayerNorm)
    parts = [part for kind in kinds for part in (kind(8), nn.Tanh())]
    model = exported(nn.Sequential(*parts), 2, 3, 8, dynamo=dynamo)
    apply(fold_constants, model)
    assert_same_numbers(layer_normalization, model)
    assert_same_numbers(rms_normalization, model)
    simplified = "SimplifiedLayerNormalization"
    assert operators(model)[::2] == [simplified, "LayerNormalization", simplified, simplified]
    assert set(operators(model)[1::2]) == {"Tanh"}


@pytest.mark.parametrize("form", SKIP_FORMS)
def test_a_residual_is_an_input_of_the_normalization(form: str) -> None:
    """With the bias of the linear layer in front of it."""
    body, inputs = SKIP_FORMS[form]
    model = build(f"{SKIP_SIGNATURE} {{ {body} }}", SKIP_WEIGHTS)
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
    model = build(f"{SKIP_SIGNATURE} {{ {total} a = Abs(s) n = {norm} y = Add(n, a) }}", SKIP_WEIGHTS)
    assert_same_numbers(skip_layer_normalization, model)
    fused = next(node for node in model.graph if node.domain)
    assert [value.name for value in fused.outputs] == ["n", "", "", "s"]


def test_a_sum_that_two_normalize_is_added_once() -> None:
    """In GPT-NeoX attention and the linear layers stand side by side."""
    model = build(f"{SKIP_SIGNATURE} {{ s = Add(x, r) p = {NORM} q = {NORM} y = Add(p, q) }}", SKIP_WEIGHTS)
    outcome = apply(skip_layer_normalization, model)
    assert (outcome.num_changes, outcome.note) == (1, "1 left alone: another normalization has fused the sum")
    assert sorted(operators(model)) == ["Add", "LayerNormalization", "SkipLayerNormalization"]


@pytest.mark.parametrize("form", EMBED_FORMS)
def test_an_embedding_becomes_one_node(form: str) -> None:
    """With int32 ids, and the tables in their places."""
    model = build(f"{EMBED_SIGNATURE} {{ {EMBED_FORMS[form]} }}", TABLES)
    assert apply(embed_layer_normalization, model).num_changes == 1
    assert not {"LayerNormalization", "Add"} & set(operators(model)) or form in ("positions computed", "no segments")
    node = next(node for node in model.graph if node.op_type == "EmbedLayerNormalization")
    segments = None if form == "no segments" else "kinds"
    names = [None if value is None else value.name for value in node.inputs]
    assert names[2:8] == ["words", "places", segments, "gamma", "beta", None]
    assert node.attributes["epsilon"].as_float() == pytest.approx(0.01)
    assert {value.dtype for value in (node.inputs[0], node.inputs[8]) if value} == {ir.DataType.INT32}


def test_ids_of_int32_need_no_cast_and_others_share_theirs() -> None:
    """One for each input of two embeddings; another output may be tied to the table, which stays one tensor."""
    model = build(EMBED.replace("int64[B", "int32[B"), TABLES)
    apply(embed_layer_normalization, model)
    assert count(model, "Cast") == 1  # of the positions
    second = f"d = Gather(words, ids) e = Gather(places, p) f = Add(d, e) z = {EMBED_NORM[4:].replace('(s', '(f')}"
    outputs = f"{EMBED_SIGNATURE[:-1]}, float[B, S, 8] z, float[30, 8] w)"
    model = build(f"{outputs} {{ {EMBED_FORMS['positions cut']} {second} w = Neg(words) }}", TABLES)
    assert_same_numbers(embed_layer_normalization, model, IDS)
    assert (count(model, "EmbedLayerNormalization", "com.microsoft"), count(model, "Cast")) == (2, 3)
    assert "words" in model.graph.initializers


@pytest.mark.parametrize(
    ("name", "exporter"),
    [("tiny-encoder", "torchscript"), ("tiny-encoder", "dynamo"), ("tiny-classifier", "torchscript")],
)
def test_an_export_has_one_embedding_and_two_residuals_in_each_layer(
    workshop: Workshop, name: str, exporter: str
) -> None:
    """BERT has segments, DistilBERT has none and asks for the shape of its lookup."""
    model = load_model(workshop.exported(name, exporter=exporter))
    apply(fold_constants, model)
    feeds = {name: ids for name, ids in ragged_feeds().items() if name in {value.name for value in model.graph.inputs}}
    assert_same_numbers(embed_layer_normalization, model, feeds, atol=2e-5)  # hidden states of about 3
    assert count(model, "EmbedLayerNormalization", "com.microsoft") == 1
    assert "Gather" not in [node.op_type for node in model.graph if node.inputs[0] and node.inputs[0].is_initializer()]
    assert_same_numbers(skip_layer_normalization, model, feeds, atol=2e-5)
    fused = [node for node in model.graph if node.op_type == "SkipLayerNormalization"]
    assert [len(node.inputs) for node in fused] == [5] * 4
    assert count(model, "LayerNormalization") == 0


@pytest.mark.parametrize(
    ("body", "operator"), [(POST, "SkipLayerNormalization"), (UNFUSED, "BiasGelu")], ids=["a normalization", "Gelu"]
)
def test_a_session_as_everybody_opens_it_fuses_nothing_that_is_slower(tmp_path: Path, body: str, operator: str) -> None:
    """Without the pass it does, which is the reason for it."""
    model = build_body(body, SUM_WEIGHTS)
    assert operator in loaded_operators(model, tmp_path)
    apply(bias_gelu, model)
    apply(sums, model)
    assert operator not in loaded_operators(model, tmp_path)


def loaded_operators(model: ir.Model, folder: Path) -> list[str]:
    """Return the operators that a session with the default settings runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "loaded.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "loaded.onnx").graph.node]
