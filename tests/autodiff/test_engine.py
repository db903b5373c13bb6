"""What the engine does with whole graphs: which gradients there are, what is refused, and what is left as it was."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from onnxtool.autodiff import differentiate
from onnxtool.autodiff.builder import Builder
from onnxtool.errors import GradientError
from tests.autodiff.cases import CASES
from tests.autodiff.gradients import forward_model, gradient_model, run_onnxruntime

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
_X = np.array([[1.0, -2.0, 3.0]], np.float32)


def graph_of(text: str) -> ir.Model:
    model: ir.Model = ir.from_onnx_text(HEADER + text)
    return model


def gradients(model: ir.Model, output: str, names: list[str], **inputs: object) -> dict[str, np.ndarray]:
    """Differentiate, run on two threads, and return the gradients by name."""
    found = differentiate(model, output, names)
    values = list(dict.fromkeys(found.values()))
    model.graph.outputs[:] = values
    results = run_onnxruntime(ir.to_proto(model), {name: np.asarray(value) for name, value in inputs.items()})
    by_value = dict(zip(values, results, strict=True))
    return {name: by_value[value] for name, value in found.items()}


def test_gradients_of_a_value_that_is_read_three_times_are_added() -> None:
    """The derivative of x + x x + x is 2 + 2 x."""
    model = graph_of("g (float[1,3] x) => (float l) { a = Mul(x, x) b = Sum(x, a, x) l = ReduceSum<keepdims=0>(b) }")
    assert gradients(model, "l", ["x"], x=_X)["x"].tolist() == (2 + 2 * _X).tolist()


def test_a_value_in_the_middle_has_a_gradient() -> None:
    """It is not only inputs and weights that may be asked for."""
    model = graph_of("g (float[1,3] x) => (float l) { a = Neg(x) b = Mul(a, a) l = ReduceSum<keepdims=0>(b) }")
    assert gradients(model, "l", ["a"], x=_X)["a"].tolist() == (-2 * _X).tolist()


def test_the_loss_may_have_axes_of_size_one() -> None:
    """A loss of shape [1, 1] is one number."""
    model = graph_of("g (float[1,3] x) => (float[1,1] l) { l = ReduceSum(x) }")
    assert gradients(model, "l", ["x"], x=_X)["x"].tolist() == [[1.0, 1.0, 1.0]]


def test_what_the_loss_does_not_depend_on_has_no_gradient() -> None:
    """PyTorch says None, and here the name is missing."""
    model = graph_of(
        "g (float[3] x, float[3] y, float[3] z) => (float l) { l = ReduceSum<keepdims=0>(x) f = Floor(z) }"
    )
    assert set(differentiate(model, "l", ["x", "y", "z"])) == {"x"}


def test_steps_stop_a_gradient() -> None:
    """Through Floor nothing comes back, and nothing is said about it."""
    model = graph_of('g (float[3] x) => (float l) { a = Floor(x) b = Einsum<equation="i->">(a) l = Identity(b) }')
    assert differentiate(model, "l", ["x"]) == {}


def test_dead_gradients_are_not_built() -> None:
    """A product with a frozen weight asks for one product more, not two."""
    text = """g (float[2,3] x, float[3,4] w, float[4,5] v) => (float l) {
        a = MatMul(x, w)
        b = MatMul(a, v)
        l = ReduceSum<keepdims=0>(b)
    }"""
    both, first, last = graph_of(text), graph_of(text), graph_of(text)
    differentiate(both, "l", ["w", "v"])
    differentiate(first, "l", ["w"])
    differentiate(last, "l", ["v"])
    assert [_products(model) for model in (both, first, last)] == [3, 2, 1]


def _products(model: ir.Model) -> int:
    return sum(node.op_type == "Gemm" for node in model.graph)


def test_two_rules_share_an_expression() -> None:
    """Both gradients of a LayerNormalization read its normalized values, which are computed once."""
    text = """g (float[2,3] x, float[3] w) => (float l) {
        a = LayerNormalization(x, w)
        b = Mul(a, a)
        l = ReduceSum<keepdims=0>(b)
    }"""
    model = graph_of(text)
    differentiate(model, "l", ["x", "w"])
    made = [(node.op_type, *(value and value.name for value in node.inputs)) for node in model.graph]
    assert len(made) == len({(*one, str(node.attributes)) for one, node in zip(made, model.graph, strict=True)})


def test_all_unsupported_operators_are_named_at_once() -> None:
    """The message lists the nodes with their reasons, the hint what to freeze."""
    model = graph_of("""g (float[2,3] x, float[3] w, float[3] v, float[3] u) => (float l) {
        [first] a = Det2(x, w)
        [second] b = MaxPool<kernel_shape=[1], storage_order=1>(a)
        [third] c = NonMaxSuppression2(v)
        d = Sum(b, c, u)
        l = ReduceSum<keepdims=0>(d)
    }""")
    model.graph.inputs[0].dtype = ir.DataType.FLOAT
    for value in (node.outputs[0] for node in model.graph):
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([2, 3])
    model.graph.outputs[0].shape = ir.Shape([])
    before = [node.name for node in model.graph]
    with pytest.raises(GradientError) as caught:
        differentiate(model, "l", ["w", "v", "u"])
    assert caught.value.message == (
        "no gradient for Det2 (node first); MaxPool (node second): its indices are in column-major order; "
        "NonMaxSuppression2 (node third)"
    )
    assert caught.value.hint.startswith("freeze the parameters behind them: w, v; or add a rule")
    assert [node.name for node in model.graph] == before


def test_a_node_whose_rank_is_not_known_is_refused() -> None:
    """A BatchNormalization cannot be computed otherwise then, and the error says why."""
    model = graph_of("""g (float[] x, float[3] s, float[3] b, float[3] m0, float[3] v0) => (float l) {
        [norm] y, m, v = BatchNormalization<training_mode=1>(x, s, b, m0, v0)
        l = ReduceSum<keepdims=0>(y)
    }""")
    with pytest.raises(GradientError, match=r"BatchNormalization \(node norm\): the rank of x is not known"):
        differentiate(model, "l", ["s"])


@pytest.mark.parametrize("read", ["x", "w"])
def test_a_gradient_through_a_branch_is_refused(read: str) -> None:
    """By the node, also where only one branch depends on the value, and the graph stays as it was."""
    model = graph_of("""g (bool c, float[3] x, float[3] w) => (float l) {
        [choice] a = If<then_branch=then () => (float[3] t) { t = Mul(x, w) },
                        else_branch=other () => (float[3] e) { e = Abs(x) }>(c)
        l = ReduceSum<keepdims=0>(a)
    }""")
    with pytest.raises(GradientError, match=r"no gradient for If \(node choice\)"):
        differentiate(model, "l", [read])
    assert len(model.graph) == 2


@pytest.mark.parametrize(
    "node",
    [
        "Loop<body = s (int64 i, bool c, float[2] b) => (bool d, float[2] a) { d = Not(c) a = Mul(b, w) }>(m, t, z)",
        "Scan<num_scan_inputs=0, body = s (float[2] b) => (float[2] a) { a = Mul(b, w) }>(z)",
    ],
    ids=["Loop", "Scan"],
)
def test_a_gradient_through_steps_is_refused(node: str) -> None:
    """Also of a value that the body reads from outside."""
    model = graph_of(f"""g (int64 m, float[2] z, float[2] w) => (float l) {{
        t = Constant<value = bool {{1}}>() [steps] h = {node} l = ReduceSum<keepdims=0>(h)
    }}""")
    with pytest.raises(GradientError, match=rf"no gradient for {node[:4]} \(node steps\)"):
        differentiate(model, "l", ["w"])


def test_if_beside_the_gradient_is_no_trouble() -> None:
    """What does not depend on a weight may be computed in any way."""
    model = graph_of("""g (bool c, float[3] x, float[3] w) => (float l) {
        a = If<then_branch=then () => (float[3] t) { t = Neg(x) },
               else_branch=other () => (float[3] e) { e = Abs(x) }>(c)
        b = Mul(a, w)
        l = ReduceSum<keepdims=0>(b)
    }""")
    found = gradients(model, "l", ["w"], c=True, x=np.ones(3, np.float32), w=np.ones(3, np.float32))
    assert found["w"].tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("text", "output", "name", "message"),
    [
        ("g (float[3] x) => (float[3] l) { l = Neg(x) }", "l", "x", "the output l has the shape [3]"),
        ("g (float[3] x) => (float l) { l = ReduceSum<keepdims=0>(x) }", "loss", "x", "no value called loss"),
        ("g (int64[3] x) => (int64 l) { l = ReduceSum<keepdims=0>(x) }", "l", "x", "the output l is int64"),
        ("g (int64[3] x) => (float l) { f = Cast<to=1>(x) l = ReduceSum<keepdims=0>(f) }", "l", "x", "the value x is"),
    ],
)  # fmt: skip
def test_what_cannot_be_differentiated_is_said(text: str, output: str, name: str, message: str) -> None:
    """One clear error each."""
    with pytest.raises(GradientError) as caught:
        differentiate(graph_of(text), output, [name])
    assert message in caught.value.message


def test_a_misspelled_name_gets_the_nearest() -> None:
    """The hint says what may have been meant."""
    model = graph_of("g (float[3] weight) => (float l) { l = ReduceSum<keepdims=0>(weight) }")
    with pytest.raises(GradientError) as caught:
        differentiate(model, "l", ["wieght"])
    assert caught.value.hint == "did you mean weight?"


def test_a_second_call_adds_to_the_first() -> None:
    """Names that are there already are not taken again."""
    model = graph_of("g (float[1,3] x) => (float l) { a = Mul(x, x) l = ReduceSum<keepdims=0>(a) }")
    differentiate(model, "l", ["x"])
    assert gradients(model, "l", ["x"], x=_X)["x"].tolist() == (2 * _X).tolist()


def test_the_graph_of_a_model_may_be_passed() -> None:
    """A graph alone serves as well."""
    model = graph_of("g (float[1,3] x) => (float l) { a = Mul(x, x) l = ReduceSum<keepdims=0>(a) }")
    assert set(differentiate(model.graph, "l", ["x"])) == {"x"}


def test_gradients_keep_the_dtype() -> None:
    """Constants of a rule are of the dtype of what they are combined with."""
    model = graph_of("g (float16[3] x) => (float16 l) { a = Sigmoid(x) l = ReduceSum<keepdims=0>(a) }")
    found = gradients(model, "l", ["x"], x=np.zeros(3, np.float16))
    assert found["x"].dtype == np.float16
    assert found["x"].tolist() == [0.25, 0.25, 0.25]


def test_statistics_of_a_higher_precision_are_converted() -> None:
    """A LayerNormalization of float16 has a mean of float32."""
    model = graph_of("""g (float16[2,4] x, float16[4] w, float16[4] v) => (float16 l) {
        a = LayerNormalization(x, w, v)
        b = Mul(a, a)
        l = ReduceSum<keepdims=0>(b)
    }""")
    x = np.array([[1, 2, 3, 4], [5, 7, 9, 12]])
    found = gradients(model, "l", ["x", "w", "v"], **{name: np.float16(value) for name, value in _ones(x).items()})
    tensors = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in _ones(x).items()}
    torch.nn.functional.layer_norm(tensors["x"], (4,), tensors["w"], tensors["v"]).square().sum().backward()
    for name, gradient in found.items():
        assert gradient.dtype == np.float16
        np.testing.assert_allclose(gradient, tensors[name].grad, atol=0.02)  # the unit of float16 is 1e-3


def _ones(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"x": x, "w": np.ones(4), "v": np.ones(4)}


def test_gradient_graphs_consist_of_standard_operators_of_opset_18() -> None:
    """Whatever the operator: what is added is valid ONNX, of no other domain, and never a ScatterND that adds."""
    for case in CASES:
        if not onnx.defs.has(case.op_type, case.domain) or case.domain:
            continue
        old = onnx.defs.get_schema(case.op_type, 28, case.domain).since_version
        lowest = 18 if onnx.defs.has(case.op_type, 18, "") else min(old, case.opset)
        forward = (
            forward_model(case, np.float32, dynamic=True)
            if not case.fixed
            else forward_model(case, np.float32, dynamic=False)
        )
        forward.opset_import[0].version = lowest
        model, _ = gradient_model(forward, case.wanted)
        onnx.checker.check_model(model, full_check=True)
        added = [node for node in model.graph.node if node.name.startswith("gradient/")]
        assert {node.domain for node in added} <= {""}
        assert not any(node.op_type == "ScatterND" and node.attribute for node in added), case.name


@pytest.mark.parametrize("rows", [100, 1000])
def test_rows_of_one_index_are_added_whatever_the_threads(rows: int) -> None:
    """An embedding of which thousands of tokens read the same few rows, on four threads."""
    numbers = np.random.default_rng(5)
    indices = numbers.integers(-4, 4, 5000)
    slopes = numbers.integers(-8, 8, (5000, 64)).astype(np.float32)
    model = graph_of(f"""g (float[{rows},64] w, int64[n] i, float[n,64] s) => (float l) {{
        a = Gather(w, i)
        b = Mul(a, s)
        l = ReduceSum<keepdims=0>(b)
    }}""")
    found = differentiate(model, "l", ["w"])
    model.graph.outputs[:] = found.values()
    expected = np.zeros((rows, 64), np.float32)
    np.add.at(expected, indices, slopes)  # whole numbers: the order of the additions does not matter
    inputs: dict[str, np.ndarray] = {"w": np.zeros((rows, 64), np.float32), "i": indices, "s": slopes}
    for _ in range(3):
        result = run_onnxruntime(ir.to_proto(model), inputs, threads=4)[0]
        np.testing.assert_array_equal(result, expected)


def test_a_later_builder_gives_no_node_the_name_of_another() -> None:
    """Onnxruntime refuses two nodes of one name, and the name of a node is not that of its output."""
    model = graph_of("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    for _ in range(2):
        build = Builder(model.graph)
        build.op("Neg", build.op("Abs", build.tensor(model.graph.inputs[0])))
        build.finish()
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)


def test_a_cut_between_transposes_has_a_gradient_that_runs() -> None:
    """Onnxruntime moves a Transpose over a Pad, and does not see that its sizes are those of some axes."""
    model = graph_of("""g (float[1,2,3,4] x) => (float l)
        <int64[1] from = {1}, int64[1] to = {3}, int64[1] axis = {3}> {
        t = Transpose<perm=[0, 2, 1, 3]>(x)
        s = Slice(t, from, to, axis)
        u = Transpose<perm=[0, 2, 1, 3]>(s)
        v = Mul(u, u)
        l = ReduceSum<keepdims=0>(v)
    }""")
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    expected = np.zeros_like(x)
    expected[..., 1:3] = 2 * x[..., 1:3]
    np.testing.assert_array_equal(gradients(model, "l", ["x"], x=x)["x"], expected)
