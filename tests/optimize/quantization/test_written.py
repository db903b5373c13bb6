"""Figures of a quantized model are those of its file, and a conversion that converts nothing is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import PassError
from onnxtool.optimize.report import OptimizeReport, Quantization

_WIDTH = 64


def weights(*names: str) -> list[Any]:
    generator = np.random.default_rng(0)
    return [
        numpy_helper.from_array(generator.normal(size=(_WIDTH, _WIDTH)).astype(np.float32) * 0.1, name)
        for name in names
    ]


def branch(result: str, node: Any) -> Any:
    return helper.make_graph([node], "branch", [], [helper.make_tensor_value_info(result, TensorProto.FLOAT, None)])


def optimized(
    folder: Path, nodes: list[Any], initializers: list[Any], precision: str, *, opset: int = 17, **options: Any
) -> OptimizeReport:
    """Optimize a graph from x to y, float32 [B, 64]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", _WIDTH]) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], initializers)
    imports = [helper.make_opsetid("", opset)] if opset else [helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), folder / "m.onnx")
    return optimize_model(
        OptimizeOptions(folder / "m.onnx", output=folder / "o.onnx", precision=precision, force=True, **options)
    )


def product(source: str, weight: str, result: str) -> Any:
    return helper.make_node("MatMul", [source, weight], [result])


def quantization_of(report: OptimizeReport) -> Quantization:
    assert report.quantization is not None
    return report.quantization


def weight_dtypes(path: Path) -> Mapping[str, str]:
    graph = onnx.load(path).graph
    return {one.name: TensorProto.DataType.Name(one.data_type) for one in graph.initializer if len(one.dims) > 1}


def test_a_layer_in_a_branch_is_counted_where_it_stays(tmp_path: Path) -> None:
    """No pass looks into branches, and so the file has a layer in float32 that none was asked to leave."""
    other = helper.make_node("Neg", ["a"], ["r"])
    nodes = [
        product("x", "w", "a"),
        helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "zero"], ["c"]),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch("r", product("a", "v", "r")), else_branch=branch("r", other)
        ),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    found = quantization_of(optimized(tmp_path, nodes, [*weights("w", "v"), zero], "int8"))
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
        optimized(tmp_path, [product("x", "w", "y")], weights("w"), "int8", opset=opset)
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("opset", [8, 10])
def test_a_file_of_an_older_opset_is_converted_for_int8(tmp_path: Path, opset: int) -> None:
    """For int8 alone: in float32 it needs no other one."""
    report = optimized(tmp_path, [product("x", "w", "y")], weights("w"), "int8", opset=opset)
    assert (quantization_of(report).num_layers, report.after.opsets["ai.onnx"]) == (1, 17)
    assert report.verification is not None
    report = optimized(tmp_path, [product("x", "w", "y")], weights("w"), "fp32", opset=opset)
    assert report.after.opsets["ai.onnx"] == opset


def test_auto_does_not_take_int8_that_is_float32(tmp_path: Path) -> None:
    """A candidate that converts nothing is none."""
    nodes = [product("x", "w", "z"), helper.make_node("Hardmax", ["z"], ["y"])]
    report = optimized(tmp_path, nodes, weights("w"), "auto", opset=10, verify=False)
    assert [one.reason for one in report.candidates if one.precision == "int8"] == [
        "int8 needs opset 11 or later, and the model is of opset 10"
    ] * 3
    note = next(result.note for result in report.passes if result.name == "convert_opset")
    assert note == "left in opset 10: Hardmax means something else from opset 13 on"


@pytest.mark.parametrize("precision", ["int4", "fp16"])
def test_other_precisions_need_no_later_opset(tmp_path: Path, precision: str) -> None:
    """Their operators are onnxruntime's own, or as old as ONNX."""
    report = optimized(tmp_path, [product("x", "w", "y")], weights("w"), precision, opset=8, max_error=0.1)
    assert report.precision == precision
    assert 2 * report.after.size_bytes < 1.5 * report.before.size_bytes


