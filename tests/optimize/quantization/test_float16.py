"""Half precision inside, and the same inputs and outputs; values that float16 cannot hold stay in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from onnxtool import OptimizeOptions, guarded, optimize_model
from onnxtool.errors import PassError
from onnxtool.model_file.weights import write_inline
from onnxtool.optimize.quantization.float16 import beyond, measure_ranges, to_float16
from tests.optimize.passes.builders import Arrays, apply, assert_left_alone, build, normal, ragged_feeds, run
from tests.workshop import Workshop


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_the_numbers_are_those_of_eleven_bits(workshop: Workshop, exporter: str) -> None:
    """On real tokens; hidden states are about 3 large, and each layer rounds anew."""
    path, feeds = workshop.exported("tiny-encoder", exporter=exporter), ragged_feeds()
    expected = run(ir.load(path), feeds)
    model = ir.load(path)
    outcome = apply(to_float16(), model)
    assert outcome.num_changes > 0
    found = run(outcome.model, feeds)
    real = feeds["attention_mask"].astype(bool)
    np.testing.assert_allclose(found[0][real], expected[0][real], atol=2e-2, rtol=0)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-2, rtol=0)
    assert_left_alone(to_float16(), outcome.model, "no weight of two axes or more is float32")  # none is left


def test_inputs_and_outputs_keep_their_types_and_the_weights_are_halved(workshop: Workshop, tmp_path: Path) -> None:
    """Whoever calls the model calls it as before."""
    path = workshop.exported("tiny-encoder", exporter="torchscript")
    model = apply(to_float16(), ir.load(path)).model
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT}
    ir.save(ir.external_data.load_to_model(model), tmp_path / "half.onnx")
    assert (tmp_path / "half.onnx").stat().st_size < 0.53 * path.stat().st_size


def test_angles_of_far_positions_keep_their_digits() -> None:
    """A position of thousands has no half steps left in float16, and its cosine is another number."""
    body = "a = Mul(x, f) c = Cos(a) y = MatMul(c, w)"
    model = build(
        f"g (float[N, 4] x) => (float[N, 4] y) {{ {body} }}",
        {"f": np.array([1.0, 0.3, 0.1, 0.03], np.float32), "w": np.eye(4, dtype=np.float32)},
    )
    feeds = {"x": np.full((2, 4), 3001.7, np.float32)}
    (expected,) = run(model, feeds)
    (found,) = run(apply(to_float16(), model).model, feeds)
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=0)


def test_a_net_above_an_integer_is_halved_and_so_is_one_of_which_only_the_size_is_read() -> None:
    """Only what is behind the last matrix is rounded, and a shape has no digits to lose."""
    body = "h = MatMul(x, w) s = Shape(h) t = Cast<to = 1>(s) u = Cast<to = 7>(t) v = Cast<to = 6>(h) y = Relu(h)"
    graph = f"g (float[N, 4] x) => (float[N, 4] y, int64[2] u, int32[N, 4] v) {{ {body} }}"
    converted = apply(to_float16(), build(graph, {"w": np.eye(4, dtype=np.float32)})).model
    assert [node.outputs[0].dtype for node in converted.graph if node.op_type == "MatMul"] == [ir.DataType.FLOAT16]


def test_a_weight_times_an_inverse_size_is_of_common_size_again() -> None:
    """A normalization with its scale folded in, as jax and TensorFlow write it: the layer behind it is halved."""
    norm = "q = Mul(h, h) m = ReduceMean<axes = [1]>(q) a = Add(m, e) r = Sqrt(a) i = Reciprocal(r) j = Mul(i, f)"
    body = f"h = MatMul(x, w) {norm} n = Mul(h, j) y = MatMul(n, v)"
    weights = {"w": normal(4, 4), "v": normal(4, 4, seed=1), "e": np.array(1e-6, np.float32), "f": normal(4, seed=2)}
    converted = apply(to_float16(), build(f"g (float[N, 4] x) => (float[N, 4] y) {{ {body} }}", weights)).model
    assert [node.outputs[0].dtype for node in converted.graph if node.op_type == "MatMul"] == [ir.DataType.FLOAT16] * 2


def test_numbers_that_become_integers_keep_their_digits() -> None:
    """Half of 4,098 positions are 2,049, which float16 has not."""
    body = "h = MatMul(x, w) s = Cast<to = 1>(n) p = Mul(s, f) q = Cast<to = 7>(p) c = Cast<to = 1>(q) y = Add(h, c)"
    model = build(
        f"g (float[N, 4] x, int64[1] n) => (float[N, 4] y) {{ {body} }}",
        {"w": np.eye(4, dtype=np.float32), "f": np.array(0.5, np.float32)},
    )
    converted = apply(to_float16(), model).model
    (product,) = [node for node in converted.graph if node.op_type == "Mul"]
    assert product.outputs[0].dtype != ir.DataType.FLOAT16


def test_branches_read_float32_of_what_is_computed_in_half() -> None:
    """Nothing inside of them is converted, neither what they read nor what they make of it."""
    branches = [
        f"b{number} () => (float[N, 4] z) {{ z = {body} }}" for number, body in enumerate(("Add(y, y)", "Exp(y)"))
    ]
    body = f"y = MatMul(x, w) z = If<then_branch = {branches[0]}, else_branch = {branches[1]}>(c) o = MatMul(z, w)"
    weights = {"w": np.diag(np.array([1.0, 0.3, 0.1, 0.03], np.float32))}
    model = build(f"g (float[N, 4] x, bool c) => (float[N, 4] o) {{ {body} }}", weights)
    for choice in (True, False):
        feeds = {"x": normal(2, 4), "c": np.array(choice)}
        converted = apply(to_float16(), model.clone())
        assert converted.num_changes == 2
        np.testing.assert_allclose(run(converted.model, feeds)[0], run(model, feeds)[0], atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    "body",
    [
        "s = Shape(y) z = ConstantOfShape(s) o = Add(y, z)",
        "z = EyeLike<dtype = 1>(y) o = Add(y, z)",
        "a, m = LayerNormalization(y, g) o = Sub(a, m)",
        "a, m = LayerNormalization(y, g) o = Mul(a, a)",
        "q = QuantizeLinear(y, s, z) d = DequantizeLinear(q, s, z) o = Add(d, d)",
        "q, qs, qz = DynamicQuantizeLinear(y) o = DequantizeLinear(q, qs, qz)",
    ],
    ids=["fill by default", "dtype", "mean of a normalization", "unread mean", "quantized", "dynamically quantized"],
)
def test_what_is_of_one_dtype_meets_what_is_half(body: str) -> None:
    """Operators that say their dtype, have one by default, or know float32 alone: the file loads and is right."""
    constants = "<float s = {0.05}, uint8 z = {128}>" if "(y, s, z)" in body else ""
    weights: Arrays = {"w": normal(4, 4, seed=1)} | ({"g": normal(4, seed=2)} if " g)" in body else {})
    model = build(f"g (float[N, 4] x) => (float[N, 4] o) {constants} {{ y = MatMul(x, w) {body} }}", weights)
    feeds = {"x": normal(2, 4, seed=3)}
    (expected,) = run(model, feeds)
    converted = apply(to_float16(), model)
    assert converted.num_changes > 0
    np.testing.assert_allclose(run(converted.model, feeds)[0], expected, atol=6e-2, rtol=0)  # one step of the quantized


def test_operators_without_a_float16_type_keep_what_they_take() -> None:
    """DynamicQuantizeLSTM knows float32 alone, by its schema; what comes before it is halved."""
    weights: Arrays = {
        "w": normal(4, 4, seed=1),
        "u": normal(3, 4, seed=2),
        "i": np.random.default_rng(3).integers(-127, 127, (1, 4, 12), np.int8),
        "r": np.random.default_rng(4).integers(-127, 127, (1, 3, 12), np.int8),
        "s": np.full((1, 12), 0.01, np.float32),
        "z": np.zeros((1, 12), np.int8),
    }
    lstm = "com.microsoft.DynamicQuantizeLSTM<hidden_size = 3>(h, i, r, , , , , , s, z, s, z)"
    body = f"h = MatMul(x, w) l = {lstm} q = Squeeze<axes = [1]>(l) y = MatMul(q, u)"
    model = build(f"g (float[S, 2, 4] x) => (float[S, 2, 4] y) {{ {body} }}", weights, opset=11)
    feeds = {"x": normal(5, 2, 4, seed=5)}
    (expected,) = run(model, feeds)
    converted = apply(to_float16(), model).model
    assert [node.op_type for node in converted.graph][:2] == ["Cast", "MatMul"]
    np.testing.assert_allclose(run(converted, feeds)[0], expected, atol=2e-2, rtol=0)


def test_operators_that_no_schema_describes_stay_in_float32() -> None:
    """A function of the model has a body of its own, whose constants are float32."""
    text = """<ir_version: 9, opset_import: ["": 17, "own": 1]>
    g (float[N, 4] x) => (float[N, 4] y) { h = MatMul(x, w) y = own.Half(h) }
    <domain: "own", opset_import: ["": 17]> Half (a) => (b) { c = Constant<value_float = 0.5>() b = Mul(a, c) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    feeds = {"x": normal(2, 4)}
    converted = apply(to_float16(), ir.from_proto(proto)).model
    np.testing.assert_allclose(run(converted, feeds)[0], feeds["x"] / 2, atol=2e-3, rtol=0)


def compute(model: ir.Model, feeds: Arrays) -> NDArray[np.float32]:
    """Run a model as it says, operator by operator; onnxruntime's CPU kernels compute float16 in float32."""
    with np.errstate(all="ignore"):
        found: NDArray[np.float32] = ReferenceEvaluator(ir.to_proto(ir.external_data.load_to_model(model))).run(
            None, dict(feeds)
        )[0]
    return found


# A row of padding alone, small numbers, common ones, and large ones that float16 holds.
ROWS = np.stack([np.zeros(4), 1e-5 * normal(4, seed=1), normal(4, seed=2), 300 * normal(4, seed=3)]).astype(np.float32)
MASK = np.array([[1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]], np.float32)


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("n = ReduceL2<axes = [1]>(h) g = Clip(n, e) y = Div(h, g)", {"e": 1e-12}),
        ("n = ReduceL2<axes = [1]>(h) g = Max(n, e) y = Div(h, g)", {"e": 1e-9}),
        ("q = Mul(h, h) m = ReduceMean<axes = [1]>(q) a = Add(m, e) r = Sqrt(a) y = Div(h, r)", {"e": 1e-12}),
        (
            "q = Pow(h, p) m = ReduceMean<axes = [1]>(q) a = Add(m, e) s = Sqrt(a) r = Reciprocal(s) y = Mul(h, r)",
            {"p": 2, "e": 1e-12},
        ),
        (
            "q = Mul(h, h) m = ReduceMean<axes = [1]>(q) a = Add(m, e) r = Pow(a, p) y = Mul(h, r)",
            {"p": -0.5, "e": 1e-8},
        ),
        ("s = Softmax(h) a = Add(s, e) y = Log(a)", {"e": 1e-10}),
        ("a = Abs(h) b = Add(a, e) y = Log(b)", {"e": 1e-10}),
        ("a = Mul(h, d) y = Mul(a, u)", {"d": 1e-8, "u": 1e8}),
        ("a = Div(h, u) y = Div(a, d)", {"d": 1e-8, "u": 1e8}),
        ("a = Mul(h, u) y = Tanh(a)", {"u": 1e6}),
        ("a = Div(h, u) y = Sigmoid(a)", {"u": 1e5}),
        ("e = Exp(h) a = Add(e, o) y = Log(a)", {"o": 1}),
        ("n = Neg(h) e = Exp(n) a = Add(e, o) s = Div(o, a) y = Mul(h, s)", {"o": 1}),
        ("i = Sub(o, k) b = Mul(i, l) s = Add(h, b) y = Softmax(s)", {"o": 1, "l": -3.4028235e38}),
        ("c = Cast<to = 9>(k) s = Where(c, h, l) y = Softmax(s)", {"l": -3.4028235e38}),
        ("s = Shape(h) f = ConstantOfShape<value = float[1] {1e-9}>(s) a = Max(h, f) y = Log(a)", {}),
    ],
)
def test_what_float16_cannot_hold_is_computed_in_float32(body: str, constants: dict[str, float]) -> None:
    """Guards, squares, masks and constants beyond the range: float32's numbers, and no NaN or infinity of its own."""
    numbers = {name: np.array(number, np.float32) for name, number in constants.items()}
    graph = f"g (float[4, 4] x, float[4, 4] k) => (float[4, 4] y) {{ h = MatMul(x, w) {body} }}"
    model = build(graph, {"w": np.eye(4, dtype=np.float32), **numbers})
    # Beyond 88, float32 has no exponential either.
    feeds = {"x": np.clip(ROWS, -80, 80) if "Exp" in body else ROWS, "k": MASK}
    (expected,) = run(model, feeds)
    converted = apply(to_float16(), model).model
    assert [node.outputs[0].dtype for node in converted.graph if node.op_type == "MatMul"] == [ir.DataType.FLOAT16]
    found = compute(converted, feeds)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    np.testing.assert_allclose(found, expected, atol=2e-3, rtol=2e-2)  # numbers of 1e-5 keep eight bits in float16


