"""What differentiation does to the forward graph: it may be computed otherwise, and its results stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool.autodiff import differentiate, prepare
from onnxtool.errors import GradientError
from tests.autodiff.cases import CASES, Case
from tests.autodiff.gradients import LOSS, feeds, forward_model, gradient_model, run_onnxruntime, run_reference
from tests.autodiff.test_engine import graph_of

_REPLACED = tuple(case for case in CASES if case.op_type in ("BatchNormalization", "SoftmaxCrossEntropyLoss"))


@pytest.mark.parametrize("case", _REPLACED, ids=[case.name for case in _REPLACED])
def test_a_node_that_is_replaced_has_the_same_outputs(case: Case) -> None:
    """The definition, as onnx.reference computes it, and what the gradient graph computes instead."""
    forward = forward_model(case, np.float64, dynamic=False)
    expected = run_reference(forward, feeds(case, forward, np.float64))
    model, _ = gradient_model(forward, case.wanted)
    found = run_reference(model, feeds(case, model, np.float64))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-11)


def test_a_loss_without_any_label_has_a_gradient_of_zero() -> None:
    """The loss is not a number, as in PyTorch, and the weights stay where they are."""
    model = graph_of("""g (float[2,3] x, int64[2] y) => (float l) {
        l = SoftmaxCrossEntropyLoss<ignore_index=-100>(x, y)
    }""")
    found = differentiate(model, "l", ["x"])
    assert [value.name for value in model.graph.outputs] == ["l"]  # whatever computes it now
    model.graph.outputs.append(found["x"])
    loss, gradient = run_onnxruntime(
        ir.to_proto(model), {"x": np.ones((2, 3), np.float32), "y": np.full(2, -100, np.int64)}
    )
    assert np.isnan(loss)
    assert gradient.tolist() == [[0.0] * 3] * 2


def _dropped(text: str, **inputs: NDArray[Any]) -> list[NDArray[Any]]:
    """Run a Dropout of x with `sum(y * w)` as its loss; return y and the gradient."""
    model = graph_of(text)
    found = differentiate(model, "l", ["x"])
    value = next(node.outputs[0] for node in model.graph if node.op_type == "Dropout")
    model.graph.outputs[:] = [value, found["x"]]
    return run_onnxruntime(ir.to_proto(model), inputs)


@pytest.mark.parametrize("training", [False, True])
def test_dropout_lets_pass_what_it_let_pass_before(training: bool) -> None:
    """Each element of the gradient is scaled like that of the output, also where the mode is an input."""
    numbers = np.random.default_rng(1)
    x, w = (numbers.uniform(1, 2, 1000).astype(np.float32) for _ in range(2))
    y, gradient = _dropped(
        """g (float[n] x, float[n] w, bool t) => (float l) <float r = {0.25}> {
            y = Dropout<seed=3>(x, r, t)
            a = Mul(y, w)
            l = ReduceSum<keepdims=0>(a)
        }""",
        x=x, w=w, t=np.array(training),
    )  # fmt: skip
    assert bool((y == 0).any()) == training
    np.testing.assert_allclose(gradient * x, y * w, rtol=1e-6)


def test_dropout_of_everything_has_a_gradient_of_zero() -> None:
    """A ratio close to one scales by much, and no element is not a number."""
    y, gradient = _dropped(
        """g (float[4] x) => (float l) <float r = {0.9999999}, bool t = {1}> {
            y = Dropout<seed=3>(x, r, t)
            l = ReduceSum<keepdims=0>(y)
        }""",
        x=np.ones(4, np.float32),
    )
    assert not np.isnan(gradient).any()
    np.testing.assert_array_equal(gradient, y)


def test_a_batch_normalization_that_trains_is_not_folded_into_a_convolution() -> None:
    """Onnxruntime folds one after a convolution of constant weights with the running statistics."""
    numbers = np.random.default_rng(2)
    x, w = numbers.normal(size=(4, 2, 5)), numbers.normal(size=(3, 2, 3))
    model = graph_of(
        """g (float[4,2,5] x) => (float[4,3,3] y) {
        c = Conv(x, w)
        y, m, v = BatchNormalization<training_mode=1>(c, s, b, s0, s1)
        a = Mul(y, y)
        l = ReduceSum<keepdims=0>(a)
    }""".replace("=> (float[4,3,3] y)", "=> (float l)")
    )
    for name, array in {"w": w, "s": np.ones(3), "b": np.ones(3), "s0": np.zeros(3), "s1": np.ones(3)}.items():
        tensor = ir.tensor(array.astype(np.float32), name=name)
        read = next(value for node in model.graph for value in node.inputs if value and value.name == name)
        read.const_value, read.dtype, read.shape = tensor, tensor.dtype, ir.Shape(array.shape)
        model.graph.register_initializer(read)
    differentiate(model, "l", ["s"])
    loss = run_onnxruntime(ir.to_proto(model), {"x": x.astype(np.float32)})[0]
    hidden = torch.nn.functional.conv1d(torch.tensor(x), torch.tensor(w))
    expected = (torch.nn.functional.batch_norm(hidden, None, None, training=True) + 1).square().sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_running_statistics_are_still_computed() -> None:
    """Those that a training BatchNormalization yields are the definition's, under their names."""
    model = graph_of("""g (float[4,3,5] x, float[3] s, float[3] b, float[3] m0, float[3] v0)
                        => (float l, float[3] m, float[3] v) {
        y, m, v = BatchNormalization<training_mode=1, momentum=0.75>(x, s, b, m0, v0)
        l = ReduceSum<keepdims=0>(y)
    }""")
    numbers = np.random.default_rng(4)
    inputs = {name: numbers.uniform(1, 2, 3).astype(np.float32) for name in ("s", "b", "m0", "v0")}
    inputs["x"] = numbers.normal(size=(4, 3, 5)).astype(np.float32)
    expected = run_reference(ir.to_proto(model), inputs)
    differentiate(model, "l", ["s"])
    assert [value.name for value in model.graph.outputs] == ["l", "m", "v"]
    found = run_onnxruntime(ir.to_proto(model), inputs)
    for one, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_chunks_of_a_sequence_become_pieces() -> None:
    """PyTorch's exporter writes SplitToSequence and SequenceAt for a split."""
    model = graph_of("""g (float[2,5] x) => (float l) <int64 two = {2}, int64 first = {0}, int64 last = {-1}> {
        s = SplitToSequence<axis=1>(x, two)
        a = SequenceAt(s, first)
        b = SequenceAt(s, last)
        c = Mul(a, a)
        d = Mul(c, b)
        l = ReduceSum<keepdims=0>(d)
    }""")
    found = differentiate(model, "l", ["x"])
    model.graph.outputs[:] = found.values()
    x = np.random.default_rng(3).normal(size=(2, 5)).astype(np.float32)
    tensor = torch.tensor(x, requires_grad=True)
    first, _, last = tensor.split(2, 1)
    (first * first * last).sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(run_onnxruntime(ir.to_proto(model), {"x": x})[0], tensor.grad.numpy(), rtol=1e-6)


