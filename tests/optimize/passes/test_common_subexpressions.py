"""What is computed more than once is computed once."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.optimize.passes.duplicates import common_subexpressions
from tests.optimize.passes.builders import (
    apply,
    assert_left_alone,
    assert_same_numbers,
    assert_twice_is_once,
    build,
    normal,
    operators,
)
from tests.optimize.passes.properties import Row

SIGNATURE = "g (float[B, S, 8] x) => (float[B, S, 8] y)"
BODIES = {
    "a node": "a = Abs(x) b = Abs(x) y = Add(a, b)",
    "a chain": "a = Abs(x) c = Neg(a) b = Abs(x) d = Neg(b) y = Add(c, d)",
    "equal constants": "a = Mul(x, w) b = Mul(x, w_again) y = Add(a, b)",
    "what nothing reads": "a = Abs(x) b = Neg(x) c = Exp(b) y = Add(a, a)",
}
WEIGHTS = {"w": normal(8), "w_again": normal(8), "large": normal(40, 40), "large_again": normal(40, 40)}


@pytest.mark.parametrize("body", BODIES)
def test_each_is_computed_once(body: str) -> None:
    """With the same numbers."""
    model = build(f"{SIGNATURE} {{ {BODIES[body]} }}", WEIGHTS)
    assert_same_numbers(common_subexpressions, model)
    assert len(set(operators(model))) == len(operators(model))


@pytest.mark.parametrize(
    "body",
    [
        "a = Softmax <axis=1> (x) b = Softmax <axis=2> (x) y = Add(a, b)",
        "a = Sub(x, w) b = Sub(w, x) y = Add(a, b)",
        "a = Abs(x) b = Neg(x) y = Add(a, b)",
        "a = RandomNormalLike(x) b = RandomNormalLike(x) y = Sub(a, b)",
    ],
    ids=["other attributes", "other order", "other operators", "chance"],
)
def test_what_is_not_the_same_stays_apart(body: str) -> None:
    """However alike it looks."""
    weights = {"w": WEIGHTS["w"]} if "w" in body else {}
    assert_left_alone(common_subexpressions, build(f"{SIGNATURE} {{ {body} }}", weights))


def test_the_count_is_that_of_the_nodes_that_are_gone() -> None:
    """Two of a chain, and one that nothing reads."""
    model = build(f"{SIGNATURE} {{ {BODIES['a chain']} e = Exp(x) }}")
    assert apply(common_subexpressions, model).num_changes == 3


def test_constants_that_are_shared_count_as_well() -> None:
    """Though as many nodes are left."""
    text = f"{SIGNATURE} {{ a = Mul(x, w) y = Add(a, w_again) }}"
    model = build(text, {name: WEIGHTS[name] for name in ("w", "w_again")})
    assert_twice_is_once(common_subexpressions, model)
    assert list(model.graph.initializers) == ["w"]


def test_signs_of_zero_stay_apart() -> None:
    """1 / -0.0 is another infinity."""
    text = f"{SIGNATURE} {{ a = Mul(x, w) y = Add(a, v) }}"
    weights = {"w": np.zeros(8, np.float32), "v": -np.zeros(8, np.float32)}
    assert_left_alone(common_subexpressions, build(text, weights))


def test_two_outputs_of_one_value_keep_their_names() -> None:
    """Whoever calls the model asks for both."""
    model = build("g (float[B] x) => (float[B] y, float[B] z) { y = Abs(x) z = Abs(x) }")
    apply(common_subexpressions, model)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


def test_constants_of_the_same_numbers_and_other_dtypes_stay_apart() -> None:
    """A float zero and an integer zero have the same bytes."""
    text = "g (float[B] x, int32[B] n) => (float[B] y, int32[B] m) { y = Add(x, f) m = Add(n, i) }"
    model = build(text, {"f": np.array([0.0], np.float32), "i": np.array([0], np.int32)})
    assert_left_alone(common_subexpressions, model)
    assert set(model.graph.initializers) == {"f", "i"}


ROW = Row(
    common_subexpressions, {name: partial(build, f"{SIGNATURE} {{ {body} }}", WEIGHTS) for name, body in BODIES.items()}
)
