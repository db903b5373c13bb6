"""Compute sizes from the inputs of the graph once, instead of from hidden states in every layer.

Exporters write a Shape wherever the model reads one, and compute the targets of Reshape and Expand from it with a dozen
nodes. Nearly all of these numbers are input sizes or constants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import producer, remove_unused
from onnxtool.graph.shapes import Shapes, dynamic_axes, find_shapes, named_axes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_LONGEST = 8  # a longer row holds positions, not sizes


@dataclass
class _WrittenSizes:
    """Write each size once at the start of a graph.

    Attributes:
        written: the values written so far, by axis names and numbers, and whether they are a vector.
    """

    model: ir.Model
    writer: Writer
    written: dict[tuple[tuple[int | str, ...], bool], ir.Value] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names that can be written."""
        return dynamic_axes(self.model)

    def value(self, parts: tuple[int | str, ...], *, is_vector: bool) -> ir.Value:
        """Return an int64 value of `parts`; a name stands for the size of an input axis."""
        key = (parts, is_vector)
        if key not in self.written:
            self.written[key] = self._write(parts, is_vector=is_vector)
        return self.written[key]

    def _write(self, parts: tuple[int | str, ...], *, is_vector: bool) -> ir.Value:
        numbers = [part for part in parts if not isinstance(part, str)]
        if len(numbers) == len(parts):
            array = np.array(numbers if is_vector else numbers[0], np.int64)
            return self.writer.constant(array, _name(array))
        if not is_vector:
            return self.writer.node("Squeeze", [self.value(parts, is_vector=True)])
        if len(parts) > 1:
            pieces = [self.value((part,), is_vector=True) for part in parts]
            return self.writer.node("Concat", pieces, {"axis": 0})
        value, axis = next(
            (value, axis) for value in self.model.graph.inputs for axis, name in named_axes(value) if name == parts[0]
        )
        return self.writer.sizes(value, range(axis, axis + 1))


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Gather(Shape(hidden), 0)`, and other values computed from shapes, by `Shape<start=0, end=1>(input)`."""
    if default_opset(model.opset_imports) < 15 or not len(model.graph):
        return Outcome(model, 0, "left alone: a Shape of some axes only needs opset 15")
    shapes = find_shapes(model)
    computed = _computed(model, shapes)
    sizes = _WrittenSizes(model, Writer(model.graph[0]))
    nodes = [node for node in model.graph if any(str(value.name) in computed for value in node.outputs)]
    changed = []
    for node in nodes:
        if _is_minimal(node):
            continue
        value = node.outputs[0]
        # Consumers that compute such numbers themselves are handled separately. onnxruntime may be unable to run an If
        # branch that is never taken, and a constant condition would make it try.
        readers = [
            (reader, index)
            for reader, index in value.uses()
            if str(reader.outputs[0].name) not in computed and reader.op_type != "If"
        ]
        if value.is_graph_output() or not readers or (new := _replacement(value, shapes, sizes)) is None:
            continue
        for reader, index in readers:
            reader.replace_input_with(index, new)
        changed.append(node)
    remove_unused(model.graph, changed)
    return Outcome(model, len(changed))


def _computed(model: ir.Model, shapes: Shapes) -> set[str]:
    """Return the values computed only from shapes and constants, such as a row of positions."""
    computed = set(shapes.elements)
    for node in model.graph:
        inputs = [value for value in node.inputs if value is not None]
        if any(value.name in computed for value in inputs) and all(
            value.name in computed or value.is_initializer() for value in inputs
        ):
            computed.update(str(value.name) for value in node.outputs if (shapes.rank(value) or 0) <= 1)
    return computed


def _is_minimal(node: ir.Node) -> bool:
    """Whether a node has the form written by this pass: the size of one input axis, as a vector or a number."""
    if node.op_type == "Squeeze":
        above = producer(node.inputs[0], "Shape")
        return above is not None and _is_minimal(above)
    if node.op_type == "Concat":
        return all(
            value is None or value.is_initializer() or ((above := value.producer()) is not None and _is_minimal(above))
            for value in node.inputs
        )
    return (
        node.op_type == "Shape"
        and node.inputs[0] is not None
        and node.inputs[0].is_graph_input()
        and node.attributes.get_int("end", -1) == node.attributes.get_int("start", 0) + 1
    )


def _replacement(value: ir.Value, shapes: Shapes, sizes: _WrittenSizes) -> ir.Value | None:
    """Return the same numbers computed from input sizes; None if that is not possible."""
    elements = shapes.elements.get(str(value.name))
    if elements is None or elements.ndim > 1 or elements.size > _LONGEST:
        return None
    if elements.dtype != object:
        name = _name(elements) if elements.dtype == np.int64 else f"size_{value.name}"
        return sizes.writer.constant(elements, name)
    parts = tuple(elements.reshape(-1).tolist())
    if shapes.dtype(value) != np.int64 or not all(part in sizes.axes for part in parts if isinstance(part, str)):
        return None
    return sizes.value(parts, is_vector=elements.ndim == 1)


def _name(numbers: NDArray[Any]) -> str:
    return f"size_{'x'.join(map(str, numbers.reshape(-1).tolist()))}"


input_sizes = Pass("input_sizes", _apply)
