"""What is known of the values of a graph: shapes, and the numbers that are computed from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

from onnxtool.stats.contrib import Value

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

MOST_NUMBERS = 1 << 12  # elements of a value that is computed rather than only known by its shape
# What exporters compute sizes with.
_ON_NUMBERS = frozenset(
    {"Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor"}
    | {"Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg"}
    | {"Not", "Or", "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "ScatterND"}
    | {"Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where", "Xor"}
)
_ELEMENTWISE = frozenset(
    {"Add", "And", "Div", "Equal", "Expand", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod"}
    | {"Mul", "Or", "Pow", "Sub", "Where", "Xor"}
)
# What fails where a graph is wrong, or is none that these rules foresee.
WRONG = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Names:
    """What is known of the values that a graph can see, by their names."""

    def __init__(self, outer: Names | None = None) -> None:
        self.values: dict[str, Value] = dict(outer.values) if outer else {}
        self.numbers: dict[str, NDArray[Any]] = dict(outer.numbers) if outer else {}

    def keep(self, name: str, number: NDArray[Any]) -> None:
        """Note a value with its elements, where they are numbers: of texts, a few additions make gigabytes."""
        import onnx.helper

        self.values[name] = Value(number.shape, onnx.helper.np_dtype_to_tensor_dtype(number.dtype))
        if number.dtype.kind in "biuf":
            self.numbers[name] = number


def is_small(shape: Sequence[int]) -> bool:
    """Whether a value is one to compute; of an empty one the other axes count as well, as a reduction keeps those."""
    return prod(max(size, 1) for size in shape) <= MOST_NUMBERS


def compute(node: onnx.NodeProto, names: Names, version: int) -> NDArray[Any] | None:
    """Return the elements of what a node computes from shapes and numbers alone; None where it does not.

    Args:
        node: of ONNX's own domain, or of another one, of which nothing is computed.
        names: what it can read.
        version: the opset of ONNX's own domain, which says whether axes are an input or an attribute.
    """
    import numpy as np
    from onnx import helper, numpy_helper
    from onnx.reference import ReferenceEvaluator

    if node.domain not in ("", "ai.onnx") or not node.output:
        return None
    attributes = attributes_of(node)
    if node.op_type == "Constant":
        return _constant(attributes, numpy_helper.to_array)
    if node.op_type in ("Shape", "Size"):
        value = names.values.get(node.input[0])
        if value is None:
            return None
        shape = np.array(value.shape[attributes.get("start", 0) : attributes.get("end")], np.int64)
        return shape if node.op_type == "Shape" else np.array(prod(value.shape), np.int64)
    if (
        node.op_type not in _ON_NUMBERS
        or len(node.output) > 1
        or any(name not in names.numbers for name in reads_of(node))
    ):
        return None
    given = {name: names.numbers[name] for name in reads_of(node)}
    if not _stays_small(node, given, attributes):
        return None
    opsets = [helper.make_opsetid("", version)]  # of a bare node it would take the latest
    function = helper.make_function("", "one", list(given), list(node.output), [node], opsets)
    with suppress(*WRONG), np.errstate(all="ignore"):
        computed = np.asarray(ReferenceEvaluator(function).run(None, given, attributes={})[0])
        return computed if is_small(computed.shape) and computed.dtype.kind in "biuf" else None
    return None


def _stays_small(node: onnx.NodeProto, given: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> bool:
    """Whether what a node makes of a few numbers are a few numbers again."""
    import numpy as np

    if node.op_type == "Range":
        start, limit, delta = (float(given[name]) for name in node.input)
        return bool(delta) and abs((limit - start) / delta) <= MOST_NUMBERS
    if node.op_type == "ConstantOfShape":
        return is_small([int(size) for size in given[node.input[0]].flat])
    if node.op_type == "Concat":
        return sum(given[name].size for name in node.input) <= MOST_NUMBERS
    if node.op_type == "Gather":
        data, indices = (given[name] for name in node.input)
        axis = attributes.get("axis", 0)
        return is_small((*np.delete(data.shape, axis), *indices.shape))
    if node.op_type not in _ELEMENTWISE:
        return True
    shapes = [given[name].shape for name in node.input]
    if node.op_type == "Expand":
        shapes[1] = tuple(int(size) for size in given[node.input[1]].flat)
    return is_small(np.broadcast_shapes(*shapes))


def _constant(attributes: Mapping[str, Any], to_array: Any) -> NDArray[Any] | None:
    import numpy as np

    if "value" in attributes:
        tensor = attributes["value"]
        return to_array(tensor) if is_small(tensor.dims) and not tensor.external_data else None
    for name, dtype in (
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_float", np.float32),
        ("value_floats", np.float32),
    ):
        if name in attributes:
            return np.asarray(attributes[name], dtype)
    return None


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of `node` that it has itself, without graphs."""
    import onnx.helper

    return {
        attribute.name: onnx.helper.get_attribute_value(attribute)
        for attribute in node.attribute
        if not attribute.ref_attr_name and not attribute.HasField("g")
    }


def reads_of(node: onnx.NodeProto) -> list[str]:
    """Return the inputs of `node` that are not left out."""
    return [name for name in node.input if name]
