"""What is computed or stored more than once: nodes, initializers, transposed copies of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.optimize.passes.duplicates import common_subexpressions, deduplicate_initializers, tied_transposes
from onnxtool.optimize.passes.products import transposed_weights
from tests.optimize.passes.builders import (
    Graph,
    Row,
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    normal,
    of_body,
    of_text,
    operators,
)

CHAIN = "a = Abs(x) c = Neg(a) b = Abs(x) d = Neg(b) y = Add(c, d)"
PAIR = {"w": normal(8), "w_again": normal(8)}
SUM = "g (float[B, 4] x) => (float[B, 4] y) { a = Add(x, one) y = Mul(a, two) }"
TWINS = {"one": normal(4), "two": normal(4)}
TABLE = normal(512, 128)
COPY = np.ascontiguousarray(TABLE.T)
HEAD = {"table": TABLE, "head": COPY}
TIED = "g (int64[B, S] ids) => (float[B, S, 512] y) { x = Gather(table, ids) y = MatMul(x, head) }"
IDS = {"ids": np.array([[0, 511, 7]])}


def of_two(one: NDArray[Any], two: NDArray[Any]) -> Graph:
    """Return the builder of a model with two initializers, `one` and `two`, each cast to float32 and used."""
    body = "f = Cast <to=1> (one) g = Cast <to=1> (two) a = Add(x, f) y = Mul(a, g)"
    return of_text(f"g (float[B, 4] x) => (float y) {{ {body} }}", {"one": one, "two": two})


def changed(array: NDArray[Any], place: tuple[int, int], value: float) -> NDArray[Any]:
    """Return a copy with another number in one place."""
    copy = array.copy()
    copy[place] = value
    return copy


ZEROS = np.zeros((100, 100), np.float32)
ROWS = (
    Row(
        common_subexpressions,
        fires={
            "a node": of_body("a = Abs(x) b = Abs(x) y = Add(a, b)"),
            "a chain": of_body(CHAIN),
            "equal constants": of_body("a = Mul(x, w) b = Mul(x, w_again) y = Add(a, b)", PAIR),
            "constants alone": of_body("a = Mul(x, w) y = Add(a, w_again)", PAIR),
            "what nothing reads": of_body("a = Abs(x) b = Neg(x) c = Exp(b) y = Add(a, a)"),
        },
        after={
            "a node": "Abs Add",
            "a chain": "Abs Neg Add",
            "equal constants": "Mul Add",
            "constants alone": "Mul Add",
            "what nothing reads": "Abs Add",
        },
        stays={
            "other attributes": (of_body("a = Softmax <axis=1> (x) b = Softmax <axis=2> (x) y = Add(a, b)"), ""),
            "other order": (of_body("a = Sub(x, w) b = Sub(w, x) y = Add(a, b)", {"w": normal(8)}), ""),
            "other operators": (of_body("a = Abs(x) b = Neg(x) y = Add(a, b)"), ""),
            "chance": (of_body("a = RandomNormalLike(x) b = RandomNormalLike(x) y = Sub(a, b)"), ""),
            # 1 / -0.0 is another infinity.
            "signs of zero": (
                of_body("a = Mul(x, w) y = Add(a, v)", {"w": np.zeros(8, np.float32), "v": -np.zeros(8, np.float32)}),
                "",
            ),
            # A float zero and an integer zero have the same bytes.
            "dtypes of the same bytes": (
                of_text(
                    "g (float[B] x, int32[B] n) => (float[B] y, int32[B] m) { y = Add(x, f) m = Add(n, i) }",
                    {"f": np.array([0.0], np.float32), "i": np.array([0], np.int32)},
                ),
                "",
            ),
        },
    ),
    Row(
        deduplicate_initializers,
        fires={
            "sum": of_text(SUM, TWINS),
            # By its bytes a NaN is equal to itself; by the rules of floats it is not.
            "a number that is none": of_two(*2 * (np.array([np.nan, 1.0, 2.0, 3.0], np.float32),)),
        },
        stays={
            "signs of zero": (of_two(np.array([0.0, 1], np.float32), np.array([-0.0, 1], np.float32)), ""),
            "dtypes of the same bytes": (of_two(np.zeros(4, np.float32), np.zeros(4, np.int32)), ""),
            "shapes": (of_two(np.zeros(4, np.float32), np.zeros((1, 4), np.float32)), ""),
            "precisions": (of_two(np.ones(4, np.float32), np.ones(4, np.float16)), ""),
            "numbers": (of_two(np.arange(4, dtype=np.int32), np.array([0, 1, 2, 4], np.int32)), ""),
            # A few elements say which are worth comparing, not that they are the same.
            "large, in one place": (
                of_text(
                    "g (float[B, 100] x) => (float[B, 100] y) { a = MatMul(x, one) y = MatMul(a, two) }",
                    {"one": ZEROS, "two": changed(ZEROS, (7, 3), 1.0)},
                ),
                "",
            ),
            "a default of an input": (of_text(SUM.replace("x)", "x, float[4] two)", 1), TWINS), ""),
            "an output": (of_text(SUM.replace("y)", "y, float[4] two)", 1), TWINS), ""),
        },
    ),
    # Sums of 512 products in another order.
    Row(
        tied_transposes,
        fires={"head": of_text(TIED, HEAD)},
        after="Gather Transpose MatMul",
        feeds=IDS,
        atol=1e-4,
        stays={
            "another number": (of_text(TIED, {"table": TABLE, "head": changed(COPY, (100, 300), 1.0)}), ""),
            "another weight": (of_text(TIED, {"table": TABLE, "head": normal(128, 512, seed=1)}), ""),
            "a zero of another sign": (
                of_text(
                    TIED,
                    {"table": changed(TABLE, (300, 100), -0.0), "head": changed(COPY, (100, 300), 0.0)},
                ),
                "",
            ),
            "no product": (
                of_text(
                    "g (int64[B, S] ids) => (float[B, S, 128] x, float[128, 512] y) "
                    "{ x = Gather(table, ids) y = Neg(head) }",
                    HEAD,
                ),
                "",
            ),
            "from the left": (
                of_text(
                    "g (float[512, 128] x) => (float[512, 512] y, float[128, 128] z) "
                    "{ y = MatMul(x, head) z = MatMul(head, x) }",
                    HEAD,
                ),
                "",
            ),
            "an input": (
                of_text(
                    "g (float[B, 128] x, float[128, 512] head) => (float[B, 512] y) "
                    "{ y = MatMul(x, head) z = Neg(table) }",
                    HEAD,
                ),
                "",
            ),
            # A Transpose in the file would be all that comes of it.
            "doubles": (
                of_text(
                    TIED.replace("float", "double"),
                    {"table": TABLE.astype(np.float64), "head": COPY.astype(np.float64)},
                ),
                "",
            ),
            "small weights": (
                of_text(
                    "g (int64[B] ids) => (float[B, 8] y) { x = Gather(table, ids) y = MatMul(x, head) }",
                    {"table": TABLE[:8, :8], "head": TABLE[:8, :8].T.copy()},
                ),
                "",
            ),
            "types that differ": (
                of_text(
                    "g (float[B, 128] x, float16[B, 512] v) => (float[B, 512] y, float16[B, 128] z) "
                    "{ y = MatMul(x, head) z = MatMul(v, table) }",
                    {"table": TABLE.astype(np.float16), "head": COPY},
                ),
                "",
            ),
        },
    ),
)


def test_the_count_is_that_of_what_is_gone() -> None:
    """Two of a chain and a node that nothing reads; two twins and an initializer that nothing reads."""
    model = build(f"g (float[B, S, 8] x) => (float[B, S, 8] y) {{ {CHAIN} e = Exp(x) }}")
    assert apply(common_subexpressions, model).num_changes == 3
    text = "g (float[B, 4] x) => (float[B, 4] y) { a = Add(x, one) b = Mul(a, two) y = Sub(b, three) }"
    model = build(text, {**TWINS, "three": normal(4), "unread": normal(3)})
    assert apply(deduplicate_initializers, model).num_changes == 3
    assert list(model.graph.initializers) == ["one"]


def test_two_outputs_of_one_value_keep_their_names() -> None:
    """Whoever calls the model asks for both."""
    model = build("g (float[B] x) => (float[B] y, float[B] z) { y = Abs(x) z = Abs(x) }")
    apply(common_subexpressions, model)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


def test_a_branch_reads_the_one_that_is_left() -> None:
    """As the graph around it does."""
    branches = (
        "then_branch = a () => (float[B, 4] p) { p = Add(x, one) }, "
        "else_branch = e () => (float[B, 4] q) { q = Add(x, two) }"
    )
    model = build(f"g (float[B, 4] x, bool c) => (float[B, 4] y) {{ y = If <{branches}> (c) }}", TWINS)
    assert_same_numbers(deduplicate_initializers, model, {"x": normal(2, 4), "c": np.array(False)})
    assert list(model.graph.initializers) == ["one"]


def test_texts_are_left_alone() -> None:
    """They have no bytes to compare."""
    model = build("g (float[B] x) => (string[2] y, string[2] z) { y = Identity(one) z = Identity(two) }")
    for name in ("one", "two"):
        tensor = ir.StringTensor([b"a", b"b"], name=name, shape=ir.Shape([2]))
        held = ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.STRING), shape=ir.Shape([2]))
        for node in model.graph:
            if node.inputs[0] is not None and node.inputs[0].name == name:
                node.replace_input_with(0, held)
        model.graph.register_initializer(held)
    assert_left_alone(deduplicate_initializers, model)


def test_a_tied_output_layer_keeps_one_tensor() -> None:
    """And the product transposes while it multiplies."""
    model = build(TIED, HEAD)
    assert_same_numbers(tied_transposes, model, IDS, atol=1e-4)
    assert list(model.graph.initializers) == ["table"]
    assert_same_numbers(transposed_weights, model, IDS, atol=1e-4)
    assert operators(model) == ["Gather", "FusedMatMul"]


def test_two_products_that_are_each_other_s_transpose_keep_one_weight() -> None:
    """The one that comes first goes."""
    text = "g (float[B, 512] x) => (float[B, 512] y) { h = MatMul(x, table) y = MatMul(h, head) }"
    model = build(text, HEAD)
    assert_same_numbers(tied_transposes, model, atol=0.2)  # sums of squares of 512 numbers
    assert len(model.graph.initializers) == 1
