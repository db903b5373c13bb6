"""Figures of a quantized model are those of its file, and a conversion that converts nothing is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import PassError, VerificationError
from onnxtool.model_file import save_model
from onnxtool.optimize.quantization import written
from onnxtool.optimize.quantization.arithmetic import Adjustment
from onnxtool.optimize.report import OptimizeReport, Quantization
from onnxtool.progress import listening
from tests.graphs import of_text
from tests.optimize.passes.builders import Arrays, normal

WEIGHTS = {"w": 0.1 * normal(64, 64), "v": 0.1 * normal(64, 64, seed=1)}
WEIGHT = {"w": WEIGHTS["w"]}
PRODUCT = "y = MatMul(x, w)"


def optimized(
    folder: Path, body: str, weights: Arrays, precision: str, *, opset: int = 17, **options: Any
) -> OptimizeReport:
    """Optimize a graph from x to y, float32 [b, 64]."""
    model = of_text(f"g (float[b, 64] x) => (float[b, 64] y) {{ {body} }}", weights, opset)
    if not opset:
        del model.opset_import[0]
    onnx.save(model, folder / "m.onnx")
    return optimize_model(
        OptimizeOptions(folder / "m.onnx", output=folder / "o.onnx", precision=precision, force=True, **options)
    )


def branches(condition: str, then: str, other: str) -> str:
    """Return the body of a graph whose result is one of two nodes', by the largest number of x."""
    parts = (
        f"{name} = {name[0]} () => (float[b, 64] r) {{ r = {node} }}"
        for name, node in (("then_branch", then), ("else_branch", other))
    )
    return f"m = ReduceMax <keepdims=0> (x) c = {condition} y = If <{', '.join(parts)}> (c)"


def quantization_of(report: OptimizeReport) -> Quantization:
    assert report.quantization is not None
    return report.quantization


def weight_dtypes(path: Path) -> Mapping[str, str]:
    graph = onnx.load(path).graph
    return {one.name: TensorProto.DataType.Name(one.data_type) for one in graph.initializer if len(one.dims) > 1}


def test_a_layer_in_a_branch_is_counted_where_it_stays(tmp_path: Path) -> None:
    """No pass looks into branches, and so the file has a layer in float32 that none was asked to leave."""
    body = "a = MatMul(x, w) " + branches("Greater(m, zero)", "MatMul(a, v)", "Neg(a)")
    found = quantization_of(optimized(tmp_path, body, {**WEIGHTS, "zero": np.array(0, np.float32)}, "int8"))
    assert found.num_layers == 2
    assert [(layer.name, layer.precision, layer.error) for layer in found.kept] == [("v", "float32", None)]
    assert weight_dtypes(tmp_path / "o.onnx") == {"w_int8": "INT8", "v": "FLOAT"}


@pytest.mark.parametrize(
    ("opset", "reason"),
    [(6, "the model is of opset 6"), (0, "the model declares no opset")],
)
def test_int8_needs_operators_of_opset_11(tmp_path: Path, opset: int, reason: str) -> None:
    """Its file would be the float32 one."""
    with pytest.raises(PassError, match=reason):
        optimized(tmp_path, PRODUCT, WEIGHT, "int8", opset=opset)
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("opset", [8, 10])
def test_a_file_of_an_older_opset_is_converted_for_int8(tmp_path: Path, opset: int) -> None:
    """For int8 alone: in float32 it needs no other one."""
    report = optimized(tmp_path, PRODUCT, WEIGHT, "int8", opset=opset)
    assert (quantization_of(report).num_layers, report.after.opsets["ai.onnx"]) == (1, 17)
    assert report.verification is not None
    report = optimized(tmp_path, PRODUCT, WEIGHT, "fp32", opset=opset)
    assert report.after.opsets["ai.onnx"] == opset