def test_a_bound_that_no_layer_of_4_bits_holds_is_an_error(tmp_path: Path) -> None:
    """All of 8 bits is not int4."""
    with pytest.raises(PassError, match="nothing was converted to int4: the layers are 1 in int8"):
        optimized(tmp_path, [product("x", "w", "y")], weights("w"), "int4", max_error=1e-3)


def half(name: str) -> Any:
    return numpy_helper.from_array(np.ones((_WIDTH, _WIDTH), np.float16), name)


def quantized(name: str) -> list[Any]:
    return [
        numpy_helper.from_array(np.ones((_WIDTH, _WIDTH), np.int8), f"{name}_q"),
        numpy_helper.from_array(np.float32(0.1), f"{name}_scale"),
    ]


@pytest.mark.parametrize(
    ("nodes", "initializers", "hint"),
    [
        ([helper.make_node("Relu", ["x"], ["y"])], [], "it has no MatMul or Gemm with a weight; leave"),
        (
            [helper.make_node("Mul", ["x", "w"], ["y"])],
            [numpy_helper.from_array(np.ones((1, _WIDTH), np.float32), "w")],
            "it has no MatMul or Gemm with a weight; its weights are in Mul; leave",
        ),
        (
            [
                helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
                helper.make_node("Cast", ["m"], ["c"], to=TensorProto.BOOL),
                helper.make_node(
                    "If",
                    ["c"],
                    ["y"],
                    then_branch=branch("r", helper.make_node("Abs", ["x"], ["r"])),
                    else_branch=branch("r", helper.make_node("Neg", ["x"], ["r"])),
                ),
            ],
            [],
            "it has no MatMul or Gemm with a weight; branches and loop bodies are left unchanged",
        ),
        (
            [
                helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
                product("h", "w", "p"),
                helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT),
            ],
            [half("w")],
            "its weight is float16, not float32",
        ),
        (
            [helper.make_node("DequantizeLinear", ["w_q", "w_scale"], ["w"]), product("x", "w", "y")],
            quantized("w"),
            "quantized already",
        ),
        (
            [
                helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
                helper.make_node("Cast", ["m"], ["c"], to=TensorProto.BOOL),
                helper.make_node(
                    "If",
                    ["c"],
                    ["y"],
                    then_branch=branch("r", product("x", "w", "r")),
                    else_branch=branch("r", helper.make_node("Neg", ["x"], ["r"])),
                ),
            ],
            weights("w"),
            "branches or loop bodies",
        ),
        ([helper.make_node("Gemm", ["x", "w"], ["y"], alpha=0.5)], weights("w"), "scaled"),
    ],
    ids=["no layer", "no product", "only branches", "half", "quantized", "branch", "scaled"],
)
def test_a_model_without_a_layer_to_quantize_is_called_what_it_is(
    tmp_path: Path, nodes: list[Any], initializers: list[Any], hint: str
) -> None:
    """The hint is true of the file."""
    with pytest.raises(PassError, match="no linear layer has a float32 weight to quantize") as raised:
        optimized(tmp_path, nodes, initializers, "int8")
    assert hint in str(raised.value.hint)


def test_a_model_of_another_dtype_has_no_half_precision(tmp_path: Path) -> None:
    """The error says which it has."""
    nodes = [
        helper.make_node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
        product("d", "w", "p"),
        helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT),
    ]
    weight = numpy_helper.from_array(np.ones((_WIDTH, _WIDTH)), "w")
    with pytest.raises(PassError, match="no weight of two axes or more is float32: they are float64"):
        optimized(tmp_path, nodes, [weight], "fp16")


def test_a_model_without_float32_matrices_has_no_half_precision(tmp_path: Path) -> None:
    """It would be the same file under another name."""
    with pytest.raises(PassError, match="nothing can be converted to fp16: no weight of two axes or more is float32"):
        optimized(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [], "fp16")
