"""What Loop and Scan give their bodies, how often these run, and what becomes of what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from onnxtool.graph.elements import Scope
from onnxtool.graph.operator_rules import Shape, Size, Value

_MOST_TIMES = 1 << 31


def slices(given: Sequence[Value | None], attributes: Mapping[str, Any]) -> list[Value | None]:
    """Return what the body of a Scan reads: the states as they are, and a slice of each of the others."""
    states = len(given) - int(attributes["num_scan_inputs"])
    return [
        value
        if index < states or value is None or value.shape is None
        else Value(_without(value.shape, _axis(attributes, "scan_input_axes", index - states)), value.dtype)
        for index, value in enumerate(given)
    ]


def times_of(node: onnx.NodeProto, scope: Scope, attributes: Mapping[str, Any]) -> Size:
    """Return how often a body runs: once for that of an If, None where only running the model would tell."""
    if node.op_type == "Scan":
        scanned, number = scope.values.get(node.input[-1]), int(attributes["num_scan_inputs"])
        return None if scanned is None else scanned.dims[_axis(attributes, "scan_input_axes", number - 1)]
    if node.op_type == "Loop":
        if node.input[0] not in scope.numbers:
            return None
        return max(0, min(int(scope.numbers[node.input[0]].flat[0]), _MOST_TIMES))
    return 1


def collected(
    node: onnx.NodeProto, outputs: Sequence[Value | None], attributes: Mapping[str, Any], times: Size
) -> list[Value | None]:
    """Return the outputs of the node from those of its body: what is scanned has an axis for the runs in front."""
    if node.op_type == "If":
        return list(outputs)
    states = len(node.input) - (2 if node.op_type == "Loop" else int(attributes["num_scan_inputs"]))
    outputs = outputs[1:] if node.op_type == "Loop" else outputs
    return [
        value
        if value is None or value.shape is None or index < states
        else Value(_with(value.shape, _axis(attributes, "scan_output_axes", index - states), times), value.dtype)
        for index, value in enumerate(outputs)
    ]


def common(values: Sequence[Value | None]) -> Value | None:
    """Return what holds for a value that is one of several; None where that is nothing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values) or len({value.dtype for value in known}) > 1:
        return None
    shapes = [value.shape for value in known if value.shape is not None]
    if len(shapes) < len(known) or len({len(shape) for shape in shapes}) > 1:
        return Value(None, known[0].dtype)
    sizes = [set(sizes) for sizes in zip(*shapes, strict=True)]
    return Value(tuple(one.pop() if len(one) == 1 else None for one in sizes), known[0].dtype)


def _axis(attributes: Mapping[str, Any], name: str, index: int) -> int:
    """Return the axis along which a Scan takes or gives its slices; a Loop gives them along the first."""
    axes = attributes.get(name)
    return int(axes[index]) if axes else 0


def _without(shape: Shape, axis: int) -> Shape:
    sizes = list(shape)
    del sizes[axis]
    return tuple(sizes)


def _with(shape: Shape, axis: int, size: Size) -> Shape:
    place = axis + len(shape) + 1 if axis < 0 else axis
    return (*shape[:place], size, *shape[place:])