@pytest.mark.usefixtures("brief_timings")
def test_auto_does_not_take_int8_that_is_float32(tmp_path: Path) -> None:
    """A candidate that converts nothing is none."""
    report = optimized(tmp_path, "z = MatMul(x, w) y = Hardmax(z)", WEIGHT, "auto", opset=10, verify=False)
    assert [one.reason for one in report.candidates if one.precision == "int8"] == [
        "int8 needs opset 11 or later, and the model is of opset 10"
    ] * 3
    note = next(result.note for result in report.passes if result.name == "convert_opset")
    assert note == "left in opset 10: Hardmax means something else from opset 13 on"


@pytest.mark.parametrize("precision", ["int4", "fp16"])
def test_other_precisions_need_no_later_opset(tmp_path: Path, precision: str) -> None:
    """Their operators are onnxruntime's own, or as old as ONNX."""
    report = optimized(tmp_path, PRODUCT, WEIGHT, precision, opset=8, max_error=0.1)
    assert report.precision == precision
    assert 2 * report.after.size_bytes < 1.5 * report.before.size_bytes


def test_a_bound_that_no_layer_of_4_bits_holds_is_an_error(tmp_path: Path) -> None:
    """All of 8 bits is not int4."""
    with pytest.raises(PassError, match="nothing was converted to int4: the layers are 1 in int8"):
        optimized(tmp_path, PRODUCT, WEIGHT, "int4", max_error=1e-3)


HALVES = "h = Cast <to=10> (x) p = MatMul(h, w) y = Cast <to=1> (p)"
TO_BOOL = "Cast <to=9> (m)"
NONE = "it has no MatMul or Gemm with a weight"


@pytest.mark.parametrize(
    ("body", "weights", "hint"),
    [
        ("y = Relu(x)", {}, f"{NONE}; leave"),
        ("y = Mul(x, w)", {"w": np.ones((1, 64), np.float32)}, f"{NONE}; its weights are in Mul; leave"),
        (branches(TO_BOOL, "Abs(x)", "Neg(x)"), {}, f"{NONE}; branches and loop bodies are left unchanged"),
        (HALVES, {"w": np.ones((64, 64), np.float16)}, "its weight is float16, not float32"),
        (
            "w = DequantizeLinear(w_q, w_scale) y = MatMul(x, w)",
            {"w_q": np.ones((64, 64), np.int8), "w_scale": np.array(0.1, np.float32)},
            "quantized already",
        ),
        (branches(TO_BOOL, "MatMul(x, w)", "Neg(x)"), WEIGHT, "branches or loop bodies"),
        ("y = Gemm <alpha=0.5> (x, w)", WEIGHT, "scaled"),
    ],
    ids=["no layer", "no product", "only branches", "half", "quantized", "branch", "scaled"],
)
def test_a_model_without_a_layer_to_quantize_is_called_what_it_is(
    tmp_path: Path, body: str, weights: Arrays, hint: str
) -> None:
    """The hint is true of the file."""
    with pytest.raises(PassError, match="no linear layer has a float32 weight to quantize") as raised:
        optimized(tmp_path, body, weights, "int8")
    assert hint in str(raised.value.hint)


@pytest.mark.parametrize(
    ("body", "weights", "message"),
    [
        (
            HALVES.replace("10", "11"),
            {"w": np.ones((64, 64))},
            "no weight of two axes or more is float32: they are float64",
        ),
        ("y = Relu(x)", {}, "nothing can be converted to fp16: no weight of two axes or more is float32"),
    ],
)
def test_a_model_without_float32_matrices_has_no_half_precision(
    tmp_path: Path, body: str, weights: Arrays, message: str
) -> None:
    """It would be the same file under another name; the error says which dtype there is."""
    with pytest.raises(PassError, match=message):
        optimized(tmp_path, body, weights, "fp16")


