"""Compute the elements of values that follow only from shapes and small constants: how exporters compute sizes.

Even if a size is known only by name, or not at all, the operators that move elements show where each one goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import onnx
import onnx.helper
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxtool.graph.operators import WRONG, Size, Value

Numbers = dict[str, "NDArray[Any]"]

_COMPUTED = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor"}
    | {"Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg"}
    | {"Not", "Or", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape"}
    | {"ScatterND", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where", "Xor"}
)
BROADCASTING = frozenset(
    {"Add", "And", "Div", "Equal", "Expand", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod"}
    | {"Mul", "Or", "Pow", "Sub", "Where", "Xor"}
)
# Values that a Constant may hold instead of a tensor.
CONSTANT_DTYPES: dict[str, type[np.generic]] = {
    **dict.fromkeys(("value_int", "value_ints"), np.int64),
    **dict.fromkeys(("value_float", "value_floats"), np.float32),
}
# These move elements of their first input; Concat moves elements of all inputs.
_MOVING = frozenset({"Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


class Scope:
    """Knowledge about the values visible to a graph, by name.

    Attributes:
        values: shape and dtype of tensors.
        numbers: the elements of small tensors.
        sizes: the elements of small int64 tensors, some of which are axis names or unknown; dtype object.
        other_types: types of values that are not tensors, such as sequences.
    """

    def __init__(self, outer: Scope | None = None) -> None:
        self.values: dict[str, Value] = dict(outer.values) if outer else {}
        self.numbers: Numbers = dict(outer.numbers) if outer else {}
        self.sizes: Numbers = dict(outer.sizes) if outer else {}
        self.other_types: dict[str, onnx.TypeProto] = dict(outer.other_types) if outer else {}

    def keep(self, name: str, number: NDArray[Any]) -> None:
        """Record a value with its elements if they are numbers; with strings, a few additions would make gigabytes."""
        self.values[name] = Value(number.shape, onnx.helper.np_dtype_to_tensor_dtype(number.dtype))
        if number.dtype.kind in "biuf":
            self.numbers[name] = number

    def take(self, name: str, source: Scope, source_name: str) -> None:
        """Record under `name` what `source` knows about `source_name`, replacing what was known before."""
        for kind in ("values", "numbers", "sizes", "other_types"):
            known: dict[str, Any] = getattr(self, kind)
            known.pop(name, None)
            if source_name in getattr(source, kind):
                known[name] = getattr(source, kind)[source_name]


def is_small(shape: Sequence[Size], max_elements: int) -> bool:
    """Return whether a value should be computed; empty values count by their other axes, which a reduction may keep."""
    return prod(max(size, 1) for size in shape if isinstance(size, int)) <= max_elements


def compute(node: onnx.NodeProto, scope: Scope, version: int, max_elements: int) -> NDArray[Any] | None:
    """Return the elements a node computes from only shapes and numbers; None if it does something else.

    Args:
        node: a node of ONNX's own domain; nothing is computed for other domains.
        scope: the values it can read.
        version: the opset of ONNX's own domain, which determines whether axes are an input or an attribute.
        max_elements: larger values are not computed.
    """
    if node.domain or not node.output:
        return None
    if node.op_type == "Constant":
        return _constant(attributes_of(node), max_elements)
    if node.op_type in ("Shape", "Size"):
        value = scope.values.get(node.input[0])
        if value is None or not value.is_complete:
            return None
        if node.op_type == "Size":
            return np.array(prod(value.sizes), np.int64)
        return np.array(_slice_of(value.sizes, attributes_of(node)), np.int64)
    reads = reads_of(node)
    if node.op_type not in _COMPUTED or len(node.output) > 1 or any(name not in scope.numbers for name in reads):
        return None
    arrays = {name: scope.numbers[name] for name in reads}
    if not stays_small(node, arrays, max_elements):
        return None
    with suppress(*WRONG), np.errstate(all="ignore"):
        computed = evaluate(node, arrays, version)
        return computed if is_small(computed.shape, max_elements) and computed.dtype.kind in "biuf" else None
    return None


def move(node: onnx.NodeProto, scope: Scope, version: int) -> NDArray[Any] | None:
    """Return sizes, some of them names or unknown, as a node moves them; None if it does something else."""
    if node.domain:
        return None
    if node.op_type == "Shape":
        value = scope.values.get(node.input[0])
        if value is None or value.shape is None:
            return None
        return _objects(_slice_of(value.shape, attributes_of(node)))
    reads = reads_of(node)
    if not any(name in scope.sizes for name in reads):
        return None
    if node.op_type == "Cast":
        attributes = attributes_of(node)
        return scope.sizes[reads[0]] if attributes.get("to") in (TensorProto.INT32, TensorProto.INT64) else None
    if node.op_type not in _MOVING or len(node.output) > 1:
        return None
    moved = dict.fromkeys(reads if node.op_type == "Concat" else reads[:1])
    if any(name not in scope.numbers for name in reads if name not in moved):
        return None
    # The operator moves indices into a list of the elements.
    elements: list[Size] = []
    arrays = {name: scope.numbers[name] for name in reads if name not in moved}
    for name in moved:
        known = scope.sizes.get(name, scope.numbers.get(name))
        if known is None:
            return None
        arrays[name] = np.arange(len(elements), len(elements) + known.size).reshape(known.shape)
        elements.extend(known.reshape(-1).tolist())
    with suppress(*WRONG):
        places = evaluate(node, arrays, version)
        return _objects([elements[place] for place in places.reshape(-1).tolist()]).reshape(places.shape)
    return None


def _objects(sizes: Sequence[Size]) -> NDArray[Any]:
    array = np.empty(len(sizes), object)
    array[:] = list(sizes)
    return array


def evaluate(node: onnx.NodeProto, feeds: Numbers, version: int) -> NDArray[Any]:
    """Compute a single-output node with ONNX's reference implementation from its input arrays, keyed by name."""
    opsets = [helper.make_opsetid("", version)]  # for a bare node it would use the latest
    function = helper.make_function("", "one", list(feeds), list(node.output), [node], opsets)
    return np.asarray(ReferenceEvaluator(function).run(None, feeds, attributes={})[0])


