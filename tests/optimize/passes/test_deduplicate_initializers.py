"""Equal initializers are stored once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool.optimize.passes.duplicates import deduplicate_initializers
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    normal,
)
from tests.optimize.passes.properties import Row

SUM = "g (float[B, 4] x) => (float[B, 4] y) { a = Add(x, one) y = Mul(a, two) }"


def model_of_two(one: NDArray[Any], two: NDArray[Any]) -> ir.Model:
    """Return a model with two initializers, `one` and `two`, each cast to float32 and used."""
    body = "f = Cast <to=1> (one) g = Cast <to=1> (two) a = Add(x, f) y = Mul(a, g)"
    return build(f"g (float[B, 4] x) => (float y) {{ {body} }}", {"one": one, "two": two})


def test_equal_weights_are_stored_once() -> None:
    """Under the name of the first one, and the numbers stay."""
    model = build(SUM, {"one": normal(4), "two": normal(4)})
    assert_same_numbers(deduplicate_initializers, model)
    assert list(model.graph.initializers) == ["one"]


def test_the_count_is_that_of_the_initializers_that_are_gone() -> None:
    """Two twins, and one that nothing reads."""
    text = "g (float[B, 4] x) => (float[B, 4] y) { a = Add(x, one) b = Mul(a, two) y = Sub(b, three) }"
    model = build(text, {"one": normal(4), "two": normal(4), "three": normal(4), "unread": normal(3)})
    assert apply(deduplicate_initializers, model).num_changes == 3
    assert list(model.graph.initializers) == ["one"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (np.array([0.0, 1.0, 2.0, 3.0], np.float32), np.array([-0.0, 1.0, 2.0, 3.0], np.float32)),
        (np.zeros(4, np.float32), np.zeros(4, np.int32)),
        (np.zeros(4, np.float32), np.zeros((1, 4), np.float32)),
        (np.ones(4, np.float32), np.ones(4, np.float16)),
        (np.arange(4, dtype=np.int32), np.array([0, 1, 2, 4], np.int32)),
    ],
    ids=["signs of zero", "dtypes of the same bytes", "shapes", "precisions", "numbers"],
)
def test_what_is_not_the_same_stays_apart(one: NDArray[Any], two: NDArray[Any]) -> None:
    """1 / -0.0 is another infinity, and a reader expects its dtype and shape."""
    assert_left_alone(deduplicate_initializers, model_of_two(one, two))


def test_a_number_that_is_none_is_the_same_as_itself() -> None:
    """By its bytes; by the rules of floats it is not."""
    numbers = np.array([np.nan, 1.0, 2.0, 3.0], np.float32)
    assert apply(deduplicate_initializers, model_of_two(numbers, numbers.copy())).num_changes == 1


def test_large_weights_that_differ_in_one_place_stay_apart() -> None:
    """A few elements say which are worth comparing, not that they are the same."""
    one = np.zeros((100, 100), np.float32)
    two = one.copy()
    two[7, 3] = 1.0
    text = "g (float[B, 100] x) => (float[B, 100] y) { a = MatMul(x, one) y = MatMul(a, two) }"
    assert_left_alone(deduplicate_initializers, build(text, {"one": one, "two": two}))


def test_a_default_that_callers_may_replace_is_kept() -> None:
    """An initializer that is an input as well is no constant."""
    text = "g (float[B, 4] x, float[4] two) => (float[B, 4] y) { a = Add(x, one) y = Mul(a, two) }"
    model = build(text, {"one": normal(4), "two": normal(4)})
    assert_left_alone(deduplicate_initializers, model)
    assert set(model.graph.initializers) == {"one", "two"}


def test_a_weight_that_is_an_output_is_kept() -> None:
    """Under its name."""
    text = "g (float[B, 4] x) => (float[B, 4] y, float[4] two) { a = Add(x, one) y = Mul(a, two) }"
    model = build(text, {"one": normal(4), "two": normal(4)})
    assert_left_alone(deduplicate_initializers, model)


def test_a_branch_reads_the_one_that_is_left() -> None:
    """As the graph around it does."""
    branches = (
        "then_branch = a () => (float[B, 4] p) { p = Add(x, one) }, "
        "else_branch = e () => (float[B, 4] q) { q = Add(x, two) }"
    )
    text = f"g (float[B, 4] x, bool c) => (float[B, 4] y) {{ y = If <{branches}> (c) }}"
    model = build(text, {"one": normal(4), "two": normal(4)})
    feeds = {"x": normal(2, 4), "c": np.array(False)}
    assert_same_numbers(deduplicate_initializers, model, feeds)
    assert list(model.graph.initializers) == ["one"]


def test_texts_are_left_alone() -> None:
    """They have no bytes to compare."""
    text = "g (float[B] x) => (string[2] y, string[2] z) { y = Identity(one) z = Identity(two) }"
    model = build(text)
    for name in ("one", "two"):
        tensor = ir.StringTensor([b"a", b"b"], name=name, shape=ir.Shape([2]))
        held = ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape([2]))
        for node in model.graph:
            if node.inputs[0] is not None and node.inputs[0].name == name:
                node.replace_input_with(0, held)
        model.graph.register_initializer(held)
    assert_left_alone(deduplicate_initializers, model)


ROW = Row(deduplicate_initializers, {"sum": partial(build, SUM, {"one": normal(4), "two": normal(4)})})