# Random rows, looked up and passed through two layers; the first column of `w` hardly matters behind the first row of
# `v`, so that no output shows what becomes of it.
LOOKUP = (
    "g (int64[b, s] input_ids) => (float[b, s, 64] y) "
    "{ e = Gather(t, input_ids) m = Mul(e, c) a = MatMul(m, w) y = MatMul(a, v) }"
)
HIDDEN = np.ones((64, 1), np.float32)
HIDDEN[0] = 1e-4
LOOKED_UP = {"t": normal(2048, 64, seed=2), "c": 1 + 0.1 * normal(64), "w": WEIGHTS["w"], "v": HIDDEN * WEIGHTS["v"]}


def times_four(name: str, column: Any) -> Callable[[Arrays], Arrays]:
    """Return a fault that multiplies a column of the weight or scale called `name`."""

    def spoil(arrays: Arrays) -> Arrays:
        array = arrays[name].copy()
        array[column] *= 4
        return {name: array}

    return spoil


COLUMN = (slice(None), 0)
FAULTS: list[tuple[str, str, Callable[[Arrays], Arrays]]] = [
    ("int8", "w_int8", times_four("w_scale", 0)),
    ("int8", "w_int8", lambda arrays: {"w_scale": np.roll(arrays["w_scale"], 1)}),
    ("int8", "w_int8", lambda arrays: {"w_zero": np.int8(-128) + arrays["w_zero"]}),
    ("int8", "w_int8", lambda arrays: {"w_int8": arrays["w_int8"].T}),
    ("int8", "t_rows_int8", times_four("t_rows_scale", 7)),
    ("int8", "t_rows_int8", lambda arrays: {"t_rows_int8": arrays["t_rows_int8"][::-1]}),
    ("uint8", "w_int8", times_four("w_scale", 0)),
    ("uint8", "w_int8", lambda arrays: {"w_zero": arrays["w_zero"] ^ np.uint8(128)}),
    ("uint8", "w_int8", lambda arrays: {"w_int8": arrays["w_int8"] ^ np.uint8(128)}),
    ("int4", "w_int4_blocks", times_four("w_int4_scale", 0)),
    ("int4", "w_int4_blocks", lambda arrays: {"w_int4_scale": np.roll(arrays["w_int4_scale"], 1, axis=0)}),
    ("int4", "w_int4_blocks", lambda arrays: {"w_int4_zero": arrays["w_int4_zero"] ^ np.uint8(0x88)}),
    ("int4", "t_rows_int4_blocks", lambda arrays: {"t_rows_int4_blocks": arrays["t_rows_int4_blocks"][::-1]}),
    ("int4_fp16", "w_int4_blocks", times_four("w_int4_scale_float16", 0)),
    ("int8", "c", times_four("c", 0)),
    ("fp16", "w_float16", times_four("w_float16", COLUMN)),
    ("fp16", "t_float16", lambda arrays: {"t_float16": arrays["t_float16"][::-1]}),
]