def test_a_sequence_that_is_read_otherwise_is_refused() -> None:
    """One clear error names the operator."""
    model = graph_of("""g (float[2,5] x, int64 i) => (float l) <int64 two = {2}> {
        s = SplitToSequence<axis=1>(x, two)
        a = SequenceAt(s, i)
        l = ReduceSum<keepdims=0>(a)
    }""")
    with pytest.raises(GradientError, match="no gradient for SequenceAt"):
        differentiate(model, "l", ["x"])


def test_an_old_model_is_converted_and_its_functions_are_inlined() -> None:
    """Without that it is refused, with the way out."""
    text = """<ir_version: 8, opset_import: ["" : 14, "own" : 1]>
    g (float[2,3] x) => (float l) {
        a = own.twice(x)
        b = ReduceMean<axes=[1]>(a)
        l = ReduceSum<keepdims=0>(b)
    }
    <domain: "own", opset_import: ["" : 14]>
    twice (x) => (y) { y = Add(x, x) }
    """
    model = ir.from_onnx_text(text)
    with pytest.raises(GradientError) as caught:
        differentiate(model, LOSS, ["x"])
    assert caught.value.message == "the model is of opset 14, and gradients need 18"
    prepare(model)
    found = differentiate(model, "l", ["x"])
    model.graph.outputs[:] = found.values()
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    assert run_onnxruntime(proto, {"x": np.ones((2, 3), np.float32)})[0] == pytest.approx(2 / 3)


@pytest.mark.filterwarnings("ignore")  # of the conversion by onnx, which is chosen
@pytest.mark.parametrize("opset", [13, 17])
def test_an_old_opset_is_converted_and_parameters_keep_their_order(opset: int) -> None:
    """Also large ones, which the conversion takes out for a while: a buffer of all parameters is in this order."""
    shapes = {"w1": (40, 64), "b1": (64,), "w2": (64, 3), "b2": (3,)}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Gemm", ["h", "w2", "b2"], ["g"]),
        helper.make_node("ReduceMean", ["g"], ["y"], axes=[1]),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    model: ir.Model = ir.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    )
    prepare(model)
    assert list(model.graph.initializers)[:4] == list(shapes)


def test_a_function_of_another_opset_is_refused_and_one_that_misfits_its_rule_as_well() -> None:
    """Both by name, where a library or a rule would end in an error of its own."""
    text = """<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
    g (float[2,3] x) => (float l) {
        a = own.twice(x)
        l = ReduceSum<keepdims=0>(a)
    }
    <domain: "own", opset_import: ["" : 17]>
    twice (x) => (y) { y = Add(x, x) }
    """
    with pytest.raises(GradientError, match="a function of the model cannot be inlined: Opset mismatch"):
        prepare(ir.from_onnx_text(text))
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[2,3] x) => (float l) {
        a = Transpose<perm=[0,7]>(x)
        l = ReduceSum<keepdims=0>(a)
    }
    """
    with pytest.raises(GradientError, match="its attributes and shapes do not fit each other") as caught:
        differentiate(ir.from_onnx_text(text), "l", ["x"])
    assert caught.value.message.startswith("no gradient for Transpose")
