"""Sizes that are taken from the inputs of a graph.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.optimize.passes.input_sizes import input_sizes
from onnxtool.optimize.pipeline import Outcome
from tests.optimize.attention.graphs import MASKINGS, attention_graph
from tests.optimize.passes.builders import (
    Row,
    apply,
    assert_left_alone,
    build,
    count,
    normal,
    operators,
    run,
)

NUMBERS = {
    "zero": np.array(0),
    "one": np.array(1),
    "first": np.array([0]),
    "eight": np.array([8]),
    "two": np.array([2]),
    "four": np.array([4]),
    "limit": np.array([512]),
    "block": np.array([4]),
    "less": np.array([3]),
}
SIGNATURE = "g (float[B, S, 8] x) => (float y)"
SIZES = (
    "h = Neg(x) s = Shape(h) b0 = Gather(s, zero) b = Unsqueeze(b0, first) l0 = Gather(s, one) l = Unsqueeze(l0, first)"
)
BODIES = {
    "heads": f"{SIZES} t = Concat <axis=0> (b, l, two, four) y = Reshape(h, t)",
    "as it is": "h = Neg(x) s = Shape(h) z = ConstantOfShape(s) y = Add(z, h)",
}


def assert_same_for_all_sizes(model: ir.Model) -> Outcome:
    """Compare the outputs before and after for several shapes of the input; they are copies, to the last bit."""
    feeds = [{"x": normal(*shape, 8)} for shape in ((1, 1), (2, 3), (3, 2), (5, 17), (2, 600))]
    expected = [run(model, each)[0] for each in feeds]
    outcome = apply(input_sizes, model)
    for each, before in zip(feeds, expected, strict=True):
        np.testing.assert_array_equal(run(model, each)[0], before)
    return outcome


@pytest.mark.parametrize("body", ["heads", "as it is"])
def test_sizes_come_from_the_input(body: str) -> None:
    """Not from the hidden states."""
    model = build(f"{SIGNATURE} {{ {BODIES[body]} }}", NUMBERS)
    assert assert_same_for_all_sizes(model).num_changes == 1
    read = {str(node.inputs[0].name) for node in model.graph if node.op_type == "Shape" and node.inputs[0] is not None}
    assert read == {"x"}
    assert count(model, "Gather") == 0


def test_a_size_is_written_once_for_all_its_readers() -> None:
    """Each layer asks for it anew."""
    again = BODIES["heads"].replace("h = Neg(x)", "h2 = Neg(h)")
    for name in ("s", "b0", "b", "l0", "l", "t", "y"):
        again = again.replace(f"{name} =", f"{name}_2 =")
    again = again.replace("Shape(h)", "Shape(h2)").replace("Gather(s,", "Gather(s_2,").replace("(b0,", "(b0_2,")
    again = again.replace("(l0,", "(l0_2,").replace("(b, l,", "(b_2, l_2,").replace("(h, t)", "(h2, t_2)")
    model = build(f"g (float[B, S, 8] x) => (float y, float y_2) {{ {BODIES['heads']} {again} }}", NUMBERS)
    assert apply(input_sizes, model).num_changes == 2
    assert count(model, "Shape") == 2
    assert count(model, "Concat") == 1


def test_numbers_that_never_move_become_constants() -> None:
    """The width of the hidden states is one."""
    text = f"{SIGNATURE} {{ h = Neg(x) s = Shape <start=2> (h) t = Concat <axis=0> (rest, s) y = Reshape(x, t) }}"
    model = build(text, {"rest": np.array([-1])})
    assert_same_for_all_sizes(model)
    assert operators(model) == ["Reshape"]


def test_fixed_inputs_leave_no_size_to_compute() -> None:
    """All of them are numbers."""
    model = build(f"{SIGNATURE} {{ {BODIES['heads']} }}".replace("B, S", "2, 3"), NUMBERS)
    assert apply(input_sizes, model).num_changes == 1
    assert operators(model) == ["Neg", "Reshape"]


@pytest.mark.parametrize(
    "length",
    [
        "n = Mul(b, l) t = Concat <axis=0> (n, eight)",
        "n = Min(l, limit) t = Concat <axis=0> (b, n)",
        "a = Add(l, less) d = Div(a, block) n = Mul(d, block) t = Concat <axis=0> (b, n)",
    ],
    ids=["a product", "cut", "filled up"],
)
def test_what_is_computed_from_sizes_stays_computed(length: str) -> None:
    """It is the size of no input for all inputs."""
    model = build(f"{SIGNATURE} {{ {SIZES} {length} y = ConstantOfShape(t) }}", NUMBERS)
    assert_same_for_all_sizes(model)
    assert count(model, "Min") + count(model, "Mul") == 1


def test_a_row_of_positions_stays_as_it_is() -> None:
    """It is not made of sizes one by one, and neither is what masks are made of."""
    positions = "r = Range(zero, l0, one) f = Cast <to=1> (r) y = Neg(f)"
    assert_left_alone(input_sizes, build(f"{SIGNATURE} {{ {SIZES} {positions} }}", NUMBERS))
    assert_left_alone(input_sizes, attention_graph(MASKINGS["causal"]))


TURNING = {
    "a length alone": "c = Equal(l, limit)",
    "a multiple": "m = Mod(l, limit) c = Equal(m, first)",
    "a longer text": "c = Greater(l, limit)",
    "an empty one": "c = Equal(l, first)",
}


@pytest.mark.parametrize("condition", TURNING)
@pytest.mark.parametrize("form", ["Where", "If"])
def test_a_comparison_with_a_length_stays(condition: str, form: str) -> None:
    """It is false at all lengths but one, or at all short ones, and none of these may become a constant."""
    text = f"{SIZES} {TURNING[condition]} "
    if form == "Where":
        text += "f = Where(c, two, eight) g = Cast <to=1> (f) y = Mul(x, g)"
    else:
        text += (
            "k = Squeeze(c) y = If (k) <then_branch = t () => (float[B, S, 8] a) { a = Abs(x) }, "
            "else_branch = e () => (float[B, S, 8] d) { d = Neg(x) }>"
        )
    model = build(f"{SIGNATURE} {{ {text} }}", {**NUMBERS, "limit": np.array([100])})
    feeds = [{"x": normal(1, length, 8)} for length in (1, 99, 100, 101, 200)]
    expected = [run(model, each)[0] for each in feeds]
    apply(input_sizes, model)
    for each, before in zip(feeds, expected, strict=True):
        np.testing.assert_array_equal(run(model, each)[0], before)
    assert count(model, form) == 1


def test_the_condition_of_a_branch_stays_computed() -> None:
    """Also where it is always the same: onnxruntime would take the branch apart while it loads the graph."""
    text = (
        "h = Neg(x) s = Shape <start=2> (h) c = Equal(s, eight) k = Squeeze(c) "
        "y = If (k) <then_branch = t () => (float[B, S, 8] a) { a = Abs(x) }, "
        "else_branch = e () => (float[B, S, 8] d) { d = Neg(x) }>"
    )
    assert_left_alone(input_sizes, build(f"{SIGNATURE} {{ {text} }}", NUMBERS))


def test_an_older_opset_is_left_alone() -> None:
    """Its Shape gives all axes or none."""
    model = build(f"{SIGNATURE} {{ {BODIES['heads']} }}", NUMBERS, opset=14)
    assert_left_alone(input_sizes, model, "needs opset 15")


def test_a_size_that_is_an_output_stays() -> None:
    """Under its name."""
    model = build("g (float[B, S, 8] x) => (int64[3] s) { h = Neg(x) s = Shape(h) }")
    assert_left_alone(input_sizes, model)


ROW = Row(
    input_sizes,
    {name: partial(build, f"{SIGNATURE} {{ {BODIES[name]} }}", NUMBERS) for name in ("heads", "as it is")},
    feeds={"x": normal(2, 3, 8)},
    atol=0,
)
