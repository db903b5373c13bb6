"""What changes nothing is removed, and moves of axes that follow each other are one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtool.optimize.passes.neutral_operators import neutral_operators
from onnxtool.optimize.pipeline import Context, run_passes
from onnxtool.optimize.presets import PRESETS
from tests.optimize.passes.builders import (
    Row,
    apply,
    assert_same_numbers,
    build,
    count,
    of_body,
    operators,
    ragged_feeds,
)
from tests.workshop import Workshop

WEIGHTS = {
    "zero": np.array(0, np.float32),
    "ones": np.ones(8, np.float32),
    "one": np.ones((1, 1, 1), np.float32),
    "vocabulary": np.zeros(30_522, np.float32),
    "words": np.ones((8, 30_522), np.float32),
    "nearly": np.array(1 + 1e-6, np.float32),
    "wide": np.ones((1, 1, 1, 8), np.float32),
    "middle": np.array([1, -1]),
    "first": np.array([0]),
    "outer": np.array([0, 3]),
    "once": np.array([1]),
    "twice": np.array([1, 2, 1]),
    "all": np.array([0, 2, 3, -1]),
}
# Each with the operators that are left.
BODIES = {
    "sum": ("a = Add(x, zero) b = Add(zero, a) c = Sub(b, zero) y = Neg(c)", ["Neg"]),
    "product": ("a = Mul(x, ones) b = Mul(one, a) c = Div(b, ones) y = Neg(c)", ["Neg"]),
    "vocabulary": ("a = MatMul(x, words) b = Add(vocabulary, a) y = ReduceSum(b, first)", ["MatMul", "ReduceSum"]),
    "last": ("a = Neg(x) y = Mul(a, ones)", ["Neg"]),
    "two transposes": (
        (
            "a = Transpose <perm = [1, 0, 2]> (x) b = Transpose <perm = [1, 2, 0]> (a) "
            "c = Neg(b) y = Transpose <perm = [0, 2, 1]> (c)"
        ),
        ["Transpose", "Neg", "Transpose"],
    ),
    "undone transposes": (
        "a = Transpose <perm = [1, 2, 0]> (x) b = Transpose <perm = [2, 0, 1]> (a) y = Neg(b)",
        ["Neg"],
    ),
    "transposed before it is repeated": (
        (
            "s = Shape(x) r = Gather(s, first) t = Concat <axis=0> (r, once, once) a = Tile(x, t) "
            "b = Transpose <perm = [0, 2, 1]> (a) y = Neg(b)"
        ),
        ["Shape", "Gather", "Concat", "Transpose", "Tile", "Neg"],
    ),
    "axes": ("c = Unsqueeze(x, middle) d = Unsqueeze(c, outer) y = Squeeze(d, all)", ["Unsqueeze", "Squeeze"]),
}


def test_conditions_are_neutral_as_booleans() -> None:
    """`And(x, True)` and `Or(False, x)`; `Or(x, True)` is not x."""
    model = build(
        "g (bool[B] x) => (bool[B] y) <bool yes = {1}, bool no = {0}> "
        "{ a = And(x, yes) b = Or(no, a) c = Or(b, yes) y = Not(c) }"
    )
    assert operators(apply(neutral_operators, model).model) == ["Or", "Not"]


def test_a_bias_of_zeros_is_dropped_before_it_is_fused() -> None:
    """An untrained one, before a Gelu that could compute it."""
    gelu = "b = Add(zeros, a) c = Div(b, root) d = Erf(c) e = Add(d, one) f = Mul(b, e) y = Mul(f, half)"
    weights = {"w": np.eye(8, dtype=np.float32), "zeros": np.zeros(8, np.float32), "one": np.ones((), np.float32)}
    weights |= {"root": np.array(2**0.5, np.float32), "half": np.array(0.5, np.float32)}
    model, _ = run_passes(of_body(f"a = MatMul(x, w) {gelu}", weights)(), PRESETS["cpu"], Context())
    assert operators(model) == ["MatMul", "Gelu"]


def test_a_branch_reads_what_a_neutral_operator_read() -> None:
    """And what only a branch reads stays, also of a branch that is never taken; the condition is not looked at."""
    model = build(
        "g (float[2] x) => (float[2] y) <float zero = {0.0}, bool yes = {1}> { n = Add(x, zero) a = Abs(x) y = If(yes) "
        "<then_branch = t () => (float[2] b) { b = Neg(n) }, else_branch = e () => (float[2] c) { c = Exp(a) }> }"
    )
    assert_same_numbers(neutral_operators, model, atol=0)
    assert operators(model) == ["Abs", "If"]


def test_an_export_has_the_same_numbers(workshop: Workshop) -> None:
    """One in which Unsqueeze nodes of the mask are joined."""
    model = ir.load(workshop.exported("tiny-encoder", exporter="torchscript"))
    before = count(model, "Unsqueeze")
    assert_same_numbers(neutral_operators, model, ragged_feeds(), atol=2e-5)  # hidden states of about 3
    assert count(model, "Unsqueeze") < before


ROW = Row(
    neutral_operators,
    fires={
        **{name: of_body(body, WEIGHTS) for name, (body, _) in BODIES.items()},
        "what nothing reads": of_body("a = Abs(x) b = Exp(a) y = Neg(x)"),
    },
    after={**{name: " ".join(left) for name, (_, left) in BODIES.items()}, "what nothing reads": "Neg"},
    atol=0,
    # The other operand, a number beside it, more axes, a larger result, or a repeated axis that moves.
    stays={
        body: (of_body(body, WEIGHTS), "")
        for body in (
            "y = Sub(zero, x)",
            "y = Div(ones, x)",
            "y = Mul(x, nearly)",
            "y = Add(x, ones)",
            "a = Mul(x, wide) y = ReduceSum <keepdims = 0> (a, first)",
            "a = ReduceSum <keepdims = 1> (x) b = Mul(a, ones) y = Add(b, x)",
            "y = Mul(zero, zero)",
            "a = Tile(x, twice) b = Transpose <perm = [0, 2, 1]> (a) y = Neg(b)",
        )
    },
)