@pytest.mark.parametrize(("precision", "name", "fault"), FAULTS, ids=lambda one: one if isinstance(one, str) else "")
def test_no_file_has_a_weight_that_is_not_the_one_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, name: str, fault: Callable[[Arrays], Arrays]
) -> None:
    """Whether or not an output shows it: the bound on the error hides a column."""

    def save(model: Any, staging: Any, **options: Any) -> Path:
        path = save_model(model, staging, **options)
        written = onnx.load(path)
        tensors = {one.name: one for one in written.graph.initializer}
        for changed, array in fault({key: numpy_helper.to_array(one) for key, one in tensors.items()}).items():
            tensors[changed].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), changed))
        onnx.save(written, path)
        return path

    onnx.save(of_text(LOOKUP, LOOKED_UP), tmp_path / "m.onnx")
    options = OptimizeOptions(
        tmp_path / "m.onnx", output=tmp_path / "o.onnx", precision=precision, max_error=0.05, timing=False
    )
    monkeypatch.setattr("onnxtool.optimize.attempt.save_model", save)
    with pytest.raises(PassError, match=f"the weight {name} in the file is off by"):
        optimize_model(options)
    assert not (tmp_path / "o.onnx").exists()
    monkeypatch.undo()
    assert optimize_model(options).verification is not None  # as it is, the file is right


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_no_file_lacks_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Although it has an output of the same name and shape."""

    def save(model: Any, staging: Any, **options: Any) -> Path:
        path = save_model(model, staging, **options)
        written = onnx.load(path)
        head = next(node for node in written.graph.node if "y" in node.output)
        source = next(name for node in written.graph.node for name in node.output if node.op_type == "Relu")
        head.CopyFrom(onnx.helper.make_node("Identity", [source], ["y"]))
        onnx.save(written, path)
        return path

    monkeypatch.setattr("onnxtool.optimize.attempt.save_model", save)
    with pytest.raises(
        (VerificationError, PassError), match="differs from m.onnx|nothing in the file reads the weight v_"
    ):
        optimized(tmp_path, "a = MatMul(x, w) r = Relu(a) y = MatMul(r, v)", WEIGHTS, precision)
    assert not (tmp_path / "o.onnx").exists()


def test_an_fp16_file_with_a_value_beyond_float16_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16: on the CPU, where onnxruntime computes it in float32, no output would show it."""
    weights = {"w": np.float32(6e4) * WEIGHTS["w"], "v": np.float32(0.01) * WEIGHTS["v"]}
    monkeypatch.setattr("onnxtool.optimize.quantization.conversion.beyond", lambda *_: ())
    with pytest.raises(PassError, match=r"reaches .*, and the largest float16 is 65504"):
        optimized(tmp_path, "a = MatMul(x, w) r = Relu(a) y = MatMul(r, v)", weights, "fp16")
    assert not (tmp_path / "o.onnx").exists()


def test_the_expected_time_is_told_first(tmp_path: Path) -> None:
    """As an estimate."""
    onnx.save(of_text(LOOKUP, LOOKED_UP), tmp_path / "m.onnx")
    stages: list[str] = []
    with listening(stages.append):
        optimize_model(OptimizeOptions(tmp_path / "m.onnx", precision="int8", max_error=0.9, timing=False))
    (place,) = [place for place, stage in enumerate(stages) if stage.startswith("converting")]
    assert stages[place] == "converting to int8, in about 2 s by the number of weights"
    assert any(stage.startswith("rounding layers, group 1 of") for stage in stages[place:])


def test_weights_are_compared_by_parts_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales and zero points of the same rows, and to the last part, which may have a NaN."""
    monkeypatch.setattr(written, "_ROWS_AT_A_TIME", 3)
    onnx.save(of_text(LOOKUP, LOOKED_UP), tmp_path / "m.onnx")
    for precision in ("int8", "int4"):
        output = tmp_path / f"{precision}.onnx"
        optimize_model(
            OptimizeOptions(tmp_path / "m.onnx", output=output, precision=precision, max_error=0.9, timing=False)
        )
    off = written._steps_off
    monkeypatch.setattr(written, "_steps_off", lambda *given: np.nan if len(given[0]) < 3 else off(*given))
    with pytest.raises(PassError, match="in the file is off by nan"):
        optimize_model(OptimizeOptions(tmp_path / "m.onnx", precision="int8", max_error=0.9, timing=False))


def test_a_fault_of_the_rounding_itself_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a weight is compared with is not what rounds it."""
    quantize = Adjustment.quantize

    def spoiled(*given: Any, **options: Any) -> tuple[Any, Any]:
        codes, scale = quantize(*given, **options)
        return codes, scale * np.where(np.arange(len(scale)) == 0, np.float32(4), np.float32(1))

    monkeypatch.setattr(Adjustment, "quantize", spoiled)
    onnx.save(of_text(LOOKUP, LOOKED_UP), tmp_path / "m.onnx")
    with pytest.raises(PassError, match="the weight [wv]_int8 in the file is off by"):
        optimize_model(OptimizeOptions(tmp_path / "m.onnx", precision="int8", max_error=0.9, timing=False))
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
