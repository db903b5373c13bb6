"""Detach the quantized storage of vectors from a graph during optimization, and restore it unchanged.

Rounding errors at the edges of steps would change codes, so passes, conversions, the error on texts and the
verification work on the float32 vectors. In a half-precision graph, the steps would be rounded too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtool.checkpoint.quantized_vectors import FLOATS, VectorType
from onnxtool.errors import PassError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import VECTORS_KEY

# A constant by its content, or the position of an earlier result: 0 for the input, 1 for the first node's output.
_Input = ir.TensorProtocol | int


@dataclass(frozen=True)
class _Step:
    """A node with one output."""

    op_type: str
    inputs: tuple[_Input, ...]
    attributes: Sequence[ir.Attr]


@dataclass(frozen=True)
class Storage:
    """The detached part of a graph.

    Attributes:
        stored: the storage type of the vectors.
        steps: its nodes, in order.
        output: the output of the graph, with its dtype and shape.
    """

    stored: VectorType
    steps: tuple[_Step, ...]
    output: ir.Value

    def put_back(self, model: ir.Model) -> None:
        """Store the output of `model` that has the name of the output before."""
        graph = model.graph
        place = next(place for place, value in enumerate(graph.outputs) if value.name == self.output.name)
        vectors = graph.outputs[place]
        vectors.name = FLOATS
        results = [vectors]

        def constant(tensor: ir.TensorProtocol) -> ir.Value:
            name = f"{VECTORS_KEY}.constant_{len(graph.initializers)}"
            value = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.numpy().shape), const_value=tensor
            )
            graph.register_initializer(value)
            return value

        for step in self.steps:
            inputs = [results[item] if isinstance(item, int) else constant(item) for item in step.inputs]
            node = ir.Node("", step.op_type, inputs, step.attributes)
            graph.append(node)
            results.append(node.outputs[0])
        output = results[-1]
        output.name, output.type, output.shape = self.output.name, self.output.type, self.output.shape
        graph.outputs[place] = output


def storage_of(source: ModelFile) -> Callable[[ir.Model], Storage | None]:
    """Return what takes off the storage of vectors from the graph of `source`, loaded as often as it is needed.

    Raises:
        InputError: the metadata of the file is malformed.
    """
    stored = VectorType.of_model(source)
    return lambda model: None if stored is None else _take_off(model, stored, source)


def _take_off(model: ir.Model, stored: VectorType, source: ModelFile) -> Storage:
    """End the graph in the vectors before storage, under the name of its output.

    Raises:
        PassError: the graph does not show where storage begins.
    """
    graph = model.graph
    vectors = next((value for node in graph for value in node.outputs if value.name == FLOATS), None)
    places: dict[ir.Value | None, int] = {vectors: 0}
    steps: list[_Step] = []
    nodes: list[ir.Node] = []
    for node in graph if vectors is not None else ():
        if not any(value in places for value in node.inputs):
            continue
        inputs = [_input(value, places) for value in node.inputs]
        known = [item for item in inputs if item is not None]
        if len(node.outputs) != 1 or len(known) != len(inputs) or node.domain:
            break
        steps.append(_Step(node.op_type, tuple(known), list(node.attributes.values())))
        places[node.outputs[0]] = len(steps)
        nodes.append(node)
    ends = [place for place, value in enumerate(graph.outputs) if nodes and value is nodes[-1].outputs[0]]
    if vectors is None or not ends:
        raise PassError(
            f"{source.path} says that its vectors are {stored.name}, and the graph does not show where they are stored",
            "optimize the model exported without --vectors_as, or export it again",
        )
    output = graph.outputs[ends[0]]
    before = ir.Value(name=output.name, type=output.type, shape=output.shape)
    graph.outputs[ends[0]] = vectors
    graph.remove(nodes, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        graph.initializers.pop(name)
    vectors.name = before.name
    return Storage(stored, tuple(steps), before)


def _input(value: ir.Value | None, places: dict[ir.Value | None, int]) -> _Input | None:
    """Return an input of a step; None for one that is neither a constant nor an earlier result."""
    if value in places:
        return places[value]
    return None if value is None else ir.convenience.get_const_tensor(value)
