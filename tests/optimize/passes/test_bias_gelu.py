"""The bias in front of Gelu."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.fold_constants import fold_constants
from onnxtool.optimize.passes.gelu import bias_gelu, gelu
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    build_body,
    count,
    normal,
    operators,
    ragged_feeds,
)
from tests.optimize.passes.properties import Row
from tests.workshop import Workshop

BIAS = {"b": normal(8)}
FORMS = {
    "BiasGelu": "s = Add(x, b) y = com.microsoft.Gelu(s)",
    "FastGelu": "s = Add(b, x) y = com.microsoft.FastGelu(s)",
}


@pytest.mark.parametrize("operator", FORMS)
def test_the_bias_becomes_an_input(operator: str) -> None:
    """On either side of the sum."""
    model = build_body(FORMS[operator], BIAS)
    assert apply(bias_gelu, model).num_changes == 1
    assert operators(model) == [operator]
    assert [value.name for value in model.graph[0].inputs if value is not None] == ["x", "b"]


@pytest.mark.parametrize("shape", [(1,), (3, 8), (1, 8)])
def test_a_bias_that_is_no_vector_of_the_last_axis_stays(shape: tuple[int, ...]) -> None:
    """The operator broadcasts nothing else."""
    assert_left_alone(bias_gelu, build_body(FORMS["BiasGelu"], {"b": normal(*shape)}), "no vector as long")


def test_a_bias_that_widens_the_input_stays() -> None:
    """[B, 1] and [8] give [B, 8]."""
    model = build(f"g (float[B, 1] x) => (float[B, 8] y) {{ {FORMS['BiasGelu']} }}", BIAS)
    assert_left_alone(bias_gelu, model, "no vector as long")


def test_a_sum_that_others_read_stays() -> None:
    """It has to be computed for them."""
    body = "s = Add(x, b) z = com.microsoft.Gelu(s) y = Mul(z, s)"
    assert_left_alone(bias_gelu, build_body(body, BIAS), "the sum is read elsewhere")


def test_a_sum_that_is_an_output_stays() -> None:
    """It has to be there."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 8] y, float[B, S, 8] s) {{ {FORMS['BiasGelu']} }}", BIAS)
    assert_left_alone(bias_gelu, model, "the sum is read elsewhere")


def test_doubles_stay() -> None:
    """The operators have no float64."""
    bias = {"b": BIAS["b"].astype(np.float64)}
    assert_left_alone(bias_gelu, build_body(FORMS["BiasGelu"], bias, dtype="double"), "neither float32 nor float16")


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_export_has_one_in_each_layer(workshop: Workshop, exporter: str) -> None:
    """Every linear layer in front of Gelu has a bias."""
    model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    apply(fold_constants, model)
    apply(gelu, model)
    assert_same_numbers(bias_gelu, model, ragged_feeds())
    assert count(model, "BiasGelu", "com.microsoft") == 2
    assert count(model, "Gelu", "com.microsoft") == 0


ROW = Row(bias_gelu, {operator: partial(build_body, body, BIAS) for operator, body in FORMS.items()})
