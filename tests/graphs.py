"""Small ONNX graphs for the tests, made with onnx.helper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

SIZE = 128  # onnx_ir keeps tensors of up to 256 bytes in the graph file
NUM_BYTES = SIZE * 4


def identity(name: str, source: str = "x", **attributes: object) -> Any:
    return helper.make_node("Identity", [source], [f"{name}_out"], name=name, **attributes)


def value(name: str, shape: list[int | str | None] | None, dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def make_model(
    nodes: list[Any],
    initializers: list[Any] | None = None,
    sparse: list[Any] | None = None,
    functions: list[Any] | None = None,
    inputs: list[Any] | None = None,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "graph",
        inputs if inputs is not None else [value("x", ["batch", 3])],
        [value("y", ["batch", None])],
        initializer=initializers,
        sparse_initializer=sparse,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        graph, opset_imports=opsets, functions=functions, producer_name="maker", producer_version="1.2", ir_version=10
    )


def of_text(graph: str, arrays: Mapping[str, Any] | None = None, opset: int = 18) -> onnx.ModelProto:
    """Return the model of `name (inputs) => (outputs) <constants> { nodes }`, with `arrays` as initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]> {graph}')
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (arrays or {}).items()]
    model.graph.initializer.extend(tensors)
    return model


def save_text(path: Path, graph: str, arrays: Mapping[str, Any] | None = None, opset: int = 18) -> Path:
    """Write the model of a graph in ONNX's text form; see `of_text`."""
    onnx.save(of_text(graph, arrays, opset), path)
    return path


def external_tensor(name: str, entries: dict[str, str], dims: tuple[int, ...] = (2, 3)) -> Any:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


def make_addition(weight: float) -> Any:
    """Make `y = x + w` with w: float32 [N], all of them `weight`."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [SIZE])],
        [numpy_helper.from_array(np.full(SIZE, weight, np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def save_external(path: Path, weight: float, location: str) -> None:
    onnx.save(make_addition(weight), path, save_as_external_data=True, location=location, size_threshold=0)


def refer_to(path: Path, location: str, length: int | None = NUM_BYTES) -> None:
    """Write a model whose weight lies at `location`, which need not exist."""
    model = make_addition(0.0)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    if length is not None:
        tensor.external_data.add(key="length", value=str(length))
    path.write_bytes(model.SerializeToString())


def weight_of(path: Path) -> float:
    """Return the weight of a model of `make_model`, read by onnx with its external data."""
    return float(numpy_helper.to_array(onnx.load(path).graph.initializer[0])[0])


def run(path: Path) -> float:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return float(session.run(None, {"x": np.zeros(SIZE, np.float32)})[0][0])


def save_operators(path: Path, ops: list[str], inputs: list[Any] | None = None) -> None:
    """Write a model with a node for each of `ops`, e.g. `com.microsoft::Gelu`, and two equal weights."""
    nodes = [
        helper.make_node(op.rpartition(":")[2], ["x"], [f"o{index}"], domain=op.rpartition("::")[0])
        for index, op in enumerate(ops)
    ]
    weights = [numpy_helper.from_array(np.ones(1000, np.float32), name) for name in ("w", "tied")]
    onnx.save(make_model(nodes, weights, inputs=inputs), path)
