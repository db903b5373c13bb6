"""A summary says what is in a file, and how much of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnxtool.errors import ModelFileError
from onnxtool.reports import Stats, TensorInfo
from onnxtool.summary import summarize_model
from tests.graphs import identity, make_model, refer_to, save_external, value


def test_every_figure_of_a_small_model(tmp_path: Path) -> None:
    """All figures of a model with a subgraph, duplicates and metadata, counted by hand."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    body = helper.make_graph([identity("a")], "body", [], [value("a_out", [1])])
    nodes = [
        helper.make_node("Gelu", ["x"], ["g"], domain="com.microsoft"),
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
    ]
    initializers = [
        numpy_helper.from_array(weight, "w"),
        numpy_helper.from_array(weight, "tied"),
        numpy_helper.from_array(np.array([1, 2, 3], np.int64), "shape"),
        numpy_helper.from_array(np.array(True), "c"),
    ]
    model = make_model(nodes, initializers)
    helper.set_model_props(model, {"b": "2", "a": "1"})
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert summarize_model(path) == Stats(
        path=str(path),
        size_bytes=path.stat().st_size,
        ir_version=10,
        producer="maker 1.2",
        opsets={"ai.onnx": 20, "com.microsoft": 1},
        num_nodes=4,
        num_inputs=1,
        num_outputs=1,
        num_initializers=4,
        num_parameters=6 + 6 + 3 + 1,
        inputs=(TensorInfo("x", "float32", ("batch", 3)),),
        outputs=(TensorInfo("y", "float32", ("batch", None)),),
        ops={"Identity": 2, "If": 1, "com.microsoft::Gelu": 1},
        metadata={"a": "1", "b": "2"},
        initializer_bytes={"float32": 48, "int64": 24, "bool": 1},
        duplicate_bytes=24,
        num_functions=0,
        num_subgraphs=2,
    )


def test_external_data_belongs_to_the_size(tmp_path: Path) -> None:
    """The size is that of the graph file and its external data."""
    path = tmp_path / "model.onnx"
    save_external(path, 1.0, "weights.bin")
    sizes = [(tmp_path / name).stat().st_size for name in ("model.onnx", "weights.bin")]
    assert summarize_model(path).size_bytes == sum(sizes)


def test_missing_external_data_is_an_error(tmp_path: Path) -> None:
    """A model without its data has no size, and is refused."""
    refer_to(tmp_path / "model.onnx", "weights.bin")
    with pytest.raises(ModelFileError, match="missing"):
        summarize_model(tmp_path / "model.onnx")


def test_the_order_is_the_same_on_every_run(tmp_path: Path) -> None:
    """Operators come by count and name, dtypes by bytes and name, domains and metadata by name."""
    names = ["Sub", "Add", "Mul", "Add"]
    model = make_model(
        [helper.make_node(op, ["x", "x"], [f"o{index}"]) for index, op in enumerate(names)],
        [numpy_helper.from_array(np.zeros(8, dtype), dtype) for dtype in ("int8", "float32", "int32", "bool")],
    )
    onnx.save(model, tmp_path / "model.onnx")
    stats = summarize_model(tmp_path / "model.onnx")
    assert list(stats.ops) == ["Add", "Mul", "Sub"]
    assert list(stats.initializer_bytes) == ["float32", "int32", "bool", "int8"]
    assert list(stats.opsets) == ["ai.onnx", "com.microsoft"]
