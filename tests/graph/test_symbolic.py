"""Shapes for all sizes at once, compared with those that onnxruntime computes for some.

Letters of shapes: B batch, S sequence, P past.
"""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest

from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.sizes import Sizes
from tests.optimize.passes.builders import build, normal, run

NUMBERS = {
    **{f"n{number}": np.array([number]) for number in (0, 1, 2, 3, 4, 6, 8, 16)},
    "minus": np.array([-1]),
    "minus3": np.array([-3]),
    "end": np.array([2**63 - 1]),
    "scalar0": np.array(0),
    "scalar1": np.array(1),
    "scalar3": np.array(3),
    "heads": np.array([0, 0, 2, 4]),
    "joined": np.array([0, -1, 8]),
    "rows": np.array([-1, 8]),
    "pads": np.array([0, 2, 0, 0, 1, 0]),
    "twice": np.array([1, 2, 1, 2], np.float32),
    "halves": np.array([1, 1.5, 1, 1], np.float32),
    "table": normal(16, 8),
    "w": normal(8, 12),
    "kernel": normal(5, 8, 3),
}
SHAPE = "s = Shape(x) b = Slice(s, n0, n1) l = Slice(s, n1, n2)"
# As Python divides, which is one less for numbers of other signs.
FLOORED = (
    "t = Sign(l) d = Equal(t, n1) e = Not(d) m = Mod(l, n4) o = Cast <to=9> (m) a = And(e, o) "
    "c = Cast <to=7> (a) q = Div(l, n4) r = Sub(q, c)"
)
# What is known of the last value: the size of each axis, None for one that has a name of its own.
BODIES: dict[str, tuple[str, list[int | str | None]]] = {
    "heads": ("y = Reshape(x, heads)", ["B", "S", 2, 4]),
    "heads and back": ("a = Reshape(x, heads) y = Reshape(a, joined)", ["B", "S", 8]),
    "rows": ("y = Reshape(x, rows)", ["B*S", 8]),
    "rows and back": (f"{SHAPE} a = Reshape(x, rows) t = Concat <axis=0> (b, l, n8) y = Reshape(a, t)", ["B", "S", 8]),
    "pairs": (f"{SHAPE} t = Concat <axis=0> (minus, l, n2, n4) y = Reshape(x, t)", ["B", "S", 2, 4]),
    "flat": ("y = Flatten <axis=2> (x)", ["B*S", 8]),
    "without the last": ("y = Slice(x, n0, minus, n1)", ["B", "S + -1", 8]),
    "the last": ("y = Slice(x, minus, end, n1)", ["B", 1, 8]),
    "the first": ("y = Slice(x, n0, n1, n1)", ["B", 1, 8]),
    "without the first": ("y = Slice(x, n1, end, n1)", ["B", "S + -1", 8]),
    "the last three": ("y = Slice(x, minus3, end, n1)", ["B", None, 8]),
    "the first three": ("y = Slice(x, n0, n3, n1)", ["B", None, 8]),
    "every second": ("y = Slice(x, n0, end, n1, n2)", ["B", None, 8]),
    "backwards": ("y = Slice(x, minus, minus_end, n1, minus)", ["B", None, 8]),
    "twice": ("y = Concat <axis=1> (x, x)", ["B", "2*S", 8]),
    "with one more": ("a = Slice(x, n0, n1, n1) y = Concat <axis=1> (a, x)", ["B", "S + 1", 8]),
    "halves of twice": ("a = Concat <axis=1> (x, x) y, z = Split <axis=1, num_outputs=2> (a)", ["B", "S", 8]),
    "padded": ("y = Pad(x, pads)", ["B", "S + 3", 8]),
    "resized": (
        f'{SHAPE} a = Reshape(x, heads) t = Concat <axis=0> (b, l, l, n3) y = Resize <mode="linear"> (a, , , t)',
        ["B", "S", "S", 3],
    ),
    "resized by whole factors": ("a = Reshape(x, heads) y = Resize(a, , twice)", ["B", "2*S", 2, 8]),
    "resized by halves": ("a = Reshape(x, heads) y = Resize(a, , halves)", [None, None, 2, 4]),
    "tiled": (f"{SHAPE} t = Concat <axis=0> (n1, l, n1) y = Tile(x, t)", ["B", "S*S", 8]),
    "a part of a shape": ("t = Shape <start=0, end=2> (x) y = ConstantOfShape(t)", ["B", "S"]),
    "a part of a shape from its end": ("t = Shape <start=-2, end=-1> (x) y = ConstantOfShape(t)", ["S"]),
    "filled": (f"{SHAPE} t = Concat <axis=0> (l, b) y = ConstantOfShape(t)", ["S", "B"]),
    "expanded": (
        f"{SHAPE} t = Concat <axis=0> (b, minus, n8) e = Equal(t, minus) u = Where(e, n1, t) y = Expand(x, u)",
        ["B", "S", 8],
    ),
    "whole blocks of an image": (
        f"{SHAPE} {FLOORED} u = Concat <axis=0> (b, r) y = ConstantOfShape(u)",
        ["B", None],
    ),
    "positions": (f"{SHAPE} q = Squeeze(l) r = Range(scalar0, q, scalar1) y = Cast <to=1> (r)", ["S"]),
    "positions from the third on": (
        f"{SHAPE} q = Squeeze(l) r = Range(scalar3, q, scalar1) y = Cast <to=1> (r)",
        [None],
    ),
    "a row of a table": (f"{SHAPE} r = Slice(table, n0, l) y = Add(x, r)", ["B", "S", 8]),
    "a product": ("y = MatMul(x, w)", ["B", "S", 12]),
    "scores": ("a = Transpose <perm=[0, 2, 1]> (x) y = MatMul(x, a)", ["B", "S", "S"]),
    "a convolution": ("a = Transpose <perm=[0, 2, 1]> (x) y = Conv <pads=[1, 1]> (a, kernel)", ["B", 5, "S"]),
    "in steps": ("a = Transpose <perm=[0, 2, 1]> (x) y = Conv <pads=[1, 1], strides=[2]> (a, kernel)", ["B", 5, None]),
    "a pooling": (
        "a = Transpose <perm=[0, 2, 1]> (x) y = MaxPool <kernel_shape=[2], pads=[1, 0]> (a)",
        ["B", 8, "S"],
    ),
    "a mean": ("y = ReduceMean <keepdims=0> (x, n1)", ["B", 8]),
    "how many": (f"{SHAPE} n = ReduceProd <keepdims=1> (s) y = ConstantOfShape(n)", ["8*B*S"]),
    "all of them": ("n = Size(x) u = Unsqueeze(n, n0) y = ConstantOfShape(u)", ["8*B*S"]),
}
SIZES = ((1, 1), (1, 3), (2, 2), (3, 4), (2, 8), (5, 16))


