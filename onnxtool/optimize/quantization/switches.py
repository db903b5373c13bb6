"""A model with its linear layers in float32 and in fewer bits, and an input that selects between them.

One session measures any choice of layers; building and loading a model for each would take minutes.
Letters of shapes: M layers, L levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import replace
from onnxtool.graph.shapes import fill_types, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.quantization.activations import Feeds, open_written
from onnxtool.optimize.quantization.cpu_arithmetic import EXACT, by_arithmetic
from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.quantization.linear_layers import LinearLayer, find_linear_layers, unfuse_linear_layers
from onnxtool.runtime.session import Arrays, Session

_SWITCHES = "onnxtool.switches"


@dataclass(frozen=True)
class Level:
    """A precision of a layer.

    Attributes:
        precision: its name, such as `int8`.
        write: writes a layer in this precision and returns its result.
    """

    precision: str
    write: Callable[[LinearLayer, Writer], ir.Value]


@dataclass(frozen=True)
class SwitchableModel:
    """A session on a model with switches, and its reference outputs.

    Attributes:
        num_weights: the number of weights of each layer, by its name.
        precisions: the names of the levels, the lowest first.
        feeds: calibration inputs, each input name to array.
        expected: the outputs in float32, one per calibration input.
    """

    num_weights: Mapping[str, int]
    precisions: tuple[str, ...]
    feeds: Sequence[Feeds]
    expected: Sequence[Arrays]
    _session: Session

    def error(self, levels: Mapping[str, int], place: int) -> float:
        """Return the largest error (see `output_errors`) on the calibration inputs at `place`.

        Args:
            levels: the place of its level in `precisions` for each layer that is not in float32.
            place: which of `feeds`.
        """
        feeds = self.feeds[place]
        switches = np.zeros((len(self.precisions), len(self.num_weights)), np.float32)
        for column, name in enumerate(self.num_weights):
            if name in levels:
                switches[levels[name], column] = 1
        found = self._session.run({**feeds, _SWITCHES: switches.reshape(-1)})
        return float(output_errors(found, self.expected[place], padding_mask(feeds)).max(initial=0.0))


def open_switchable(
    model: ir.Model,
    levels: Sequence[Level],
    folder: Path,
    feeds: Sequence[Feeds],
    expected: Sequence[Arrays],
    arithmetic: str = EXACT,
) -> SwitchableModel:
    """Write `model` with switches to `folder` and open a session on it, which computes under an arithmetic."""
    model = model.clone()
    unfuse_linear_layers(model, frozenset(), find_shapes(model))
    fill_types(model)
    layers, _ = find_linear_layers(model)
    sizes = {layer.name: layer.num_weights for layer in layers}
    num_switches = len(levels) * len(sizes)
    switches = ir.Value(name=_SWITCHES, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([num_switches]))
    model.graph.inputs.append(switches)
    places = {name: place for place, name in enumerate(sizes)}
    for layer in layers:
        _write_switches(layer, levels, switches, range(places[layer.name], num_switches, len(sizes)))
    precisions = tuple(level.precision for level in levels)
    computed = by_arithmetic(model)
    session = open_written(computed.get(arithmetic, computed[EXACT]), folder)
    return SwitchableModel(sizes, precisions, feeds, expected, session)


def _write_switches(layer: LinearLayer, levels: Sequence[Level], switches: ir.Value, places: Sequence[int]) -> None:
    """Replace the result p of a layer by `p + switch * (int8 p - p)`, with one such term per level."""
    graph, last = layer.node.graph, layer.result.producer()
    if graph is None or last is None:
        raise ValueError(f"{layer.name} is in no graph")
    # First every consumer reads the new node, then the new node reads the layer.
    joint = ir.node("Identity", [None])
    graph.insert_after(last, joint)
    replace(layer.result, joint.outputs[0])
    layer.result.name = layer.result.name or f"{layer.name}_float32"  # an output of the graph has passed its name on
    writer = Writer(joint)
    total = layer.result
    for level, place in zip(levels, places, strict=True):
        quantized = level.write(layer, writer)
        switch = writer.node("Gather", [switches, writer.constant(np.array(place), f"onnxtool.place_{place}")])
        difference = writer.node("Sub", [quantized, layer.result])
        total = writer.node("Add", [total, writer.node("Mul", [switch, difference])], like=layer.result)
    joint.replace_input_with(0, total)
