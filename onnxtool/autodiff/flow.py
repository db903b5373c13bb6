"""Find the nodes of a graph that a gradient flows through (activity analysis)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxtool.autodiff.rules import NON_DIFFERENTIABLE, QUANTIZERS


class Flow:
    """The nodes between sources and an output, connected by differentiable edges.

    Args:
        graph: a sorted graph with known dtypes.
        output: the name of the value to differentiate.
        sources: the names of the values to differentiate with respect to.

    Attributes:
        output: the value to differentiate.
        sources: the values to differentiate with respect to.
        reaching: for each value the names of the sources that it depends on.
        active: for each node that depends on a source, the indices in `reads` of the values that do.
        nodes: the active nodes that the output depends on, in the order of the graph.
    """

    def __init__(self, graph: ir.Graph, output: str, sources: Sequence[str]) -> None:
        values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
        self.output = values[output]
        self.sources = [values[name] for name in dict.fromkeys(sources)]
        self.reaching = {source: frozenset((str(source.name),)) for source in self.sources}
        self.active: dict[ir.Node, frozenset[int]] = {}
        for node in graph:
            self._reach(node)
        self.nodes = self._leading_to(self.output)

    def _reach(self, node: ir.Node) -> None:
        """Note which sources a node depends on; its float and quantized outputs depend on them as well."""
        ignored = NON_DIFFERENTIABLE.get((node.domain, node.op_type), frozenset())
        reached = {
            index: self.reaching[value]
            for index, value in enumerate(reads(node))
            if value is not None and value in self.reaching and index not in ignored
        }
        if not reached:
            return
        self.active[node] = frozenset(reached)
        carries = _carries_integers(node, reached)
        for value in node.outputs:
            if value.dtype is None or value.dtype.is_floating_point() or (carries and value.dtype.is_integer()):
                known = self.reaching.get(value, frozenset())
                self.reaching[value] = known.union(*reached.values())

    def _leading_to(self, output: ir.Value) -> list[ir.Node]:
        needed: set[ir.Value | None] = {output}
        nodes = []
        for node, places in reversed(self.active.items()):
            if not needed.isdisjoint(node.outputs):
                read = reads(node)
                needed.update(read[place] for place in places)
                nodes.append(node)
        return nodes[::-1]


def _carries_integers(node: ir.Node, reached: Collection[int]) -> bool:
    """Return whether the integer outputs of a node are quantized numbers, which a gradient flows through.

    The integers of most operators are indices, steps or sizes; those of an operator unknown to ONNX may be anything.
    """
    if node.domain or (node.domain, node.op_type) in QUANTIZERS:
        return True
    read = reads(node)
    kinds = [value.dtype for index in reached if (value := read[index]) is not None]
    return any(kind is not None and kind.is_integer() for kind in kinds)


def reads(node: ir.Node) -> list[ir.Value | None]:
    """Return the values that a node reads: its inputs, then those that its subgraphs may read from outside."""
    inside: list[ir.Value | None] = []
    for attribute in node.attributes.values():
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            graphs = attribute.value if attribute.type == ir.AttributeType.GRAPHS else [attribute.value]
            for graph in graphs:
                inside.extend(graph.outputs)
                inside.extend(value for inner in ir.traversal.RecursiveGraphIterator(graph) for value in inner.inputs)
    return [*node.inputs, *inside]
