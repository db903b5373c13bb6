"""Which opsets the installed onnxruntime reads."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnxtool.runtime.providers import highest_opset


def load(opset: int) -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_the_highest_opset_is_read_and_the_next_is_not() -> None:
    """Asked with another operator than it was found out with."""
    load(highest_opset())
    if highest_opset() < onnx.defs.onnx_opset_version():
        with pytest.raises(Exception, match="opset"):
            load(highest_opset() + 1)
