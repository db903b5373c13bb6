"""Sort the nodes of a graph topologically, as ONNX requires: each node after the ones that it reads.

onnxruntime accepts any order, so such files exist. onnx_ir treats a value that is read before it is produced as a
different value of the same name, which silently disconnects the graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    import onnx


def sort_nodes(model: onnx.ModelProto) -> bool:
    """Sort the nodes of all graphs and functions of `model` in place; return whether any was out of order.

    Nodes move no further than necessary. Nodes in a cycle keep their order, after all others.
    """
    bodies: list[MutableSequence[onnx.NodeProto]] = [model.graph.node, *(one.node for one in model.functions)]
    return any([_sort(nodes) for nodes in bodies])  # noqa: C419  all of them are to be sorted


def _sort(nodes: MutableSequence[onnx.NodeProto]) -> bool:
    """Sort one body and the bodies inside its nodes; return whether any was out of order."""
    changed = any([_sort(graph.node) for node in nodes for graph in graphs_of(node)])  # noqa: C419
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    sources = [{makers[name] for name in _reads(node) if name in makers} for node in nodes]
    if all(max(read, default=-1) < place for place, read in enumerate(sources)):
        return changed
    readers: list[list[int]] = [[] for _ in nodes]
    for place, read in enumerate(sources):
        for source in read:
            readers[source].append(place)
    ready = [place for place, read in enumerate(sources) if not read]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers[place]:
            sources[reader].discard(place)
            if not sources[reader]:
                heapq.heappush(ready, reader)
    left = sorted(set(range(len(nodes))) - set(order))
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    for place, source in enumerate([*order, *left]):
        nodes[place].CopyFrom(copies[source])
    return True


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, including outer values read by graphs inside it."""
    yield from node.input
    for graph in graphs_of(node):
        inside = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        inside.update(name for inner in graph.node for name in inner.output)
        yield from (value.name for value in graph.output if value.name not in inside)
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in inside)


def graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs inside a node: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
