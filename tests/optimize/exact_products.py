"""Products of int8 weights that are exact on every CPU, for comparisons with numbers that are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

# The place of the weight's zero point among the inputs; the weight itself is the second input of all of them.
_ZERO_POINTS = {"DynamicQuantizeMatMul": 3, "MatMulIntegerToFloat": 5, "MatMulInteger": 3}
_WEIGHT = 1
_OFFSET = 128


def with_exact_products(model: ir.Model) -> ir.Model:
    """Return `model` with every int8 weight `w` of a product stored as uint8 `w + 128` with a zero point 128 higher.

    The numbers are the same by ONNX's definition. onnxruntime's kernels for uint8 activations and int8 weights add two
    products in 16 bits on x86 CPUs without VNNI (AVX2 and AVX-512 alike), where they saturate; those for uint8 and
    uint8 are exact on all. See onnxruntime's quantization documentation, "Why do I need U8U8 or reduce_range".
    """
    if not any(value.dtype == ir.DataType.INT8 for value in model.graph.initializers.values()):
        return model
    model = model.clone()
    for node in list(model.graph):
        place = _ZERO_POINTS.get(node.op_type)
        if place is None:
            continue
        weight = node.inputs[_WEIGHT]
        if weight is None or weight.dtype != ir.DataType.INT8:
            continue
        zero = node.inputs[place] if place < len(node.inputs) else None
        node.resize_inputs(max(place + 1, len(node.inputs)))
        node.replace_input_with(_WEIGHT, _shifted(model.graph, weight))
        node.replace_input_with(place, _shifted(model.graph, zero))
    return model


def _shifted(graph: ir.Graph, value: ir.Value | None) -> ir.Value:
    """Return the initializer of an int8 one plus 128 in uint8; None is a zero point of 0."""
    name = f"{'no_zero_point' if value is None else value.name}_plus_{_OFFSET}"
    if name not in graph.initializers:
        array = np.zeros((), np.int8)
        if value is not None:
            assert value.const_value is not None, f"{value.name} is no initializer"
            array = value.const_value.numpy()
        shifted = (array.astype(np.int16) + _OFFSET).astype(np.uint8)
        graph.initializers[name] = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.UINT8),
            shape=ir.Shape(shifted.shape),
            const_value=ir.tensor(shifted, name=name),
        )
    return graph.initializers[name]
