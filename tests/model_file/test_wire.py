"""The structure that wire.py reads is the one that onnx reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxtool.model_file.wire import Structure, encode_metadata, read_nodes, read_structure
from tests.graphs import identity, make_model, value
from tests.model_file.protobuf import read


def graphs_of(graph: Any) -> Iterator[Any]:
    """Yield `graph` and every graph inside its nodes, as onnx has them."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from graphs_of(inner)


def dimension_of(dim: Any) -> int | str | None:
    field = dim.WhichOneof("value")
    return None if field is None else getattr(dim, field) or (0 if field == "dim_value" else None)


def signature_of(values: Any) -> list[tuple[str, str, tuple[int | str | None, ...]]]:
    return [
        (
            item.name,
            helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type).name,
            tuple(dimension_of(dim) for dim in item.type.tensor_type.shape.dim),
        )
        for item in values
    ]


def assert_same_structure(structure: Structure, model: Any) -> None:
    """Compare every field with what onnx says."""
    graphs = list(graphs_of(model.graph))
    initialized = {tensor.name for tensor in model.graph.initializer}
    domains = ("", "ai.onnx")
    ops = Counter(
        node.op_type if node.domain in domains else f"{node.domain}::{node.op_type}"
        for graph in graphs
        for node in graph.node
    )
    assert structure.ir_version == model.ir_version
    assert structure.producer == f"{model.producer_name} {model.producer_version}".strip()
    assert structure.opsets == {item.domain or "ai.onnx": item.version for item in model.opset_import}
    assert structure.metadata == {item.key: item.value for item in model.metadata_props}
    assert structure.ops == ops
    assert list(structure.ops) == sorted(ops, key=lambda op: (-ops[op], op))
    assert structure.num_nodes == sum(len(graph.node) for graph in graphs)
    assert structure.num_subgraphs == len(graphs) - 1
    assert len(structure.functions) == len(model.functions)
    inputs = [item for item in model.graph.input if item.name not in initialized]
    assert [(item.name, item.dtype, item.shape) for item in structure.inputs] == signature_of(inputs)
    assert [(item.name, item.dtype, item.shape) for item in structure.outputs] == signature_of(model.graph.output)
    assert sorted((tensor.name, tensor.dtype, tensor.dims) for tensor in structure.initializers) == sorted(
        (tensor.name, helper.tensor_dtype_to_np_dtype(tensor.data_type).name, tuple(tensor.dims))
        for graph in graphs
        for tensor in graph.initializer
    )


def test_a_plain_model_reads_as_onnx_reads_it(tmp_path: Path) -> None:
    """Versions, opsets, producer, inputs with named and unknown dims, outputs and operators agree with onnx."""
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("FusedGelu", ["h"], ["g"], domain="com.microsoft"),
            helper.make_node("Add", ["g", "b"], ["y"], domain="ai.onnx"),
            helper.make_node("MatMul", ["x", "w"], ["unused"]),
        ],
        [
            numpy_helper.from_array(np.ones((3, 4), np.float32), "w"),
            numpy_helper.from_array(np.ones(4, np.float32), "b"),
        ],
        inputs=[value("x", ["batch", 3]), value("w", [3, 4]), value("ids", [None, 0, 7], TensorProto.INT64)],
    )
    helper.set_model_props(model, {"zeta": "ü", "alpha": ""})
    structure = read(model, tmp_path)
    assert_same_structure(structure, onnx.load(tmp_path / "model.onnx"))
    assert structure.inputs[0].shape == ("batch", 3)
    assert structure.inputs[1].shape == (None, 0, 7)
    assert structure.ops == {"MatMul": 2, "Add": 1, "com.microsoft::FusedGelu": 1}


