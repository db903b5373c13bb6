"""Graphs of older opsets, converted to the one that the passes write in."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.passes.convert_opset import convert_opset
from onnxtool.optimize.pipeline import Context, run_passes
from onnxtool.optimize.presets import PRESETS
from tests.optimize.passes.builders import (
    Row,
    apply,
    assert_left_alone,
    assert_same_numbers,
    build,
    build_body,
    normal,
    operators,
)

ROOT = "r = Sqrt(p) z = Identity(r)"
POSITIVE = "p = Abs(x)"
# What means something else, or takes its arguments in another way, in opset 17: the opset, and what makes y of z.
OLD = {
    "softmax over two axes": (11, "y = Softmax (z)"),
    "log-softmax": (8, "y = LogSoftmax <axis=1> (z)"),
    "softmax of an unknown rank": (12, "s = Shape(x) q = Reshape(z, s) y = Softmax <axis=1> (q)"),
    "softmax in a branch": (
        11,
        """c = Cast <to=9> (one) y = If (c) <then_branch = t () => (float[B, S, 8] a) { a = Softmax (z) },
        else_branch = e () => (float[B, S, 8] b) { b = Softmax <axis=2> (z) }>""",
    ),
    "axes as attributes": (11, "u = Unsqueeze <axes=[0]> (z) y = Squeeze <axes=[0]> (u)"),
    "a sum over axes": (12, "s = ReduceSum <axes=[-1]> (z) y = Sub(z, s)"),
    "bounds as attributes": (10, "y = Clip <max=0.5, min=0.1> (z)"),
    "sizes of a split as attributes": (11, "a, b = Split <axis=2, split=[3, 5]> (z) y = Concat <axis=2> (b, a)"),
    "pads as attributes": (
        9,
        "a = Pad <pads=[0, 0, 1, 0, 0, 0], value=1.5> (z) y = Slice <axes=[2], ends=[8], starts=[0]> (a)",
    ),
    "dropout": (7, "y = Dropout <ratio=0.3> (z)"),
}
NUMBERS = {"one": np.array(1, np.float32)}


def graph(opset: int, body: str) -> ir.Model:
    return build_body(f"{POSITIVE} {ROOT} {body}", NUMBERS if "one" in body else {}, opset)


@pytest.mark.parametrize("name", OLD)
def test_a_graph_keeps_its_meaning_in_the_new_opset(name: str) -> None:
    """Its inputs, outputs and domains as well."""
    model = graph(*OLD[name])
    before = [(value.name, str(value.shape)) for value in (*model.graph.inputs, *model.graph.outputs)]
    assert_same_numbers(convert_opset, model, atol=1e-6)
    outcome = apply(convert_opset, graph(*OLD[name]))
    assert default_opset(outcome.model.opset_imports) == 17
    assert outcome.note == f"from opset {OLD[name][0]} to 17"
    after = [(value.name, str(value.shape)) for value in (*outcome.model.graph.inputs, *outcome.model.graph.outputs)]
    assert after == before


@pytest.mark.parametrize(
    ("opset", "body", "reason"),
    [
        (12, "y = Hardmax <axis=1> (z)", "Hardmax means something else from opset 13 on"),
        (10, 'y = Resize <mode="linear"> (z, sizes)', "Resize means something else from opset 11 on"),
        (9, 'y = Upsample <mode="linear"> (z, sizes)', "Upsample means something else from opset 11 on"),
        (7, "a, m = Dropout (z) y = Mul(a, m)", "the mask of Dropout is no float from opset 10 on"),
        (6, "y = Neg(z)", "conversions begin with opset 7"),
        (9, "y, a, b, c, d = BatchNormalization (z, v, v, v, v)", "onnx's converter to 17 fails"),
    ],
)
def test_what_the_converter_would_change_keeps_its_opset(opset: int, body: str, reason: str) -> None:
    """With the reason."""
    weights = {"v": normal(8)} if "(z, v" in body else {}
    model = build_body(f"{POSITIVE} {ROOT} {body}", weights, opset)
    assert_left_alone(convert_opset, model, f"left in opset {opset}: {reason}")


def test_a_graph_that_no_pass_needs_a_later_opset_for_keeps_its_own() -> None:
    """Older runtimes read it; only int8 needs opset 11."""
    for opset, precision in ((10, "fp32"), (16, "fp32"), (11, "int8")):
        outcome = convert_opset.apply(build_body("y = Neg(x)", opset=opset), Context(precision=precision))
        assert (outcome.num_changes, default_opset(outcome.model.opset_imports)) == (0, opset)
    for precision in ("int8", "auto"):
        model = convert_opset.apply(build_body("y = Neg(x)", opset=10), Context(precision=precision)).model
        assert default_opset(model.opset_imports) == 17


def test_a_softmax_of_the_last_axis_stays_one_operator() -> None:
    """Attention is told by it; its rank is that of the target of a Reshape, which no file says."""
    outcome = apply(convert_opset, graph(12, "s = Shape(x) q = Reshape(z, s) y = Softmax <axis=2> (q)"))
    assert operators(outcome.model)[-2:] == ["Reshape", "Softmax"]


def test_a_normalization_of_an_older_opset_is_fused() -> None:
    """Of float32 weights larger than what a converter may copy."""
    body = (
        "m = ReduceMean <axes=[-1]> (x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean <axes=[-1]> (q) e = Add(v, epsilon) "
        "r = Sqrt(e) n = Div(d, r) g = Mul(n, gamma) y = Add(g, beta)"
    )
    weights = {"gamma": normal(512), "beta": normal(512, seed=1), "epsilon": np.array(1e-5, np.float32)}
    model = build(f"g (float[B, 512] x) => (float[B, 512] y) {{ {body} }}", weights, 11)
    fused, _ = run_passes(model, PRESETS["cpu"], Context())
    assert operators(fused) == ["LayerNormalization"]
    assert fused.graph.initializers["gamma"].const_value is not None


ROW = Row(convert_opset, {name: partial(graph, *pair) for name, pair in OLD.items()}, atol=1e-6)
