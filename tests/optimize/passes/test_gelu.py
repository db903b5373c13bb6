"""The forms of Gelu that exporters write, and what only looks like one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.gelu import gelu
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    build_body,
    count,
    ragged_feeds,
)
from tests.optimize.passes.properties import Row
from tests.workshop import Workshop

NUMBERS = {
    name: np.array(number, np.float32)
    for name, number in {
        "half": 0.5,
        "one": 1.0,
        "two": 2.0,
        "three": 3.0,
        "root": 2**0.5,
        "inverse": 0.5**0.5,
        "outer": (2 / np.pi) ** 0.5,
        "inner": 0.044715,
        "slope": 1.702,
    }.items()
}
CUBE = "c = Pow(x, three) k = Mul(c, inner) a = Add(x, k) u = Mul(a, outer)"
PRODUCT = "s = Mul(x, x) c = Mul(s, x) k = Mul(inner, c) a = Add(k, x) u = Mul(outer, a)"
BLOOM = "p = Mul(x, outer) q = Mul(x, inner) r = Mul(q, x) s = Add(r, one) u = Mul(p, s)"
GATE = "t = Tanh(u) g = Add(t, one)"
FORMS = {
    "torchscript": ("Gelu", "u = Div(x, root) e = Erf(u) g = Add(e, one) h = Mul(x, g) y = Mul(h, half)"),
    "half first": ("Gelu", "h = Mul(half, x) u = Mul(inverse, x) e = Erf(u) g = Add(one, e) y = Mul(g, h)"),
    "half on the gate": ("Gelu", "u = Mul(x, inverse) e = Erf(u) g = Add(e, one) h = Mul(g, half) y = Mul(x, h)"),
    "division by two": ("Gelu", "h = Div(x, two) u = Div(x, root) e = Erf(u) g = Add(e, one) y = Mul(h, g)"),
    "tanh of a power": ("FastGelu", f"{CUBE} {GATE} h = Mul(x, half) y = Mul(h, g)"),
    "tanh of products": ("FastGelu", f"{PRODUCT} {GATE} h = Mul(x, g) y = Mul(half, h)"),
    "tanh as in Bloom": ("FastGelu", f"h = Mul(x, half) {BLOOM} {GATE} y = Mul(h, g)"),
    "sigmoid": ("QuickGelu", "u = Mul(x, slope) e = Sigmoid(u) y = Mul(x, e)"),
}
ERF = FORMS["torchscript"][1]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_becomes_one_node(form: str) -> None:
    """Whatever the order of its factors."""
    operator, body = FORMS[form]
    outcome = apply(gelu, build_body(body, NUMBERS))
    assert [(node.domain, node.op_type) for node in outcome.model.graph] == [("com.microsoft", operator)]
    assert outcome.num_changes == 1


@pytest.mark.parametrize(("approximate", "operator"), [("none", "Gelu"), ("tanh", "FastGelu")])
def test_the_standard_operator_becomes_onnxruntimes(approximate: str, operator: str) -> None:
    """So that later passes find one form."""
    model = build_body(f'y = Gelu <approximate="{approximate}"> (x)', opset=20)
    assert_same_numbers(gelu, model)
    assert count(model, operator, "com.microsoft") == 1


@pytest.mark.parametrize("name", ["half", "one", "root"])
def test_other_constants_are_no_gelu(name: str) -> None:
    """Each of the three, off by a percent."""
    assert_left_alone(gelu, build_body(ERF, {**NUMBERS, name: np.float32(1.01) * NUMBERS[name]}))


@pytest.mark.parametrize(
    "body",
    [
        "u = Mul(x, slope) e = Sigmoid(u) y = Mul(u, e)",  # gate and factor of different values
        "e = Sigmoid(x) y = Mul(x, e)",  # SiLU
        "u = Div(x, root) e = Erf(u) g = Add(e, one) y = Mul(x, g)",  # twice Gelu
        f"d = Mul(x, x) {CUBE} {GATE} h = Mul(d, half) y = Mul(h, g)",
    ],
)
def test_what_looks_like_gelu_is_left_alone(body: str) -> None:
    """Other functions with the same operators."""
    assert_left_alone(gelu, build_body(body, NUMBERS))


def test_an_inner_value_that_others_read_is_kept() -> None:
    """Fused, it would be computed twice."""
    body = f"{ERF.replace('y =', 'z =')} y = Add(z, e)"
    assert_left_alone(gelu, build_body(body, NUMBERS), "1 left alone: an inner value is read elsewhere")


def test_an_inner_value_that_is_an_output_is_kept() -> None:
    """It has to be there."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 8] g) {{ {ERF} }}", NUMBERS)
    assert_left_alone(gelu, model, "an inner value is read elsewhere")


def test_an_inner_value_that_a_subgraph_reads_is_kept() -> None:
    """A branch of If sees the values around it."""
    branches = (
        "then_branch = t () => (float[B, S, 8] p) { p = Identity(g) }, "
        "else_branch = f () => (float[B, S, 8] q) { q = Identity(x) }"
    )
    body = f"{ERF} z = If <{branches}> (c)"
    model = build(f"m (float[B, S, 8] x, bool c) => (float[B, S, 8] y, float[B, S, 8] z) {{ {body} }}", NUMBERS)
    assert_left_alone(gelu, model, "an inner value is read elsewhere")


def test_doubles_are_left_alone() -> None:
    """Onnxruntime's operators have no float64."""
    numbers = {name: array.astype(np.float64) for name, array in NUMBERS.items()}
    assert_left_alone(gelu, build_body(ERF, numbers, dtype="double"), "neither float32 nor float16")


def test_float16_fires_with_its_rounded_constants() -> None:
    """They are off by less than a part in a thousand."""
    numbers = {name: array.astype(np.float16) for name, array in NUMBERS.items()}
    assert apply(gelu, build_body(ERF, numbers, dtype="float16")).num_changes == 1


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_export_has_one_in_each_layer(workshop: Workshop, exporter: str) -> None:
    """TorchScript spells Gelu out, dynamo writes the standard operator."""
    model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    apply(fold_constants, model)
    assert_same_numbers(gelu, model, ragged_feeds())
    assert count(model, "Gelu", "com.microsoft") == 2
    assert count(model, "Erf") == count(model, "Gelu") == 0


ROW = Row(gelu, {name: partial(build_body, body, NUMBERS) for name, (_, body) in FORMS.items()})
