"""Graphs that ask the engine for more than the rule of one operator: their gradients are the slopes in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxtool.autodiff import differentiate, prepare
from onnxtool.errors import GradientError
from tests.autodiff.gradients import directional_slopes, run_reference

_ATTENTION = "double[1,2,3,4] x, double[1,2,3,4] k, double[1,2,3,4] v"
_LOSS = "SoftmaxCrossEntropyLoss"
# Inputs, outputs besides the loss, nodes that end in `h`, and the values of inputs that are not random.
GRAPHS: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "a function whose result is a graph output": ("double[2,3] x", "double[2,3] h", "h = Softsign(x)", {}),
    "a function with an omitted input": (
        f"{_ATTENTION}, int64[1] n", "", 'h = Attention<is_causal=1>(x, k, v, "", "", "", n)', {"n": np.array([2])},
    ),
    "a function with an omitted output": (
        _ATTENTION, "", 'a, "", "", b = Attention(x, k, v) h = Concat<axis=-1>(a, b)', {},
    ),
    "an If that a fixed size decides": (
        "double[2,3] x", "",
        """six = Constant<value_int=6>() count = Size(x) c = Equal(count, six) h = If<
           then_branch = a () => (double[2,3] u) <double[1] b = {2.0}> { t = Exp(x) u = Mul(t, b) },
           else_branch = b () => (double[2,3] v) { v = Neg(x) }>(c)""", {},
    ),
    "rows that are wholly masked": (
        f"{_ATTENTION}, bool[3,3] m", "", "h = Attention(x, k, v, m)", {"m": np.arange(9).reshape(3, 3) > 2},
    ),
    "steps that nodes compute": (
        "double[4,6] x", "",
        "z = Constant<value_ints=[0]>() t = Constant<value_int=2>() p = Unsqueeze(t, z) h = Slice(x, z, p, z, p)", {},
    ),
    "steps that a caller gives": (
        "double[4,6] x, int64[2] a, int64[2] b, int64[2] step", "", 'h = Slice(x, a, b, "", step)',
        {"a": np.array([3, 1]), "b": np.array([-9, 6]), "step": np.array([-2, 3])},
    ),
    "pads that a caller gives": (
        "double[4,6] x, int64[4] p", "", 'h = Pad<mode="reflect">(x, p)', {"p": np.array([1, 0, 2, 3])},
    ),
    "blocks of columns and rows, of any size": (
        "double[n,8,h,w] x", "", 'h = DepthToSpace<blocksize=2, mode="CRD">(x)', {"x": (2, 8, 2, 3)},
    ),
    "a minimum above the maximum": (
        "double[4] x, double a, double b", "", "h = Clip(x, a, b)", {"a": np.array(0.5), "b": np.array(-0.25)},
    ),
    "a size of zero": ("double[0,3] x", "", "z = Constant<value_ints=[3,0]>() h = Reshape<allowzero=1>(x, z)", {}),
    "the second output of a loss": (
        "double[3,4] x, int64[3] i", "", f"a, h = {_LOSS}(x, i)", {"i": np.array([0, 3, 1])},
    ),
    "the weights of a loss": (
        "double[3,4] x, int64[3] i, double[4] w", "", f"h = {_LOSS}(x, i, w)",
        {"i": np.array([0, 3, 1]), "w": np.array([0.5, 1.5, 1.0, 2.0])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_a_gradient_is_the_slope(name: str) -> None:
    """With respect to every input of float64, along random directions."""
    inputs, outputs, nodes, given = GRAPHS[name]
    forward = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 24]> g ({inputs}) => (double l{", " * bool(outputs)}{outputs}) '
        f"{{ {nodes} q = Mul(h, h) s = Add(q, h) l = ReduceSum<keepdims=0>(s) }}"
    )
    numbers, values, sources = np.random.default_rng(3), {}, []
    for value in forward.graph.input:
        fixed = given.get(value.name)
        shape = fixed if isinstance(fixed, tuple) else [size.dim_value for size in value.type.tensor_type.shape.dim]
        values[value.name] = fixed if isinstance(fixed, np.ndarray) else numbers.normal(size=shape)
        if value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE:
            sources.append(value.name)
    model = ir.from_proto(forward)
    prepare(model)
    found = differentiate(model, "l", sources)
    assert list(found) == sources
    model.graph.outputs[:] = dict.fromkeys(found.values())
    arrays = dict(zip(model.graph.outputs, run_reference(ir.to_proto(model), values), strict=True))
    for source, gradient in found.items():
        assert arrays[gradient].shape == values[source].shape
        for direction, slope in directional_slopes(forward, values, source):
            assert float((arrays[gradient] * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_neither_a_source_nor_a_default_is_a_constant() -> None:
    """What is computed from them may be something else in the next step."""
    text = """<ir_version: 10, opset_import: ["" : 20]>
        g (float[4,6] x, int64[1] d = {1}) => (float l) <float w = {1.0}, int64[1] z = {0}, int64[1] m = {6}> {
        i = Cast<to=7>(w) j = Unsqueeze(i, z) a = Slice(x, z, m, j) e = Neg(d) b = Pad<mode="edge">(x, z, "", e)
        c = Slice(x, z, m, e) k = ReduceSum<keepdims=0>(c) v = Mul(k, w) l = Identity(v)
    }"""
    model: ir.Model = ir.from_onnx_text(text)
    differentiate(model, "l", ["x", "w"])
    known = {value.name: value.const_value for node in model.graph for value in node.outputs}
    assert known["i"] is known["j"] is known["e"] is None


def test_a_model_that_no_converter_takes_is_refused() -> None:
    """It names no opset of ONNX's own operators."""
    model: ir.Model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["ai.onnx.ml" : 3]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
    )
    with pytest.raises(GradientError, match="opset 0 and cannot be converted to 18"):
        prepare(model)
