"""Values of inputs that an operator takes few of: shapes, axes, steps, scales and thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.model_file.wire import Node
from onnxtool.reports import TensorInfo

_SHAPE, _RATIO, _PARTS, _PLACES = "shape", "ratio", "parts", "places"
# By operator and place: the shape that the graph declares for its output, that over the shape of its first input, the
# parts that it is split in, one axis after another, or a number.
_OPERANDS: Mapping[tuple[str, int], str | float] = {
    ("ConstantOfShape", 0): _SHAPE,
    ("CumProd", 1): 0,
    ("CumSum", 1): 0,
    ("Expand", 1): _SHAPE,
    ("MaxUnpool", 2): _SHAPE,
    ("NonMaxSuppression", 3): 0.5,
    ("NonMaxSuppression", 4): 0.5,
    ("Reshape", 1): _SHAPE,
    ("Resize", 2): _RATIO,
    ("Resize", 3): _SHAPE,
    ("Slice", 2): 2,
    ("Slice", 3): _PLACES,
    ("Slice", 4): 1,
    ("Split", 1): _PARTS,
    ("SplitToSequence", 1): 1,
    ("Squeeze", 1): _PLACES,
    ("Unsqueeze", 1): _PLACES,
    ("Upsample", 1): _RATIO,
}


def with_operands(
    feeds: Mapping[str, NDArray[Any]],
    uses: Mapping[str, Sequence[tuple[Node, int]]],
    outputs: Sequence[TensorInfo],
) -> dict[str, NDArray[Any]]:
    """Replace the inputs among `feeds` whose operator takes few values; one whose values cannot be told stays."""
    shapes = {info.name: info.shape for info in outputs}
    found = dict(feeds)
    for name, array in feeds.items():
        for node, place in uses.get(name, ()):
            rule = _OPERANDS.get((node.op_type, place))
            if rule is None or node.inputs[place] != name:
                continue
            value = _value(rule, array, feeds.get(node.inputs[0]), [shapes.get(output, ()) for output in node.outputs])
            if value is not None and value.shape == array.shape:
                found[name] = value.astype(array.dtype)
                break
    return found


def _value(
    rule: str | float, array: NDArray[Any], data: NDArray[Any] | None, outputs: Sequence[Sequence[Any]]
) -> NDArray[Any] | None:
    if not isinstance(rule, str):
        return np.full(array.shape, rule)
    if rule == _PLACES:
        return np.arange(array.size).reshape(array.shape)
    if not all(isinstance(size, int) for shape in outputs for size in shape):
        return None
    if rule == _SHAPE:  # some take the last axes alone
        return np.array(outputs[0][-array.size :])
    if data is None or any(len(shape) != data.ndim for shape in outputs):
        return None
    if rule == _RATIO:
        return np.asarray(np.array(outputs[0]) / np.array(data.shape))[-array.size :]
    sums = np.sum(np.array(outputs), axis=0)
    axis = next((axis for axis, size in enumerate(data.shape) if sums[axis] == size), None)
    return None if axis is None else np.array([shape[axis] for shape in outputs])
