"""Measure how large the values inside a model become, by running it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.quantization.activations import Feeds, open_written

_PREFIX = "onnxtool.range/"


def measure_ranges(model: ir.Model, feeds: Iterable[Feeds], folder: Path) -> dict[str, float]:
    """Run `model` on `feeds` and return the largest absolute value of each of its float32 values, by name.

    Inputs count as well: a mask may hold the lowest number. An infinity or NaN among them counts as infinite. A copy
    of the model is written into `folder` and removed again.
    """
    probed = model.clone()
    names = _instrument(probed)
    largest = dict.fromkeys(names, 0.0)
    session = open_written(probed, folder)
    del probed
    for feed in feeds:
        outputs = session.run(feed)
        for name in names:
            found = float(outputs[_PREFIX + name])
            if found != -np.inf:  # the maximum of no elements, such as the keys before the first token
                largest[name] = max(largest[name], found) if np.isfinite(found) else float("inf")
    return largest


def beyond(ranges: Mapping[str, float], limit: float, least: float = 0.0) -> tuple[str, ...]:
    """Return the names of values larger than `limit`, or other than zero and below `least`, the largest first."""
    found = (name for name, size in ranges.items() if size > limit or 0 < size < least)
    return tuple(sorted(found, key=lambda name: -ranges[name]))


def _instrument(model: ir.Model) -> Sequence[str]:
    """Add an output to `model` for each float32 input and result of a node: its largest absolute value, float32 []."""
    graph, writer = model.graph, Writer(model.graph)
    dtypes = find_shapes(model).dtypes
    made = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    measured = [v for v in made if v.name and not v.is_initializer() and dtypes.get(v.name) == ir.DataType.FLOAT.value]
    for value in measured:
        output = writer.op("ReduceMax", writer.op("Abs", value), keepdims=0)
        output.name, output.dtype, output.shape = _PREFIX + str(value.name), ir.DataType.FLOAT, ir.Shape([])
        graph.outputs.append(output)
    return [str(value.name) for value in measured]
