"""Infer all shapes of a graph for given sizes of its dynamic axes, and the numbers that are computed from shapes.

ONNX's own inference follows a shape through few of the operators that exporters compute sizes with, and through none
that make a range of them. So what it finds is put into the graph as numbers, what can be computed from numbers is
computed, and it infers again, until there is nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

Shape = tuple[int | None, ...]
Numbers = dict[str, "NDArray[Any]"]

_MOST_ROUNDS = 4
_MOST_NUMBERS = 1 << 14  # of elements: a row of positions, not a mask
# What sizes are computed with.
_ON_NUMBERS = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor"}
    | {"Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg"}
    | {"Not", "Or", "Pow", "Range", "Reciprocal", "ReduceProd", "Reshape", "Sign", "Slice", "Sqrt", "Squeeze", "Sub"}
    | {"Unsqueeze", "Where", "Xor"}
)


@dataclass(frozen=True)
class Inferred:
    """What was found out about the values of a graph, by their names.

    Attributes:
        shapes: None stands for an axis of unknown size.
        dtypes: as in onnx.TensorProto.
        numbers: the values that are computed from shapes alone.
    """

    shapes: dict[str, Shape]
    dtypes: dict[str, int]
    numbers: Numbers


def infer(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> Inferred:
    """Infer shape and dtype of each value, and compute those that are numbers, with the dynamic axes at `sizes`."""
    import onnx

    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    for value in probe.graph.input:
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if not dimension.HasField("dim_value"):
                dimension.dim_value = sizes[dimension.dim_param or axis_name(value.name, axis)]
    # The exporter's own shapes are names, which would stand in the way of the numbers.
    del probe.graph.value_info[:]
    for value in probe.graph.output:
        value.type.tensor_type.ClearField("shape")
    result = Inferred({}, {}, {})
    for _ in range(_MOST_ROUNDS):
        _infer_once(probe, result)
        if not _compute_numbers(probe, result):
            break
    return result


def infer_dtypes(proto: onnx.ModelProto) -> Mapping[str, int]:
    """Infer the dtype of each value alone."""
    result = Inferred({}, {}, {})
    _infer_once(proto, result)
    return result.dtypes


def axis_name(name: str, axis: int) -> str:
    """Return what an axis of the input `name` is called that has no name of its own."""
    return f"{name}[{axis}]"


def _infer_once(proto: onnx.ModelProto, result: Inferred) -> None:
    import onnx

    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    # What fitted as long as a size was unknown may fit no more: a row of positions that is too short for the tokens.
    result.shapes.clear()
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        tensor = value.type.tensor_type
        result.dtypes[value.name] = tensor.elem_type
        if tensor.HasField("shape"):
            sizes = tuple(size.dim_value if size.HasField("dim_value") else None for size in tensor.shape.dim)
            result.shapes[value.name] = sizes
    for weight in inferred.initializer:
        result.shapes[weight.name], result.dtypes[weight.name] = tuple(weight.dims), weight.data_type


def _compute_numbers(proto: onnx.ModelProto, result: Inferred) -> bool:
    """Replace the nodes that compute numbers by initializers, and say whether there were any."""
    from onnx import numpy_helper

    numbers = result.numbers

    constants = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in proto.graph.initializer
        if tensor.name not in numbers and prod(tensor.dims) <= _MOST_NUMBERS and not tensor.external_data
    }
    left, found = [], False
    for node in proto.graph.node:
        value = _compute(node, result.shapes, constants | numbers if node.op_type != "Shape" else {})
        if value is None or value.size > _MOST_NUMBERS:
            left.append(node)
            continue
        numbers[node.output[0]] = value
        proto.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        found = True
    del proto.graph.node[:]
    proto.graph.node.extend(left)
    return found


def _compute(node: onnx.NodeProto, shapes: Mapping[str, Shape], known: Mapping[str, NDArray[Any]]) -> Any:
    """Return the array that a node computes from shapes or numbers; None where it does not, or where that is large."""
    import numpy as np
    from onnx.reference import ReferenceEvaluator

    if node.domain or not node.output:
        return None
    if node.op_type == "Shape":
        shape = shapes.get(node.input[0])
        if shape is None or None in shape:
            return None
        limits = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[limits.get("start", 0) : limits.get("end", len(shape))], np.int64)
    size = prod(size or 1 for size in shapes.get(node.output[0], ()))
    if node.op_type not in _ON_NUMBERS or size > _MOST_NUMBERS or any(n and n not in known for n in node.input):
        return None
    with suppress(ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):  # the graph itself may be wrong
        return np.asarray(ReferenceEvaluator(node).run(None, {name: known[name] for name in node.input if name})[0])
    return None
