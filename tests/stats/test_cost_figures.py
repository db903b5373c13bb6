"""Costs of what exporters write otherwise than others, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtool.stats import Shape, describe_model
from onnxtool.summary.figures import Cost
from tests.graphs import value

B, S, D = 2, 5, 8
MS = "com.microsoft"
W = numpy_helper.from_array(np.ones((D, 3), np.float32), "w")


def cost_of(folder: Path, nodes: list[Any], inputs: list[Any], *tensors: Any, opset: int = 20) -> Cost:
    graph = helper.make_graph(nodes, "graph", inputs, [value("y", None)], [W, *tensors])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MS, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    cost = describe_model(folder / "model.onnx", Shape(B, S)).cost
    assert cost is not None
    assert cost.num_unknown_nodes == 0
    return cost


@pytest.mark.parametrize("opset", [11, 20])
def test_axes_are_an_attribute_or_an_input_by_the_opset(tmp_path: Path, opset: int) -> None:
    """Before opset 13 the sizes that an exporter computes go through axes that are attributes."""
    axes = numpy_helper.from_array(np.array([0]), "axes")
    names = [] if opset < 13 else ["axes"]
    attributes = {"axes": [0]} if opset < 13 else {}
    sizes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Unsqueeze", ["sizes", *names], ["row"], **attributes),
        helper.make_node("Squeeze", ["row", *names], ["again"], **attributes),
    ]
    nodes = [*sizes, helper.make_node("Reshape", ["x", "again"], ["z"]), helper.make_node("MatMul", ["z", "w"], ["y"])]
    cost = cost_of(tmp_path, nodes, [value("x", ["batch", D])], axes, opset=opset)
    assert cost.macs == B * D * 3


@pytest.mark.parametrize("op", ["FusedGemm", "GemmFastGelu"])
def test_a_product_fused_with_its_activation_counts(tmp_path: Path, op: str) -> None:
    """As the product alone."""
    attributes = {"activation": "Relu"} if op == "FusedGemm" else {}
    nodes = [helper.make_node(op, ["x", "w"], ["y"], domain=MS, **attributes)]
    cost = cost_of(tmp_path, nodes, [value("x", ["batch", D])])
    assert (cost.macs_by_op, cost.activation_bytes) == ({f"{MS}::{op}": B * D * 3}, B * 3 * 4)


def test_a_convolution_fused_with_its_activation_counts(tmp_path: Path) -> None:
    """As onnxruntime's basic optimizations leave it: x [B, D, 9], 4 filters of 3."""
    kernel = numpy_helper.from_array(np.ones((4, D, 3), np.float32), "kernel")
    nodes = [helper.make_node("FusedConv", ["x", "kernel"], ["y"], domain=MS, activation="Relu", kernel_shape=[3])]
    cost = cost_of(tmp_path, nodes, [value("x", ["batch", D, 9])], kernel)
    assert (cost.macs, cost.activation_bytes) == (B * 4 * 7 * D * 3, B * 4 * 7 * 4)


def test_a_deformable_convolution_counts(tmp_path: Path) -> None:
    """As many products as that of a plain one: x [B, D, 4, 4], 6 filters of 2 x 2, and an offset for each of 3 x 3."""
    tensors = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in {"kernel": (6, D, 2, 2), "offset": (B, 8, 3, 3)}.items()
    ]
    nodes = [helper.make_node("DeformConv", ["x", "kernel", "offset"], ["y"], kernel_shape=[2, 2])]
    assert cost_of(tmp_path, nodes, [value("x", ["batch", D, 4, 4])], *tensors).macs == B * 6 * 9 * D * 4


def test_a_scan_takes_and_gives_slices_along_its_axes(tmp_path: Path) -> None:
    """Over the tokens of x [B, S, D], its second axis: S products of [B, D] and [D, B], to y [B, S, B]."""
    products = [helper.make_node("Transpose", ["q"], ["t"]), helper.make_node("MatMul", ["q", "t"], ["z"])]
    graph = helper.make_graph(products, "b", [value("q", None)], [value("z", None)])
    axes = {"scan_input_axes": [1], "scan_output_axes": [-2]}
    scan = helper.make_node("Scan", ["x"], ["s"], body=graph, num_scan_inputs=1, **axes)
    last = numpy_helper.from_array(np.ones((B, 7), np.float32), "last")
    cost = cost_of(tmp_path, [scan, helper.make_node("MatMul", ["s", "last"], ["y"])], [value("x", [B, S, D])], last)
    assert cost.macs == S * B * D * B + B * S * B * 7
    # t and z of each run, s [B, S, B] and y [B, S, 7].
    assert cost.activation_bytes == 4 * (S * (D * B + B * B) + B * S * B + B * S * 7)


def test_bodies_in_the_domain_by_its_full_name_are_followed(tmp_path: Path) -> None:
    """`ai.onnx` is the domain that nobody writes."""
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["z"])], "b", [], [value("z", None)])
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph, domain="ai.onnx")]
    inputs = [value("x", ["batch", D]), value("c", [], TensorProto.BOOL)]
    assert cost_of(tmp_path, nodes, inputs).macs == B * D * 3


@pytest.mark.parametrize(
    ("axis", "size"), [(-1, S), ("past_sequence_length + 1", 1), ("past + sequence", S), ("", S), (0, 0), (7, 7)]
)
def test_an_axis_is_what_its_name_says(tmp_path: Path, axis: int | str, size: int) -> None:
    """There is no past; a negative size is how some exporters say that any will do."""
    cost = cost_of(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [value("x", ["batch", axis])])
    assert cost.activation_bytes == B * size * 4
