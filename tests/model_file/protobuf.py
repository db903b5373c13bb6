"""Models as bytes: fields of protobuf, and a model with a field of every kind that the reader looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxtool.model_file.wire import Structure, read_structure
from tests.graphs import identity, make_model, value


def read(model: Any, folder: Path) -> Structure:
    """Write a model to model.onnx, and read its structure."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return read_structure(path)


def varint(number: int) -> bytes:
    """Encode a number."""
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, content: bytes | int) -> bytes:
    """Encode a field: a number, or bytes with their length."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def everything() -> Any:
    """A model with a field of every kind that the reader looks at."""
    weight = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "bert.layer.0.weight")
    typed = helper.make_tensor("typed", TensorProto.INT64, [2], [1, 300])
    body = helper.make_graph([identity("/bert/layer.1/n")], "body", [], [value("o", [1])], [weight])
    nodes = [
        helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body),
        helper.make_node("Constant", [], ["k"], value=typed),
        helper.make_node("Gelu", ["y"], ["z"], name="/bert/layer.0/Gelu", domain="com.microsoft"),
    ]
    nodes[2].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'bert', 'bert.layer.3', 'n']")
    sparse = helper.make_sparse_tensor(weight, numpy_helper.from_array(np.zeros(6, np.int64), "i"), [9])
    function = helper.make_function("f", "F", ["a"], ["b"], [identity("a", "a")], [helper.make_opsetid("", 20)])
    text = helper.make_tensor("text", TensorProto.STRING, [1], ["hello"])
    model = make_model(nodes, [weight, typed, text], [sparse], [function], [value("x", ["batch", 3, None])])
    model.graph.value_info.append(value("y", [2, "n"]))
    model.graph.quantization_annotation.add(tensor_name="y").quant_parameter_tensor_names.add(key="S", value="s")
    model.training_info.append(helper.make_training_info(body, [("a", "b")], None, None))
    model.graph.metadata_props.add(key="graph", value="is not the model's")
    helper.set_model_props(model, {"onnxtool.steps": '[{"step":"export"}]'})
    return model