@pytest.mark.parametrize("name", BODIES)
def test_shapes_are_those_of_onnxruntime_at_all_sizes(name: str) -> None:
    """A single row, a single token and a whole table among them; what has a name of its own is not compared."""
    body, expected = BODIES[name]
    weights = {**NUMBERS, "minus_end": np.array([-(2**31)])}
    model = build(f"g (float[B, S, 8] x) => (float y) {{ {body} }}", weights, opset=18)
    shapes = find_shapes(model)
    known = shapes.known["y"]
    found = [size if size in (*expected, *"BS") or "size_" not in str(size) else None for size in known]
    assert found == expected
    for batch, length in SIZES:
        actual = run(model, {"x": normal(batch, length, 8)})[0].shape
        sizes = {"B": batch, "S": length}
        computed = [size if size is None else shapes.sizes.at(size, sizes.__getitem__) for size in found]
        assert computed == [size if one is not None else None for size, one in zip(actual, found, strict=True)]


def test_two_computations_of_one_size_are_one() -> None:
    """Whatever it is; another one is not the same, though it agrees at every odd length."""
    body = (
        "a = Transpose <perm=[0, 2, 1]> (x) y = MaxPool <kernel_shape=[2], strides=[2]> (a) n = Neg(a) "
        "z = MaxPool <kernel_shape=[2], strides=[2]> (n) u = MaxPool <kernel_shape=[1], strides=[2]> (a)"
    )
    model = build(f"g (float[B, S, 8] x) => (float y, float z, float u) {{ {body} }}", NUMBERS)
    shapes, (first, again, other) = find_shapes(model), model.graph.outputs
    assert shapes.same(first, again)
    assert not shapes.same(first, other)


def test_a_size_that_is_cut_in_a_branch_alone_is_not_the_whole_elsewhere() -> None:
    """The branch that adds it may never run; where it does, more than the table has is an error anyway."""
    branch = (
        "z = If (c) <then_branch = t () => (float[N, M, 8] v) { v = Add(x, r) }, "
        "else_branch = e () => (float[N, M, 8] w) { w = Identity(x) }>"
    )
    text = f"g (float[B, S, 8] x, bool c) => (float r, float z) {{ {SHAPE} r = Slice(table, n0, l) {branch} }}"
    rows = find_shapes(build(text, NUMBERS)).known["r"][0]
    always = f"g (float[B, S, 8] x) => (float r, float z) {{ {SHAPE} r = Slice(table, n0, l) z = Add(x, r) }}"
    shapes = find_shapes(build(always, NUMBERS))
    assert rows != "S"
    assert shapes.known["r"] == ("S", 8)
    assert shapes.sizes.limits == [("S", 16)]


def test_sums_and_products_of_sizes_are_polynomials() -> None:
    """Of random ones, with numbers for the names as the oracle."""
    generator = np.random.default_rng(0)
    sizes = Sizes()
    sizes.add_axes(["B", "S", "P", "P + S"])
    values = {"B": 3, "S": 11, "P": 5}
    assert sizes.plus("S", "P") == "P + S"
    known: list[int | str] = ["B", "S", "P", "P + S", 2, 1]
    for _ in range(200):
        one, other = (known[generator.integers(len(known))] for _ in range(2))
        for made, right in (
            (sizes.plus(one, other), operator.add),
            (sizes.minus(one, other), operator.sub),
            (sizes.times(one, other), operator.mul),
        ):
            a, b, found = (sizes.at(size, values.__getitem__) for size in (one, other, made))
            assert found == right(a, b)
        product = sizes.times(one, other)
        if other != 0:
            assert sizes.quotient([product], [other]) in (one, None)
        if len(known) < 40:
            known.append(sizes.plus(product, 1))


def test_what_is_larger_is_so_for_all_sizes() -> None:
    """Of pairs of linear sizes, with all small sizes as the oracle."""
    sizes = Sizes()
    sizes.add_axes(["S", "P"])
    linear = [
        sizes.plus(sizes.times("S", a), sizes.times("P", b), c)
        for a, b, c in itertools.product((0, 1, 2), (0, 1), (-1, 0, 2))
    ]
    for one, other in itertools.product(linear, linear):
        grid = [{"S": s, "P": p} for s in range(6) for p in range(6)]
        always = all(sizes.at(one, at.__getitem__) >= sizes.at(other, at.__getitem__) for at in grid)
        assert sizes.is_at_least(one, other) == always
