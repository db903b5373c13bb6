"""Passes of onnxoptimizer: what they rewrite keeps its names and notes, and what they do wrong is left out by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import onnxtool.optimize.passes.onnxoptimizer_passes as passes
from onnxtool import OptimizeOptions, optimize_model
from onnxtool.graph.edit import tensor_of
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.onnxoptimizer_child import DeadPassError
from onnxtool.optimize.passes.onnxoptimizer_passes import ALLOWED, onnxoptimizer_pass
from onnxtool.optimize.pipeline import Context, run_passes
from onnxtool.optimize.presets import PRESETS
from tests.graphs import of_text as text_of
from tests.optimize.passes import networks
from tests.optimize.passes.builders import Row, apply, build, count, normal, of_body, of_text, run
from tests.workshop import Workshop

PADS, BIASES, NORMALIZATIONS, TRANSPOSES, REDUCTIONS = ALLOWED
SPREAD = np.logspace(-2, 2, 8, dtype=np.float32)
WEIGHTS: dict[str, NDArray[Any]] = {
    "w": normal(8, 4, 3, 3) * np.float32(0.2),
    "w1": normal(8, 4, 3),
    "w8": normal(8, 8, 1, 1, seed=1),
    "each": normal(8, 1, 3, 3, seed=2),
    "bias": normal(8, seed=3),
    "scale": normal(8, seed=4),
    "shift": normal(8, seed=5),
    "mean": normal(8, seed=6),
    "var": SPREAD,
    "channels": normal(1, 8, 1, 1),
    "outer": normal(8, 1, 1),
    "one": np.array(0.5, np.float32),
    "row": normal(7),
    "pads": np.array([0, 0, 1, 2, 0, 0, 3, 0]),
    "cut": np.array([0, 0, 1, 2, 0, 0, -1, 0]),
    "deep": np.array([0, 1, 0, 0, 0, 0, 0, 0]),
    "zero": np.array(0, np.float32),
    "two": np.array(2, np.float32),
    "axes": np.array([2, 3]),
    "last": np.array([-1]),
    "none": np.array([], np.int64),
    "all": np.arange(4),
    "up": normal(4, 8, 2, 2),
    "matrix": normal(5, 4),
}
IMAGE, OUTPUT = "(float[2, 4, 9, 9] x)", "(float[2, 8, P, Q] y)"
NORMALIZE = "BatchNormalization(h, scale, shift, mean, var)"
TRAINED = "y, m, v = BatchNormalization<training_mode = 1>(h, scale, shift, mean, var)"


def of_image(body: str, x: str = IMAGE, y: str = OUTPUT, opset: int = 17) -> Any:
    """Return the builder of a model with the weights that it names."""
    words = set("".join(letter if letter.isalnum() else " " for letter in body).split())
    return of_text(f"g {x} => {y} {{ {body} }}", {name: WEIGHTS[name] for name in WEIGHTS if name in words}, opset)


def of_matrix(body: str) -> Any:
    return of_image(body, "(float[3, 4] x)", "(float[A, B] y)")


READ_ELSEWHERE = of_image(f"h = Conv(x, w) n = {NORMALIZE} y = Add(n, h)")
TRAINING = of_image(f"h = Conv(x, w) {TRAINED}")
FED = of_image(f"h = Conv(x, w) y = {NORMALIZE}", "(float[2, 4, 9, 9] x, float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8})")
DECLINED = "1 left alone: onnxoptimizer does not rewrite it"
ROWS = (
    Row(
        PADS,
        fires={
            "zeros": of_image("p = Pad(x, pads) y = Conv<pads = [1, 0, 0, 1]>(p, w)"),
            "a constant": of_image('p = Pad<mode = "constant">(x, pads, zero) y = Conv(p, w)'),
            "an attribute": of_image("p = Pad<pads = [0, 0, 1, 2, 0, 0, 3, 0]>(x) y = Conv(p, w)", opset=10),
        },
        after="Conv",
        stays={
            "other numbers": (of_image("p = Pad(x, pads, two) y = Conv(p, w)"), "not known to be zeros"),
            "another attribute": (
                of_image("p = Pad<pads = [0, 0, 1, 2, 0, 0, 3, 0], value = 2.0>(x) y = Conv(p, w)", opset=10),
                "not known to be zeros",
            ),
            "axes": (of_image("p = Pad(x, pads, zero, all) y = Conv(p, w)"), "not known to be zeros"),
            "reflected": (of_image('p = Pad<mode = "reflect">(x, pads) y = Conv(p, w)'), DECLINED),
            "cut": (of_image("p = Pad(x, cut) y = Conv(p, w)"), DECLINED),
            "read twice": (of_image("p = Pad(x, pads) h = Conv(p, w) c = Conv(p, w) y = Sub(h, c)"), "2 left alone"),
            "no convolution": (of_image("p = Pad(x, pads) y = Relu(p)"), ""),
        },
    ),
    Row(
        BIASES,
        fires={
            "channels": of_image("h = Conv(x, w) y = Add(channels, h)"),
            "without a batch": of_image("h = Conv(x, w) y = Add(h, outer)"),
            "one number": of_image("h = Conv(x, w) y = Add(h, one)"),
        },
        after="Conv",
        stays={
            "has a bias": (of_image("h = Conv(x, w, bias) y = Add(h, channels)"), DECLINED),
            "along a row": (of_image("h = Conv(x, w) y = Add(h, row)"), DECLINED),
            "a residual": (of_image("h = Conv(x, w) r = Relu(h) y = Add(h, r)"), ""),
            "read twice": (of_image("h = Conv(x, w) s = Add(h, channels) y = Mul(h, s)"), DECLINED),
        },
    ),
    Row(
        NORMALIZATIONS,
        fires={
            "no bias": of_image(f"h = Conv(x, w) y = {NORMALIZE}"),
            "a bias": of_image(
                "h = Conv(x, w, bias) y = BatchNormalization<epsilon = 0.1>(h, scale, shift, mean, var)"
            ),
            "depthwise": of_image(f"a = Conv(x, w) h = Conv<group = 8>(a, each) y = {NORMALIZE}"),
            "one axis": of_image(f"h = Conv(x, w1) y = {NORMALIZE}", "(float[2, 4, 9] x)", "(float[2, 8, P] y)"),
            "opset 9": of_image(f"h = Conv(x, w, bias) y = {NORMALIZE}", opset=9),
            "shared": of_image(f"h = Conv(x, w) a = {NORMALIZE} c = Conv(x, w) y = Sub(a, c)"),
            "two": of_image(
                f"h = Conv(x, w) a = {NORMALIZE} r = Relu(a) c = Conv(r, w8) "
                "y = BatchNormalization(c, scale, shift, mean, var)"
            ),
        },
        after={"no bias": "Conv", "depthwise": "Conv Conv", "two": "Conv Relu Conv"},
        stays={
            "read twice": (READ_ELSEWHERE, "the output of the Conv is read elsewhere"),
            "in training": (TRAINING, "in training mode"),
            "statistics that callers replace": (FED, "weights or statistics are not constant"),
            "no convolution": (of_image(f"h = Relu(x) y = {NORMALIZE}", "(float[2, 8, 9, 9] x)"), ""),
            "transposed": (of_image(f"h = ConvTranspose(x, up) y = {NORMALIZE}"), ""),
        },
        atol=1e-4,  # scales of 10
    ),
    Row(
        TRANSPOSES,
        fires={
            "a weight": of_matrix("t = Transpose(matrix) y = Gemm(x, t)"),
            "with its axes": of_matrix("t = Transpose<perm = [1, 0]>(matrix) y = Gemm(x, t)"),
            "both": of_image("t = Transpose(x) u = Transpose(x) y = Gemm(t, x)", "(float[3, 4] x)", "(float[A, B] y)"),
        },
        after={"a weight": "Gemm", "with its axes": "Gemm"},
        stays={
            "an input of a layer": (
                of_image("t = Transpose(x) y = Gemm(t, matrix)", "(float[5, 3] x)", "(float[A, B] y)"),
                "",
            ),
            "no move": (of_matrix("t = Transpose<perm = [0, 1]>(x) y = Gemm<transB = 1>(t, matrix)"), ""),
        },
    ),
    Row(
        REDUCTIONS,
        fires={
            "attributes": of_body("m = ReduceMean<axes = [2], keepdims = 0>(x) y = Unsqueeze<axes = [2]>(m)", opset=11),
            "inputs": of_image(
                "m = ReduceSum<keepdims = 0>(x, axes) u = Unsqueeze(m, axes) y = Relu(u)", y="(float[2, 4, P, Q] y)"
            ),
            "two": of_image(
                "m = ReduceSum<keepdims = 0>(x, axes) u = Unsqueeze(m, axes) "
                "n = ReduceMax<axes = [-1], keepdims = 0>(u) y = Unsqueeze(n, last)",
                y="(float[2, 4, P, Q] y, float[2, 4, P, Q] u)",
            ),
        },
        after={"attributes": "ReduceMean", "inputs": "ReduceSum Relu", "two": "ReduceSum ReduceMax"},
        stays={
            "other axes": (
                of_image("m = ReduceSum<keepdims = 0>(x, last) y = Unsqueeze(m, axes)", y="(float[2, 4, P, Q, R] y)"),
                DECLINED,
            ),
            "all axes": (
                of_image("m = ReduceSum<keepdims = 0>(x, none) y = Unsqueeze(m, none)", y="(float y)"),
                "",
            ),
        },
    ),
)


def _full_graph() -> ir.Model:
    """Return a normalized convolution with all that onnxoptimizer drops, beside a branch and values of other kinds."""
    text = (
        "g (float[2, 4, 9, 9] x, bool c) => (float[2, 8, 7, 7] y, float[2, 8, 7, 7] z, seq(float[2, 8, 7, 7]) s) "
        f"{{ [conv] h = Conv(x, w) [norm] n = {NORMALIZE} y = Relu(n) s = SequenceConstruct(y) z = If(c) "
        "<then_branch = t () => (float[2, 8, 7, 7] a) { h2 = Conv(x, w) a = BatchNormalization(h2, scale, shift, mean, "
        "var) }, else_branch = e () => (float[2, 8, 7, 7] b) { b = Neg(n) }> }"
    )
    proto = text_of(text, {name: WEIGHTS[name] for name in ("w", "scale", "shift", "mean", "var")}, 17)
    for kind, holder in enumerate((proto, proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output)):
        holder.doc_string = f"documented {kind}"
        holder.metadata_props.add(key="kept", value=str(kind))
    proto.graph.value_info.append(helper.make_tensor_value_info("n", TensorProto.FLOAT, [2, 8, 7, 7]))
    proto.graph.value_info[0].metadata_props.add(key="of", value="n")
    for name in ("x", "n", "y"):
        scale = onnx.StringStringEntryProto(key="SCALE_TENSOR", value=f"{name}_scale")
        proto.graph.quantization_annotation.add(tensor_name=name, quant_parameter_tensor_names=[scale])
    model: ir.Model = ir.from_proto(proto)
    return model


def test_all_that_is_noted_about_a_graph_stays() -> None:
    """Only the Conv has other weights, and the name of the result; branches, versions and types are the same."""
    model = _full_graph()
    before = ir.to_proto(model)
    after = ir.to_proto(apply(NORMALIZATIONS, model).model)
    conv, relu, *others = after.graph.node
    assert (conv.name, conv.metadata_props, list(conv.output)) == ("conv", before.graph.node[0].metadata_props, ["n"])
    assert [relu, *others] == list(before.graph.node[2:])
    for field in ("input", "output", "quantization_annotation", "metadata_props", "doc_string"):
        assert (field, getattr(after.graph, field)) == (field, getattr(before.graph, field))
    described, as_before = ({one.name: one for one in proto.graph.value_info} for proto in (after, before))
    assert described["n"] == as_before["n"]
    for proto in (before, after):
        proto.ClearField("graph")
    assert after == before


@pytest.mark.parametrize(("dtype", "decades"), [("float", 18), ("double", 100), ("float16", 1)])
def test_a_normalization_of_extreme_scales_is_folded_exactly(dtype: str, decades: int) -> None:
    """New weights are those of exact arithmetic, rounded once; in no channel may they vanish."""
    kind: Any = {"float": np.float32, "double": np.float64, "float16": np.float16}[dtype]
    arrays = {name: WEIGHTS[name].astype(kind) for name in ("w", "bias", "shift", "mean")}
    arrays |= {name: np.logspace(-decades, decades, 8).astype(kind) for name in ("var", "scale")}
    text = f"g ({dtype}[2, 4, 9, 9] x) => ({dtype}[2, 8, P, Q] y) {{ h = Conv(x, w, bias) y = {NORMALIZE} }}"
    outcome = apply(NORMALIZATIONS, build(text, arrays))
    assert outcome.num_changes == 8
    w, bias, shift, mean, var, scale = (array.astype(np.longdouble) for array in arrays.values())
    factor = scale / np.sqrt(var + np.longdouble(np.float32(1e-5)))
    expected = (w * factor[:, None, None, None], (bias - mean) * factor + shift)
    for value, exact in zip(outcome.model.graph.initializers.values(), expected, strict=True):
        steps = 4 if dtype == "double" else 1  # computed in double precision
        rounding = steps * np.finfo(kind).eps * np.abs(exact) + np.finfo(kind).smallest_subnormal
        assert (np.abs(tensor_of(value).numpy() - exact) <= rounding).all()
    arrays["scale"] = np.full(8, np.finfo(kind).smallest_subnormal)
    arrays["var"][:] = 9
    assert dtype == "double" or "lose digits" in apply(NORMALIZATIONS, build(text, arrays)).note


def test_an_encoder_starts_no_child(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that onnxoptimizer rewrites is in it."""
    monkeypatch.setattr(passes, "run_pass", lambda name, _model: pytest.fail(name))
    model = load_model(workshop.exported("tiny-encoder", exporter="torchscript"))
    run_passes(model, PRESETS["cpu"], Context("bert"), most_rounds=1)