def _slice_of(shape: Sequence[Any], attributes: Mapping[str, Any]) -> Sequence[Any]:
    """Return the part of `shape` that a Shape node selects."""
    return shape[attributes.get("start", 0) : attributes.get("end")]


def stays_small(node: onnx.NodeProto, arrays: Mapping[str, NDArray[Any]], max_elements: int) -> bool:
    """Return whether a node's result is small if its inputs, keyed by name, are a few numbers."""
    if node.op_type == "Range":
        start, limit, delta = (float(arrays[name]) for name in node.input)
        return bool(delta) and abs((limit - start) / delta) <= max_elements
    if node.op_type == "ConstantOfShape":
        return is_small([int(size) for size in arrays[node.input[0]].flat], max_elements)
    if node.op_type == "Concat":
        return sum(arrays[name].size for name in node.input) <= max_elements
    if node.op_type == "Gather":
        data, indices = (arrays[name] for name in node.input)
        axis = attributes_of(node).get("axis", 0)
        return is_small((*np.delete(data.shape, axis).tolist(), *indices.shape), max_elements)
    if node.op_type not in BROADCASTING:
        return True
    shapes = [arrays[name].shape for name in node.input]
    if node.op_type == "Expand":
        shapes[1] = tuple(int(size) for size in arrays[node.input[1]].flat)
    return is_small(np.broadcast_shapes(*shapes), max_elements)


def _constant(attributes: Mapping[str, Any], max_elements: int) -> NDArray[Any] | None:
    if "value" in attributes:
        tensor = attributes["value"]
        small = is_small(tensor.dims, max_elements) and not tensor.external_data
        return numpy_helper.to_array(tensor) if small else None
    for name, dtype in CONSTANT_DTYPES.items():
        if name in attributes:
            return np.asarray(attributes[name], dtype)
    return None


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes set on `node` itself, without graphs."""
    return {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in node.attribute
        if not attribute.ref_attr_name and not attribute.HasField("g")
    }


def reads_of(node: onnx.NodeProto) -> list[str]:
    """Return the inputs of `node` that are not omitted."""
    return [name for name in node.input if name]