def test_a_result_on_which_onnxruntime_dies_is_one_error(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child process loads it first."""
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    monkeypatch.setattr(guarded, "module_command", lambda *_arguments: command)
    options = OptimizeOptions(workshop.exported("tiny-encoder"), output=tmp_path / "o.onnx", precision="fp16")
    with pytest.raises(PassError, match=r"dies on the result in fp16 \(SIGSEGV\)"):
        optimize_model(options)
    assert list(tmp_path.iterdir()) == []


FEEDS = {"x": normal(2, 3, 8, seed=7)}
# The weights fit into float16, h is some hundred thousands large, and what comes after it as small as x again.
LARGE = """g (float[B, S, 8] x) => (float[B, S, 8] y) {
    h = MatMul(x, up) a = Relu(h) d = MatMul(a, down) y = LayerNormalization(d, gamma, beta)
}"""
LARGE_WEIGHTS: Arrays = {
    "up": 2e4 * normal(8, 16, seed=1),
    "down": 1e-4 * normal(16, 8, seed=2),
    "gamma": 1 + normal(8, seed=3),
    "beta": normal(8, seed=4),
}


def test_ranges_are_the_largest_values_over_all_inputs(tmp_path: Path) -> None:
    """Of the input and each value that a node makes, by NumPy; nothing is left in the folder."""
    feeds, model = [FEEDS, {"x": -2 * FEEDS["x"]}], build(LARGE, LARGE_WEIGHTS)
    ranges = measure_ranges(model, feeds, tmp_path)
    assert ([value.name for value in model.graph.outputs], len(model.graph)) == (["y"], 4)  # a copy measures
    hidden = [feed["x"] @ LARGE_WEIGHTS["up"] for feed in feeds]
    assert set(ranges) == {"x", "h", "a", "d", "y"}
    assert ranges["x"] == 2 * np.abs(FEEDS["x"]).max()
    assert ranges["h"] == pytest.approx(max(np.abs(one).max() for one in hidden), rel=1e-5)
    assert ranges["a"] == pytest.approx(max(one.max() for one in hidden), rel=1e-5)
    assert list(tmp_path.iterdir()) == []


def test_values_without_elements_overflow_nothing(tmp_path: Path) -> None:
    """Such as keys before the first token; those of later tokens count."""
    graph = "g (float[B, P, 8] past, float[B, S, 8] x) => (float[B, T, 8] y) { p = Abs(past) y = Concat<axis=1>(p, x) }"
    first, later = ({"past": normal(2, length, 8), **FEEDS} for length in (0, 3))
    assert measure_ranges(build(graph), [first], tmp_path)["p"] == 0
    assert measure_ranges(build(graph), [first, later], tmp_path)["p"] == pytest.approx(np.abs(later["past"]).max())


def test_what_is_infinite_already_counts_as_infinite(tmp_path: Path) -> None:
    """1 / 0 is no number that any precision holds."""
    model = build("g (float[B] x) => (float[B] y) { y = Reciprocal(x) }")
    assert measure_ranges(model, [{"x": np.zeros(3, np.float32)}], tmp_path) == {"x": 0, "y": float("inf")}


def test_those_beyond_a_limit_come_the_largest_first() -> None:
    """The limits themselves are allowed, and so is zero."""
    ranges = {"a": 2.0, "b": 5.0, "c": float("inf"), "d": 1.0, "e": 0.25, "f": 0.5, "g": 0.0}
    assert beyond(ranges, 2.0) == ("c", "b")
    assert beyond(ranges, 2.0, 0.5) == ("c", "b", "e")


def test_everything_in_half_precision_would_overflow() -> None:
    """So that the next test shows something."""
    model = apply(to_float16(), build(LARGE, LARGE_WEIGHTS)).model
    assert not np.isfinite(compute(model, FEEDS)).all()


def test_an_activation_beyond_half_precision_stays_finite(tmp_path: Path) -> None:
    """The nodes that make and read it compute in float32, and the report says so."""
    source = build(LARGE, LARGE_WEIGHTS)
    write_inline(source, tmp_path / "m.onnx")
    report = optimize_model(OptimizeOptions(tmp_path / "m.onnx", precision="fp16"))
    result = ir.load(report.output)
    found, (wanted,) = compute(result, FEEDS), run(source, FEEDS)
    np.testing.assert_allclose(found, wanted, atol=2e-2, rtol=0)  # LayerNormalization's output is about 3 large
    assert "2 nodes stay in float32, because" in " ".join(result.note for result in report.passes)
    assert {str(node.op_type): str(node.outputs[0].dtype) for node in result.graph}["Relu"] in ("FLOAT", "None")


@pytest.mark.parametrize(
    "scatter",
    [f'ScatterElements <axis = 1, reduction = "{how}">(h, i, h)' for how in ("add", "mul", "none")]
    + [f'ScatterND <reduction = "{how}">(h, rows, h)' for how in ("add", "max", "min", "none")],
)
def test_what_is_scattered_with_a_reduction_is_summed_in_float32(scatter: str) -> None:
    """As in graph networks; onnxruntime's CPU kernels refuse float16 there. Without a reduction, float16 is enough."""
    body = f"h = MatMul(x, w) s = {scatter} c = Concat <axis = 0>(s, h) y = Abs(c)"
    model = build(
        f"g (float[2, 4] x) => (float[N, 4] y) {{ {body} }}",
        {"w": np.eye(4, dtype=np.float32), "i": np.array([[0, 1, 1, 3]] * 2), "rows": np.array([[0], [1]])},
    )
    feeds = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
    (expected,) = run(model, feeds)
    converted = apply(to_float16(), model).model
    (node,) = [node for node in converted.graph if node.op_type.startswith("Scatter")]
    is_plain = "none" in scatter
    assert (node.outputs[0].dtype == ir.DataType.FLOAT16) == is_plain
    np.testing.assert_array_equal(run(converted, feeds)[0], expected)  # small integers