def test_nodes_of_nested_graphs_count(tmp_path: Path) -> None:
    """Bodies of If within If are counted with their nodes and initializers, and shadow no input."""
    weight = numpy_helper.from_array(np.ones((2, 2), np.float32), "inner_w")
    shadow = numpy_helper.from_array(np.ones(1, np.float32), "x")
    innermost = helper.make_graph([identity("c")], "innermost", [], [value("c_out", [1])], [weight])
    inner_if = helper.make_node("If", ["cond"], ["z"], then_branch=innermost, else_branch=innermost)
    then = helper.make_graph([inner_if, identity("a")], "then", [], [value("z", [1])], [shadow])
    other = helper.make_graph([identity("b")], "else", [], [value("b_out", [1])])
    model = make_model([helper.make_node("If", ["cond"], ["y"], then_branch=then, else_branch=other)])
    structure = read(model, tmp_path)
    assert_same_structure(structure, model)
    assert structure.ops == {"Identity": 4, "If": 2}
    assert structure.num_subgraphs == 4
    assert sorted(tensor.name for tensor in structure.initializers) == ["inner_w", "inner_w", "x"]
    assert [info.name for info in structure.inputs] == ["x"]


def test_a_list_of_graphs_counts_as_well(tmp_path: Path) -> None:
    """An attribute may hold several graphs; all of them count."""
    body = helper.make_graph([identity("a")], "body", [], [value("a_out", [1])])
    node = helper.make_node("Scan", ["x"], ["y"], domain="local", bodies=[body, body, body])
    structure = read(make_model([node]), tmp_path)
    assert structure.ops == {"Identity": 3, "local::Scan": 1}
    assert structure.num_subgraphs == 3


def test_negative_numbers_are_twos_complement(tmp_path: Path) -> None:
    """A negative opset and a negative dimension come out as onnx reads them."""
    model = make_model([identity("n")], inputs=[value("x", [-2, 3])])
    model.opset_import[1].version = -7
    structure = read(model, tmp_path)
    assert structure.inputs[0].shape == (-2, 3)
    assert_same_structure(structure, model)


def test_a_dimension_of_minus_one_is_of_any_size(tmp_path: Path) -> None:
    """Some exporters write it so, and onnxruntime reads it so; inputs that are made for it have a size."""
    model = make_model([identity("n")], inputs=[value("x", [-1, 3])])
    assert read(model, tmp_path).inputs[0].shape == (None, 3)


def test_a_value_that_is_no_tensor_says_what_it_is(tmp_path: Path) -> None:
    """Sequences, optionals and maps have as dtype what they hold as well, and the shape of the tensors in them."""
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    kinds = {
        "sequence": helper.make_sequence_type_proto(tensor),
        "optional": helper.make_optional_type_proto(tensor),
        "map": helper.make_map_type_proto(TensorProto.INT64, tensor),
        "sparse_tensor": helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [2]),
    }
    inputs = [helper.make_value_info(name, kind) for name, kind in kinds.items()]
    structure = read(make_model([identity("n")], inputs=inputs), tmp_path)
    assert {info.name: (info.dtype, info.shape) for info in structure.inputs} == {
        "sequence": ("sequence(float32)", (2,)),
        "optional": ("optional(float32)", (2,)),
        "map": ("map(int64, float32)", (2,)),
        "sparse_tensor": ("sparse_tensor", ()),
    }


def test_nodes_come_in_order_with_names_and_holes(tmp_path: Path) -> None:
    """read_nodes yields the main graph's nodes in order; an input that is left out is an empty string."""
    model = make_model(
        [
            helper.make_node("Clip", ["x", "", "high"], ["c"], name="clip"),
            helper.make_node("Gelu", ["c"], ["y"], name="gelu", domain="com.microsoft"),
        ]
    )
    read(model, tmp_path)
    found = [tuple(node) for node in read_nodes(tmp_path / "model.onnx")]
    assert found == [
        (node.op_type, node.domain, node.name, tuple(node.input), tuple(node.output)) for node in model.graph.node
    ]


def test_appended_metadata_is_read_by_onnx(tmp_path: Path) -> None:
    """Bytes of encode_metadata after a model are its metadata, for onnx and for wire."""
    entries = {"short": "value", "long": "ä" * 5000, "empty": ""}
    path = tmp_path / "model.onnx"
    path.write_bytes(make_model([identity("n")]).SerializeToString() + encode_metadata(entries))
    assert {item.key: item.value for item in onnx.load(path).metadata_props} == entries
    assert read_structure(path).metadata == entries