# Passes that are in no preset, with what they get wrong: another shape, padding that counts, a segmentation fault, axes
# from the end, NaN, int4, foreign memory.
WRONG = {
    "eliminate_consecutive_idempotent_ops": (
        "(float[2, 3, 4] x) => (float[P, Q, R] y) <int64[2] p = {4, -1}, int64[3] q = {0, 2, -1}>",
        "a = Reshape(x, p) y = Reshape(a, q)",
        "2 x 1 differs by inf",
    ),
    "fuse_pad_into_pool": (
        "(float[1, 2, 9, 9] x) => (float[1, 2, P, Q] y) <int64[8] p = {0, 0, 1, 1, 0, 0, 1, 1}>",
        "a = Pad(x, p) y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(a)",
        "x 1 differs by",
    ),
    "eliminate_if_with_const_cond": (
        "(float[2] x) => (float[2] y) <bool c = {1}>",
        (
            "z = If(c) <then_branch = t () => (float[2] b) <float[2] b = {1, 2}> {}, "
            "else_branch = e () => (float[2] d) <float[2] d = {3, 4}> {}> y = Add(x, z)"
        ),
        "onnxoptimizer's pass ends the process that tries it (SIGSEGV)",
    ),
    "fuse_consecutive_squeezes": (
        "(float[1, 3, 1, 4, 1] x) => (float[3, 4] y) <int64[1] p = {-1}, int64[2] q = {0, -2}>",
        "a = Squeeze(x, p) y = Squeeze(a, q)",
        "cannot load the result",
    ),
    "eliminate_nop_monotone_argmax": (
        "(float[2, 9] x) => (int64[2, 1] y)",
        "a = Log(x) y = ArgMax<axis = 1>(a)",
        "x 1 differs by",
    ),
    "eliminate_duplicate_initializer": (
        "(float[2] x) => (float[2] y) <float s = {0.5}>",
        "a = DequantizeLinear(p, s) b = DequantizeLinear(q, s) c = Add(a, b) y = Add(x, c)",
        "onnxoptimizer's pass raises an error: no supported data type: 22",
    ),
    "eliminate_shape_op": (
        "(float[3, 4, 5] x) => (int64[0] y)",
        "s = Shape<start = 2, end = 1>(x) y = Neg(s)",
        "onnxoptimizer's pass ends the process that tries it (SIGSEGV)",
    ),
}


