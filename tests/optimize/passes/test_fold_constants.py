"""What does not depend on the inputs, and what does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxtool.model_file.weights import load_model
from onnxtool.optimize.passes.fold_constants import fold_constants
from tests.optimize.passes.builders import (
    Arrays,
    Row,
    apply,
    assert_same_numbers,
    build,
    build_body,
    count,
    normal,
    of_body,
    of_text,
    operators,
    ragged_feeds,
)
from tests.workshop import Workshop

WEIGHTS: Arrays = {
    "w": normal(8) ** 2,
    "two": np.array(2, np.float32),
    "last": np.array([-1]),
    "row": np.array([1, 1, 8]),
    "part": np.array(0.5, np.float32),
    "no": np.array(False),
    "yes": np.array(True),
}
# Each with the operators that are left.
BODIES = {
    "Constant": ("c = Constant <value = float[1] {3.0}> () y = Add(x, c)", ["Add"]),
    "Constant of floats": ("c = Constant <value_floats = [3.0]> () y = Add(x, c)", ["Add"]),
    "Constant of integers": ("c = Constant <value_ints = [0, 0, 8]> () y = Reshape(x, c)", ["Reshape"]),
    "chain": ("c = Constant <value_float = 1.0> () d = Add(w, c) e = Sqrt(two) f = Mul(d, e) y = Mul(x, f)", ["Mul"]),
    "Identity": ("v = Identity(w) z = Add(x, v) y = Identity(z)", ["Add"]),
    "Cast to the same": ("v = Cast <to=1> (x) y = Add(v, w)", ["Add"]),
    "Cast behind an operator": ("v = Neg(x) u = Cast <to=1> (v) y = Add(u, w)", ["Neg", "Add"]),
    "CastLike the same": ("v = CastLike(w, x) y = Add(x, v)", ["Add"]),
    "Dropout": ("v = Dropout(x) y = Add(v, w)", ["Add"]),
    "Dropout in inference": ("v = Dropout(x, part, no) y = Add(v, w)", ["Add"]),
    "ConstantOfShape": ("c = ConstantOfShape(row) y = Add(x, c)", ["Add"]),
    "Gather": ("c = Gather(w, last) y = Add(x, c)", ["Add"]),
    "Expand": ("c = Expand(two, row) y = Add(x, c)", ["Add"]),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_count_is_that_of_the_nodes_that_are_gone(name: str) -> None:
    """Each of them is stored, or does nothing."""
    body, left = BODIES[name]
    model = build_body(body, WEIGHTS)
    num_before = len(model.graph)
    assert apply(fold_constants, model).num_changes == num_before - len(left)


def test_a_result_keeps_its_rank() -> None:
    """A number is no list of one."""
    model = build_body("v = Sqrt(two) y = Mul(x, v)", WEIGHTS)
    apply(fold_constants, model)
    tensor = model.graph.initializers["v"].const_value
    assert tensor is not None
    assert tensor.shape.numpy() == ()


def test_initializers_that_nothing_reads_any_more_are_dropped() -> None:
    """Their results have taken their place; a weight that others read stays."""
    model = build_body("s = Sqrt(two) v = Mul(s, w) u = Add(x, v) y = Add(u, w)", {k: WEIGHTS[k] for k in ("w", "two")})
    apply(fold_constants, model)
    assert sorted(model.graph.initializers) == ["v", "w"]


def test_an_output_behind_an_identity_keeps_its_name() -> None:
    """The node in front takes it, also for those who read it by another."""
    model = build("g (float[8] x) => (float[8] y, float[8] z) { a = Neg(x) y = Identity(a) z = Abs(a) }")
    assert_same_numbers(fold_constants, model)
    assert operators(model) == ["Neg", "Abs"]


def test_constants_inside_a_branch_are_left_alone() -> None:
    """What a branch sees of the graph around it is kept for it."""
    branches = (
        "then_branch = t () => (float[8] p) { c = Constant <value_float = 2.0> () p = Mul(v, c) }, "
        "else_branch = f () => (float[8] q) { q = Identity(v) }"
    )
    text = f"g (float[8] x, bool b) => (float[8] y) {{ v = Sqrt(w) u = If <{branches}> (b) y = Add(u, x) }}"
    model = build(text, {"w": np.ones(8, np.float32)})
    assert_same_numbers(fold_constants, model, {"x": normal(8), "b": np.array(True)})
    assert operators(model) == ["If", "Add"]
    inner = [node.op_type for graph in model.graphs() if graph is not model.graph for node in graph]
    assert sorted(inner) == ["Constant", "Identity", "Mul"]


def test_no_large_weight_is_read(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay where they lie on disk."""
    model = load_model(workshop.exported("tiny-encoder", exporter="torchscript"))
    read = ir.ExternalTensor.numpy

    def refuse(tensor: ir.ExternalTensor) -> NDArray[Any]:
        assert tensor.size <= 1 << 16
        return read(tensor)

    monkeypatch.setattr(ir.ExternalTensor, "numpy", refuse)
    assert apply(fold_constants, model).num_changes > 0


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_export_has_no_constants_left(workshop: Workshop, exporter: str) -> None:
    """TorchScript leaves many; dynamo has folded its own."""
    model = load_model(workshop.exported("tiny-encoder", exporter=exporter))
    expected = count(model, "Constant") > 0
    if expected:
        assert_same_numbers(fold_constants, model, ragged_feeds())
    assert (apply(fold_constants, model).num_changes, count(model, "Constant"), count(model, "Identity")) == (0, 0, 0)
    assert expected == (exporter == "torchscript")


