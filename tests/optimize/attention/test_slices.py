"""Small parts of a graph are run on their own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtool.graph.shapes import find_shapes
from onnxtool.optimize.attention.slices import Slice, evaluate, slice_above, table_lengths
from tests.optimize.passes.builders import build, normal

MASK = """g (float[B, S, 8] x, int64[B, S] mask) => (bool[B, 1, 1, S] y) {
    m = Cast <to=9> (mask) h = MatMul(x, w) s = Shape <start=1, end=2> (h) n = Squeeze(s)
    r = Range(zero, n, one) e = Less(r, limit) b = And(m, e) y = Unsqueeze(b, outer)
}"""
WEIGHTS = {
    "w": normal(8, 8),
    "zero": np.array(0),
    "one": np.array(1),
    "limit": np.array(40),
    "outer": np.array([1, 2]),
}


def part_of(model: ir.Model) -> Slice | None:
    """Return what leads to the first output."""
    return slice_above(model.graph.outputs[:1], find_shapes(model))


def test_a_size_is_asked_for_without_what_it_is_the_size_of() -> None:
    """The hidden states are not run to find out how long they are."""
    part = part_of(build(MASK, WEIGHTS))
    assert part is not None
    assert [value.name for value in part.inputs] == ["mask"]
    assert [value.name for value in part.sized] == ["h"]
    assert "MatMul" not in [node.op_type for node in part.nodes]


def test_a_part_is_computed_at_any_size() -> None:
    """As the whole graph computes it."""
    model = build(MASK, WEIGHTS)
    part = part_of(model)
    assert part is not None
    mask = np.ones((2, 45), np.int64)
    mask[1, :7] = 0
    found = evaluate(model, part, {"B": 2, "S": 45}, [{"mask": mask}])
    assert found is not None
    np.testing.assert_array_equal(found[0][0][:, 0, 0], (mask == 1) & (np.arange(45) < 40))


def test_the_hidden_states_are_too_much() -> None:
    """A weight of more than a mebibyte belongs to no mask."""
    weights = {"w": np.zeros((8, 40_000), np.float32)}
    model = build("g (float[B, S, 8] x) => (float[B, S, 40000] y) { y = MatMul(x, w) }", weights)
    assert part_of(model) is None


def test_a_branch_is_none_of_a_part() -> None:
    """What it reads from outside is not followed."""
    branches = "then_branch = a () => (float p) { p = Abs(x) }, else_branch = b () => (float q) { q = Neg(x) }"
    model = build(f"g (float x, bool c) => (float y) {{ y = If <{branches}> (c) }}")
    assert part_of(model) is None


def test_the_tables_of_a_part_are_known() -> None:
    """A window may be written into one of them."""
    body = "a = Less(x, limit) r = Where(a, x, lowest) y = Add(r, table)"
    weights = {
        "limit": np.array(40.0, np.float32),
        "lowest": np.array(-3e38, np.float32),
        "table": normal(1, 100),
    }
    part = part_of(build(f"g (float[B, 100] x) => (float[B, 100] y) {{ {body} }}", weights))
    assert part is not None
    assert table_lengths(part) == {100}


def test_a_part_that_cannot_be_run_is_none() -> None:
    """Such as one whose sizes do not fit."""
    model = build("g (int64[B, S] mask) => (int64 y) { y = Add(mask, row) }", {"row": np.arange(9)})
    part = part_of(model)
    assert part is not None
    assert evaluate(model, part, {"B": 2, "S": 7}, [{"mask": np.ones((2, 7), np.int64)}]) is None
