"""Whether onnxruntime's products of integers are exact on this CPU."""

from __future__ import annotations

from functools import cache

# Larger sums of two neighbours do not fit 16 bits.
_ROWS, _WIDTH, _ACTIVATION, _WEIGHT = 4, 64, 255, 127

EXACT_PRODUCTS_OPTION = "session.x64quantprecision"
"""The option of a session that makes products of uint8 and int8 exact where they saturate; they take longer then."""


@cache
def products_saturate() -> bool:
    """Multiply the largest uint8 and int8, and return whether the result is too small.

    On x86 CPUs without VNNI, onnxruntime adds two products in 16 bits, where they saturate.
    """
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.full((_WIDTH, _WIDTH), _WEIGHT, np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [_ROWS, _WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [_ROWS, _WIDTH])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((_ROWS, _WIDTH), _ACTIVATION, np.uint8)})
    return bool((found != _WIDTH * _ACTIVATION * _WEIGHT).any())
