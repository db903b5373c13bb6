"""Sound graphs with what tiny exports lack: control flow, functions, sequences, training, QDQ."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def by_hand() -> dict[str, onnx.ModelProto]:
    """Return the graphs by name."""
    weight = numpy_helper.from_array(np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3), "w")
    made = {
        "mlp": _model(
            [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])], [weight]
        ),
        "function": _with_function(weight),
    }
    branch = helper.make_graph([helper.make_node("Neg", ["x"], ["n"])], "neg", [], [_value("n")])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["o"])], "id", [], [_value("o")])
    made["if"] = _model(
        [
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Greater", ["s", "zero"], ["c"]),
            helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other),
        ],
        [numpy_helper.from_array(np.float32(0), "zero")],
    )
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Mul", ["v", "v"], ["u"])],
        "body",
        [_value("i", TensorProto.INT64, []), _value("c", TensorProto.BOOL, []), _value("v")],
        [_value("d", TensorProto.BOOL, []), _value("u")],
    )
    made["loop"] = _model(
        [helper.make_node("Loop", ["n", "t", "x"], ["y"], body=body)],
        [numpy_helper.from_array(np.array(3), "n"), numpy_helper.from_array(np.array(True), "t")],
    )
    made["sequence"] = _model(
        [
            helper.make_node("SequenceConstruct", ["x", "x"], ["q"]),
            helper.make_node("ConcatFromSequence", ["q"], ["y"], axis=0),
        ],
        [],
    )
    made["qdq"] = _model(
        [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
            helper.make_node("DequantizeLinear", ["wq", "scale"], ["wd"]),
            helper.make_node("MatMul", ["d", "wd"], ["y"]),
        ],
        [
            numpy_helper.from_array(np.float32(0.1), "scale"),
            numpy_helper.from_array(np.uint8(128), "zero"),
            numpy_helper.from_array(np.ones((3, 3), np.int8), "wq"),
        ],
    )
    return made


def _with_function(weight: onnx.TensorProto) -> onnx.ModelProto:
    model = _model([helper.make_node("Layer", ["x", "w"], ["y"], domain="local")], [weight])
    nodes = [helper.make_node("MatMul", ["a", "b"], ["m"]), helper.make_node("Tanh", ["m"], ["r"])]
    model.functions.append(
        helper.make_function("local", "Layer", ["a", "b"], ["r"], nodes, [helper.make_opsetid("", 18)])
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def _value(name: str, dtype: int = TensorProto.FLOAT, shape: list[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto]) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", [_value("x", shape=["batch", 3])], [_value("y")], initializers)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