LARGE = {
    "big": np.array([1 << 20, 1 << 20]),
    "two": WEIGHTS["two"],
    "wide": normal(1, 512),
    "high": normal(512, 1),
}
ROW = Row(
    fold_constants,
    fires={name: of_body(body, WEIGHTS) for name, (body, _) in BODIES.items()},
    after={name: " ".join(left) for name, (_, left) in BODIES.items()},
    stays={
        # It is another one in each run, or for each input.
        **{
            name: (of_body(body, WEIGHTS), "")
            for name, body in {
                "RandomNormal": "r = RandomNormal <shape=[8]> () y = Add(x, r)",
                "RandomNormalLike": "r = RandomNormalLike(w) y = Add(x, r)",
                "Bernoulli": "r = Bernoulli(w) y = Add(x, r)",
                "Cast to another": "v = Cast <to=11> (x) y = Cast <to=1> (v)",
                "Shape": "s = Shape(x) y = Reshape(x, s)",
                "Dropout in training": "v = Dropout(x, part, yes) y = Add(v, w)",
            }.items()
        },
        # Dequantized it would be four times the size.
        "a quantized weight": (
            of_body(
                "w = DequantizeLinear(q, s, z) y = Add(x, w)",
                {"q": np.arange(8, dtype=np.int8), "s": np.array(0.1, np.float32), "z": np.array(0, np.int8)},
            ),
            "",
        ),
        # That is another pass's, which sees what else reads it.
        "a transposed weight": (of_body("t = Transpose(v) y = MatMul(x, t)", {"v": normal(8, 8)}), ""),
        # An initializer that is an input as well is a default.
        "an input": (
            of_text(
                "g (float[8] x, float[8] w) => (float[8] y) { v = Sqrt(w) y = Add(x, v) }", {"w": np.ones(8, "f4")}
            ),
            "",
        ),
        **{
            body: (of_body(body, LARGE), "1 left alone: more than 65536 elements")
            for body in (
                "c = ConstantOfShape(big) y = Add(x, c)",
                "c = Expand(two, big) y = Add(x, c)",
                "c = Add(wide, high) y = Add(x, c)",
            )
        },
        # Rounded down, or towards zero; or no quotient at all.
        **{
            f"{one} / {other}": (
                of_text(
                    "g (int64[8] x) => (int64[8] y) { q = Div(n, d) y = Add(x, q) }",
                    {"n": np.array([one]), "d": np.array([other])},
                ),
                "",
            )
            for one, other in ((-7, 2), (7, 0))
        },
        # Where there is no other node that could take the name of an output.
        **{
            text: (of_text(text, {"two": WEIGHTS["two"]}), "")
            for text in (
                "g (float[8] x) => (float[8] y, float[8] z) { y = Neg(x) z = Identity(y) }",
                "g (float[8] x) => (float[8] y) { y = Identity(x) }",
                "g (float[8] x) => (float[8] y) { y = Cast <to=1> (x) }",
                "g (float[8] x) => (float[8] y, float z) { y = Neg(x) z = Sqrt(two) }",
                "g (float[8] x) => (float[8] y, float z) { y = Neg(x) z = Constant <value_float = 1.0> () }",
            )
        },
    },
)