def wrong_graph(name: str) -> onnx.ModelProto:
    """Return a graph on which a pass is wrong."""
    values, body, _ = WRONG[name]
    int4 = {name: np.array([1, 2], helper.tensor_dtype_to_np_dtype(TensorProto.INT4)) for name in "pq"}
    return text_of(f"g {values} {{ {body} }}", int4 if "Dequantize" in body else None, opset=21)


@pytest.mark.parametrize("name", WRONG)
def test_a_pass_that_is_wrong_is_left_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and the file is written without it."""
    onnx.save(wrong_graph(name), tmp_path / "m.onnx")
    monkeypatch.setitem(PRESETS, "cpu", (*ALLOWED, onnxoptimizer_pass(name)))
    report = optimize_model(OptimizeOptions(tmp_path / "m.onnx", timing=False))
    (found,) = [result for result in report.passes if result.left_out]
    assert (found.name, found.num_changes) == (name, 0)
    assert WRONG[name][-1] in found.note
    assert report.after.ops == report.before.ops
    assert report.verification is not None
    assert report.verification.passed


def test_passes_that_die_never_take_the_file_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than may be wrong, once each; the other passes run, and the stamp names them."""
    calls = []

    def die(name: str, _model: onnx.ModelProto) -> onnx.ModelProto:
        calls.append(name)
        raise DeadPassError("takes more than 10 s")

    monkeypatch.setattr(passes, "run_pass", die)
    body = (
        f"i = Identity(x) p = Pad(i, pads) a = Conv(p, w) b = Add(a, channels) h = Conv(b, w8) n = {NORMALIZE} "
        "m = ReduceMean<axes = [2, 3], keepdims = 0>(n) u = Unsqueeze(m, axes) y = Relu(u)"
    )
    ir.save(of_image(body)(), tmp_path / "m.onnx")
    report = optimize_model(OptimizeOptions(tmp_path / "m.onnx", timing=False))
    left_out = [result.name for result in report.passes if result.left_out]
    assert left_out == [PADS.name, BIASES.name, NORMALIZATIONS.name, REDUCTIONS.name] == calls
    assert report.after.num_nodes == report.before.num_nodes - 1
    assert {result.note for result in report.passes if result.left_out} == {
        "left out: onnxoptimizer's pass takes more than 10 s"
    }


