"""What Loop and Scan give their bodies, how often these run, and what becomes of what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxtool.stats.contrib import Value
from onnxtool.stats.known import Names

if TYPE_CHECKING:
    import onnx

_MOST_TIMES = 1 << 31


def slices(given: Sequence[Value | None], attributes: Mapping[str, Any]) -> list[Value | None]:
    """Return what the body of a Scan reads: the states as they are, and a slice of each of the others."""
    states = len(given) - int(attributes["num_scan_inputs"])
    return [
        value
        if index < states or value is None
        else Value(_without(value.shape, _axis(attributes, "scan_input_axes", index - states)), value.dtype)
        for index, value in enumerate(given)
    ]


def times_of(node: onnx.NodeProto, names: Names, attributes: Mapping[str, Any]) -> int:
    """Return how often a body runs: once where only running the model would tell."""
    if node.op_type == "Scan":
        scanned, number = names.values.get(node.input[-1]), int(attributes["num_scan_inputs"])
        return 1 if scanned is None else scanned.shape[_axis(attributes, "scan_input_axes", number - 1)]
    if node.op_type == "Loop" and node.input[0] in names.numbers:
        return max(0, min(int(names.numbers[node.input[0]].flat[0]), _MOST_TIMES))
    return 1


def collected(
    node: onnx.NodeProto, outputs: list[Value | None], attributes: Mapping[str, Any], times: int
) -> list[Value | None]:
    """Return the outputs of the node from those of its body: what is scanned has an axis for the runs in front."""
    if node.op_type == "If":
        return outputs
    states = len(node.input) - (2 if node.op_type == "Loop" else int(attributes["num_scan_inputs"]))
    outputs = outputs[1:] if node.op_type == "Loop" else outputs
    return [
        value
        if value is None or index < states
        else Value(_with(value.shape, _axis(attributes, "scan_output_axes", index - states), times), value.dtype)
        for index, value in enumerate(outputs)
    ]


def _axis(attributes: Mapping[str, Any], name: str, index: int) -> int:
    """Return the axis along which a Scan takes or gives its slices; a Loop gives them along the first."""
    axes = attributes.get(name)
    return int(axes[index]) if axes else 0


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    sizes = list(shape)
    del sizes[axis]
    return tuple(sizes)


def _with(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    place = axis + len(shape) + 1 if axis < 0 else axis
    return (*shape[:place], size, *shape[place:])
