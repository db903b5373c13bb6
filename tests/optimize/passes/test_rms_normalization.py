"""Normalization by the root mean square."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.normalizations import rms_normalization
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    build_body,
    exported,
    normal,
    operators,
)
from tests.optimize.passes.properties import Row

WEIGHTS = {
    "w": normal(8),
    "two": np.array(2, np.float32),
    "one": np.array(1, np.float32),
    "epsilon": np.array(1e-3, np.float32),
    "last": np.array([-1]),
}
STATISTIC = "v = ReduceMean <axes=[-1]> (p) e = Add(v, epsilon) r = Sqrt(e)"
ROOT = f"p = Pow(x, two) {STATISTIC}"
FORMS = {
    "one by the root": f"{ROOT} i = Div(one, r) n = Mul(x, i) y = Mul(w, n)",
    "reciprocal": f"{ROOT} i = Reciprocal(r) n = Mul(i, x) y = Mul(n, w)",
    "div": f"{ROOT} n = Div(x, r) y = Mul(n, w)",
    "product": f"{ROOT} n = Div(x, r) y = Mul(n, w)".replace("Pow(x, two)", "Mul(x, x)"),
    "gemma": f"{ROOT} n = Div(x, r) g = Add(w, one) y = Mul(n, g)",
    "casts": f"z = Cast <to=1> (x) p = Pow(z, two) {STATISTIC} m = Div(z, r) n = Cast <to=1> (m) y = Mul(n, w)",
}
FORM = FORMS["reciprocal"]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_becomes_one_node(form: str) -> None:
    """Beside what computes the scale."""
    model = build_body(FORMS[form], WEIGHTS)
    assert apply(rms_normalization, model).num_changes == 1
    assert operators(model) == [*(["Add"] if form == "gemma" else []), "SimplifiedLayerNormalization"]
    attributes = {name: attribute.value for name, attribute in model.graph[-1].attributes.items()}
    assert attributes == {"axis": -1, "epsilon": pytest.approx(1e-3), "stash_type": 1}


def test_axes_are_an_input_from_opset_18() -> None:
    """And no attribute any more."""
    body = FORM.replace(" <axes=[-1]> (p)", "(p, last)")
    assert_same_numbers(rms_normalization, build_body(body, WEIGHTS, opset=18))


def test_a_float16_model_that_computes_it_in_float32_loses_its_casts() -> None:
    """The operator computes in float32 by itself."""
    weights = {**WEIGHTS, "w": WEIGHTS["w"].astype(np.float16)}
    body = FORMS["casts"].replace("n = Cast <to=1>", "n = Cast <to=10>")
    model = build_body(body, weights, dtype="float16")
    assert apply(rms_normalization, model).num_changes == 1
    assert operators(model) == ["SimplifiedLayerNormalization"]


def test_the_heads_of_a_query_are_normalized_as_well() -> None:
    """[B, N, S, 8], as in Qwen3."""
    model = build(f"g (float[B, N, S, 8] x) => (float[B, N, S, 8] y) {{ {FORM} }}", WEIGHTS)
    assert_same_numbers(rms_normalization, model)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Pow(x, two)", "Pow(x, one)"),
        ("ReduceMean <axes=[-1]> (p)", "ReduceMean <axes=[1]> (p)"),
        ("ReduceMean <axes=[-1]> (p)", "ReduceSum (p, last)"),
        ("ReduceMean <axes=[-1]> (p)", "ReduceMean (p)"),
        ("Add(v, epsilon)", "Add(v, w)"),
        ("Mul(i, x)", "Mul(i, p)"),
        ("Pow(x, two)", "Mul(x, w)"),
    ],
)
def test_what_looks_like_it_is_left_alone(old: str, new: str) -> None:
    """Another power, another axis, another statistic."""
    assert_left_alone(rms_normalization, build_body(FORM.replace(old, new), WEIGHTS))


def test_a_layer_normalization_is_none() -> None:
    """With its mean taken away it is the other pass's."""
    body = f"m = ReduceMean <axes=[-1]> (x) d = Sub(x, m) p = Pow(d, two) {STATISTIC} n = Div(d, r) y = Mul(n, w)"
    assert_left_alone(rms_normalization, build_body(body, WEIGHTS))


def test_a_standard_operator_is_left_alone() -> None:
    """It is one node already."""
    assert_left_alone(rms_normalization, build_body("y = RMSNormalization <axis=-1> (x, w)", WEIGHTS, opset=23))


def test_without_a_scale_it_is_left_alone() -> None:
    """The operator needs one."""
    body = f"{ROOT} y = Div(x, r)"
    assert_left_alone(rms_normalization, build_body(body, WEIGHTS), "no scale follows")


@pytest.mark.parametrize("shape", [(1,), (3, 8), ()])
def test_a_scale_that_is_no_vector_of_the_last_axis_is_left_alone(shape: tuple[int, ...]) -> None:
    """The operator broadcasts nothing else."""
    weights = {**WEIGHTS, "w": normal(*shape)}
    assert_left_alone(rms_normalization, build_body(FORM, weights), "the scale is no vector")


def test_an_inner_value_that_others_read_is_kept() -> None:
    """Fused, it would be computed twice."""
    body = FORM.replace("y =", "z =") + " y = Mul(z, i)"
    assert_left_alone(rms_normalization, build_body(body, WEIGHTS), "an inner value is read elsewhere")


def test_an_inner_value_that_is_an_output_is_kept() -> None:
    """It has to be there."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 1] r) {{ {FORM} }}", WEIGHTS)
    assert_left_alone(rms_normalization, model, "an inner value is read elsewhere")


def test_doubles_are_left_alone() -> None:
    """Their precision is wanted."""
    weights = {name: array if name == "last" else array.astype(np.float64) for name, array in WEIGHTS.items()}
    assert_left_alone(rms_normalization, build_body(FORM, weights, dtype="double"), "neither float32 nor float16")


@pytest.mark.parametrize("architecture", ["llama", "gemma", "t5"])
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_those_of_real_models_are_found(architecture: str, dynamo: bool) -> None:
    """As transformers writes them in Python, and PyTorch exports them."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    module = {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "t5": T5LayerNorm}[architecture](8)
    model = exported(module, 2, 3, 8, dynamo=dynamo)
    apply(fold_constants, model)
    assert_same_numbers(rms_normalization, model)
    assert operators(model) == ["SimplifiedLayerNormalization"]


ROW = Row(rms_normalization, {name: partial(build_body, body, WEIGHTS) for name, body in FORMS.items()})