def test_a_network_loses_its_normalizations(tmp_path: Path) -> None:
    """With Pad and depthwise convolutions in it; its outputs are still those of PyTorch."""
    network, sample = networks.make("EfficientNet")
    model = networks.exported(network, sample, dynamo=False)
    assert count(model, "BatchNormalization") == 6
    ir.save(model, tmp_path / "m.onnx")
    report = optimize_model(OptimizeOptions(tmp_path / "m.onnx", timing=False))
    assert report.after.ops.keys().isdisjoint({"BatchNormalization", "Pad"})
    (found,) = run(ir.load(report.output), {"x": sample.numpy()})
    np.testing.assert_allclose(found, network(sample).detach().numpy(), atol=1e-5)


def test_the_page_is_about_the_installed_version() -> None:
    """Each pass has a row, and those of the presets are marked and never wrong."""
    import onnxoptimizer

    page = (Path(__file__).parents[3] / "docs" / "onnxoptimizer.md").read_text(encoding="utf-8")
    assert f"onnxoptimizer {onnxoptimizer.__version__}," in page
    rows = {row[0].strip("`"): row for row in (line.strip("| ").split(" | ") for line in page.splitlines())}
    assert rows.keys() >= set(onnxoptimizer.get_available_passes())
    assert {name for name, row in rows.items() if row[2:3] == ["**yes**"]} == {step.name for step in ALLOWED}
