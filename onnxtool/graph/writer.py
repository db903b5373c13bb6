"""Write nodes and initializers to an onnx_ir graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.model_file.domains import default_opset

# The content of larger initializers is not compared.
_LARGEST_CONSTANT = 1024
_FIRST_OPSET_OF_PARTS = 15  # in which Shape can return only some axes

Naming: TypeAlias = "Callable[[ir.Node, int], None]"
"""Names a node and its outputs, given the number of nodes the writer has written before it."""


class Writer:
    """Writes nodes before a node or at the end of a graph, or collects them for a graph that is created later.

    Attributes:
        nodes: the nodes written so far, in order.
        initializers: the graph's initializers, by name; without a graph, the ones collected so far.
    """

    def __init__(
        self,
        place: ir.Node | ir.Graph | None = None,
        *,
        naming: Naming | None = None,
        initializers: MutableMapping[str, ir.Value] | None = None,
    ) -> None:
        """Start writing.

        Args:
            place: the node to write before, or the graph to append to; None to collect nodes.
            naming: None for the names that the graph itself assigns.
            initializers: collected by another writer for the same graph; for a writer that collects nodes.
        """
        self._before = place if isinstance(place, ir.Node) else None
        self._graph: Any = place.graph if isinstance(place, ir.Node) else place
        self._naming = naming
        self._shared: dict[object, ir.Value] = {}
        self.nodes: list[ir.Node] = []
        collected: MutableMapping[str, ir.Value] = {} if initializers is None else initializers
        self.initializers = collected if self._graph is None else self._graph.initializers

    def add(self, node: ir.Node) -> Sequence[ir.Value]:
        """Name a new node, insert it, and return its outputs."""
        if self._naming is not None:
            self._naming(node, len(self.nodes))
        self.nodes.append(node)
        if self._before is not None:
            self._graph.insert_before(self._before, node)
        elif self._graph is not None:
            self._graph.append(node)
        if self._graph is not None and node.domain:
            self._graph.opset_imports.setdefault(node.domain, 1)
        outputs: Sequence[ir.Value] = node.outputs
        return outputs

    def node(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        like: ir.Value | None = None,
    ) -> ir.Value:
        """Write a node with one output, which takes the dtype and shape of `like` if given."""
        (output,) = self.add(ir.node(operator, list(inputs), dict(attributes or {}), domain=domain))
        if like is not None:
            output.type, output.shape = like.type, like.shape
        return output

    def op(self, operator: str, *inputs: ir.Value | None, **attributes: int | list[int] | float) -> ir.Value:
        """Write an ai.onnx node with one output."""
        return self.node(operator, inputs, attributes)

    def ops(
        self, operator: str, *inputs: ir.Value | None, outputs: int, **attributes: int | list[int] | float
    ) -> Sequence[ir.Value]:
        """Write an ai.onnx node with several outputs."""
        return self.add(ir.node(operator, list(inputs), attributes, num_outputs=outputs))

    def sizes(self, value: ir.Value, axes: range) -> ir.Value:
        """Write the sizes of consecutive axes of `value`: int64 [len(axes)]."""
        if default_opset(self._graph.opset_imports) >= _FIRST_OPSET_OF_PARTS:
            return self.op("Shape", value, start=axes.start, end=axes.stop)
        places = self.constant(np.array(axes), f"onnxtool.axes_{axes.start}_to_{axes.stop}")
        return self.op("Gather", self.op("Shape", value), places)

    def constant(self, array: NDArray[Any], name: str) -> ir.Value:
        """Return an initializer that holds `array`, like `initializer`."""
        return self.initializer(ir.tensor(array), name)

    def initializer(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        """Return an initializer that holds `tensor`, named `name`, or `name_2` and so on if the name is taken.

        An existing one under such a name is returned if it holds the same small tensor.
        """
        unique, number = name, 1
        while unique in self.initializers:
            held = self.initializers[unique]
            if held.const_value is not None and _same(held.const_value, tensor):
                return held
            number += 1
            unique = f"{name}_{number}"
        tensor.name = unique
        self.initializers[unique] = ir.val(unique, const_value=tensor)
        return self.initializers[unique]

    def shared_constant(self, tensor: ir.TensorProtocol, name: Callable[[], str]) -> ir.Value:
        """Return this writer's initializer for the same elements, or a new one named `name()`."""
        key = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
        if key not in self._shared:
            self._shared[key] = self.initializer(tensor, name())
        return self._shared[key]


def without_omitted(inputs: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Return the inputs of a node without omitted ones at their end."""
    length = max((place for place, value in enumerate(inputs, start=1) if value is not None), default=0)
    return list(inputs[:length])


def _same(held: ir.TensorProtocol, tensor: ir.TensorProtocol) -> bool:
    """Return whether two small tensors are the same; large ones are not compared."""
    if held.dtype != tensor.dtype or held.shape != tensor.shape or tensor.size > _LARGEST_CONSTANT:
        return False
    return held.tobytes() == tensor.tobytes()


class UniqueNames:
    """Assigns names `PREFIX/KIND_NUMBER` that no value or node of a graph, or of its subgraphs, has yet."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        nodes = ir.traversal.RecursiveGraphIterator(graph)
        self._taken = {*ir.convenience.create_value_mapping(graph, include_subgraphs=True), *(n.name for n in nodes)}
        self._prefix = prefix
        self._count = 0

    def new(self, kind: str) -> str:
        """Return a new name for a value or node of this kind."""
        while (name := f"{self._prefix}/{kind}_{self._count}") in self._taken:
            self._count += 1
        self._count += 1
        return name

    def __call__(self, node: ir.Node, _number: int) -> None:
        """Name a node and its outputs after its operator."""
        node.name = self.new(node.op_type)
        for output in node.outputs:
            output.name = self.new(node.op_type)


def scoped(scope: str) -> Naming:
    """Return the naming `SCOPE/OPERATOR_NUMBER`, with `/output` appended for a node's only output."""

    def name(node: ir.Node, number: int) -> None:
        node.name = f"{scope}/{node.op_type}_{number}"
        node.outputs[0].name = f"{node.name}/output"

    return name
