"""Which edges of a graph a gradient does not go through: those of which the derivative is zero, and no others."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from onnxtool.autodiff import differentiate
from onnxtool.autodiff.rules import NON_DIFFERENTIABLE
from onnxtool.errors import GradientError
from tests.autodiff.test_engine import graph_of

_X = np.array([[0.7, -1.3, 2.4], [0.2, 5.1, -0.6]])
# What an operator reads, and attributes. Left out: what draws random numbers, and Upsample, which opset 10 removed.
_READ: dict[str, tuple[tuple[np.ndarray | None, ...], dict[str, object]]] = {
    "CastLike": ((_X, np.array(2.0)), {}),
    "OneHot": ((np.array([0.3, 2.3]), np.array(2.5), np.array([-1.0, 1.0])), {}),
    "Range": ((np.array(0.5), np.array(3.2), np.array(0.75)), {}),
    "Dropout": ((_X, np.array(0.25)), {}),
    "Resize": ((_X[None, None], None, np.array([1.0, 1.0, 2.0, 2.0], np.float32)), {"mode": "nearest"}),
}
_RANDOM = {"Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"}
_CHECKED = sorted({op_type for _, op_type in NON_DIFFERENTIABLE} - _RANDOM - {"Upsample"})


@pytest.mark.parametrize("op_type", _CHECKED)
def test_what_stops_a_gradient_has_a_slope_of_zero(op_type: str) -> None:
    """A little more or less at an input that stops does not change what the operator gives, to the last bit."""
    arrays, attributes = _READ.get(op_type, ((_X,), {}))
    for place in [place for place in range(len(arrays)) if place in NON_DIFFERENTIABLE["", op_type]]:
        array = arrays[place]
        if array is None:
            continue
        nudged = list(arrays)
        nudged[place] = (array + 1e-6).astype(array.dtype)
        expected, found = (_run(op_type, given, attributes) for given in (list(arrays), nudged))
        np.testing.assert_array_equal(found, expected)


def _run(op_type: str, arrays: list[np.ndarray | None], attributes: dict[str, object]) -> np.ndarray:
    names = ["" if array is None else f"x{place}" for place, array in enumerate(arrays)]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, arrays, strict=True)
        if array is not None
    ]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    result: np.ndarray = ReferenceEvaluator(model).run(None, feeds)[0]
    return result


_BETWEEN = {
    "a position": "p = ArgMax<axis=1>(x) y = Cast<to=1>(p)",
    "an integer": "p = Cast<to=7>(x) y = Cast<to=1>(p)",
    "a comparison": "z = Constant<value_float=0.0>() p = Greater(x, z) y = Cast<to=1>(p)",
    "a size": "p = Shape(x) y = Cast<to=1>(p)",
}


@pytest.mark.parametrize("between", _BETWEEN)
def test_integers_that_are_no_quantized_numbers_stop_a_gradient(between: str) -> None:
    """As in PyTorch, where they need no grad."""
    model = graph_of(f"g (float[2,3] x) => (float l) {{ {_BETWEEN[between]} l = ReduceSum<keepdims=0>(y) }}")
    assert differentiate(model, "l", ["x"]) == {}


_REFUSED = {
    "a product of integers": (
        "q = QuantizeLinear(w, s, z) [product] p = MatMulInteger(i, q) f = Cast<to=1>(p) y = Mul(f, s)",
        "MatMulInteger (node product); QuantizeLinear",
    ),
    "numbers converted": (
        "q = QuantizeLinear(w, s, z) [conversion] f = Cast<to=1>(q) y = Mul(f, s)",
        "no gradient for QuantizeLinear",
    ),
    "an operator that nobody knows": (
        "[black] q = custom.Box(w) f = Cast<to=1>(q) y = Mul(f, s)",
        "no gradient for Box (node black)",
    ),
    "what ONNX defines by quantizing": (
        "q, a, b = DynamicQuantizeLinear(w) [product] p = MatMulInteger(i, q, z, b) f = Cast<to=1>(p) y = Mul(f, a)",
        "MatMulInteger (node product)",
    ),
    "numbers rounded": (
        "[rounds] q = QuantizeLinear(w, s, z) d = DequantizeLinear(q, s, z) y = Identity(d)",
        "QuantizeLinear (node rounds)",
    ),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_quantized_numbers_that_have_no_gradient_are_refused(kind: str) -> None:
    """The gradient would be missing without a word; the parameter to freeze is in the hint."""
    text, message = _REFUSED[kind]
    model: ir.Model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 21, "custom" : 1]>
        g (uint8[2,4] i, float[4,3] w, float[4] free) => (float l)
        <float s = {{0.5}}, uint8 z = {{128}}> {{
        {text}
        n = ReduceSum<keepdims=0>(y)
        m = ReduceSum<keepdims=0>(free)
        l = Add(n, m)
    }}""")
    for node in model.graph:
        if node.domain == "custom":
            node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.UINT8, ir.Shape([4, 3])
    with pytest.raises(GradientError) as caught:
        differentiate(model, "l", ["w", "free"])
    assert message in caught.value.message
    assert "behind it: w; or" in caught.value.hint or "behind them: w; or" in caught.value.hint


def test_an_operator_that_nobody_knows_is_refused_though_nothing_is_known_behind_it() -> None:
    """Type inference ends there; what comes after is no trouble of its own."""
    text = """<ir_version: 10, opset_import: ["" : 20, "custom" : 1]> g (float[3] w, float[3] x) => (float l) {
        [black] a = custom.Box(w)
        b = Einsum<equation="i,i->i">(a, x)
        c = Sigmoid(b)
        l = ReduceSum<keepdims=0>(c)
    }"""
    with pytest.raises(GradientError) as caught:
        differentiate(ir.from_onnx_text(text), "l", ["w"])
    assert caught.value.message == "no gradient for Box (node black)"
    with pytest.raises(GradientError, match=r"Einsum \(node b\): the dtype of b cannot be inferred"):
        differentiate(ir.from_onnx_text(text), "l", ["x"])


def test_a_factor_that_nobody_knows_does_not_stop_the_gradient_of_the_other() -> None:
    """Both factors of a product have one dtype, so that the product has it, too."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 20, "custom" : 1]>
        g (float[3] w, float[3] x) => (float l) {
            a = custom.Box(w)
            b = Mul(a, x)
            l = ReduceSum<keepdims=0>(b)
        }""")
    (gradient,) = differentiate(model, "l", ["x"]).values()
    assert gradient.dtype == ir.DataType.FLOAT
    assert gradient.shape == (3,)
