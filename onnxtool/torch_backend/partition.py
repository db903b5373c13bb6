"""Split a graph into partitions, one onnxruntime session each, with what PyTorch runs between them.

Views are created where they are read: they compute nothing, but as a session output each would be a copy.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from onnxtool.torch_backend.nodes import (
    MANY_ELEMENTS,
    Node,
    is_random,
    is_view,
    order_in_memory,
    seen_elements,
    tensor_of,
)


@dataclass(frozen=True)
class Partition:
    """Nodes that onnxruntime runs in one session.

    Attributes:
        module: the partition as a graph: a placeholder for each of `inputs`, and the results `outputs` as a tuple.
        inputs: nodes of the whole graph that the partition takes, in order.
        orders: for each input, its memory order of dimensions, in which it is passed; None if unchanged.
        outputs: nodes of the partition that other nodes of the whole graph take.
        names: for each node of `module`, the name of the corresponding node in the whole graph.
    """

    module: torch.fx.GraphModule
    inputs: tuple[Node, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[Node, ...]
    names: dict[str, str]

    @property
    def is_large(self) -> bool:
        """Return whether it has a CPU tensor with enough elements for several threads to be worth starting."""
        return any(map(_is_large, self.module.graph.nodes))


def _is_large(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.device.type == "cpu" and seen_elements(tensor) >= MANY_ELEMENTS


def extract(owner: torch.fx.GraphModule, nodes: Sequence[Node]) -> Partition:
    """Copy `nodes` of the graph of `owner`, which are in graph order, to a separate graph."""
    inside = set(nodes)
    taken = {source: None for node in nodes for source in node.all_input_nodes if source not in inside}
    order = {node: index for index, node in enumerate(owner.graph.nodes)}
    inputs = tuple(sorted(taken, key=order.__getitem__))
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    orders = tuple(None if node.op == "get_attr" else order_in_memory(node.meta["val"]) for node in inputs)
    for node, order_of_node in zip(inputs, orders, strict=True):
        copies[node] = _placeholder(graph, node.name, value_of(owner, node), order_of_node)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    module = torch.fx.GraphModule(owner, graph, class_name="Partition")
    return Partition(module, inputs, orders, outputs, {copy.name: node.name for node, copy in copies.items()})


def _placeholder(graph: torch.fx.Graph, name: str, value: object, order: tuple[int, ...] | None) -> Node:
    """Return the node for an input that is passed in another order and permuted back inside."""
    placeholder: Node = graph.placeholder(name)
    placeholder.meta = {"val": value}
    if order is None or not isinstance(value, torch.Tensor):
        return placeholder
    placeholder.meta = {"val": value.permute(order)}
    permuted: Node = graph.call_function(
        torch.ops.aten.permute.default, (placeholder, [order.index(dim) for dim in range(len(order))])
    )
    permuted.meta = {"val": value}
    return permuted


def value_of(owner: torch.fx.GraphModule, node: Node) -> object:
    """Return the fake value of a node, or the constant it refers to."""
    if node.op == "get_attr" and "val" not in node.meta:
        value: object = owner
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value
    return node.meta["val"]


MOST_HELD = 2**26
"""Bytes of session results that may wait until its end if only PyTorch reads them."""


@dataclass(frozen=True)
class GraphStage:
    """A partition and what PyTorch runs after it, both in graph order; either may be empty."""

    partition: tuple[Node, ...]
    eager: tuple[Node, ...]


def cut(graph: torch.fx.Graph, stay: Mapping[Node, str], after: Collection[Node] = ()) -> tuple[GraphStage, ...]:
    """Assign the calls in `graph` to stages, with as few partitions as the PyTorch nodes in `stay` allow.

    Nodes in `after` run when all stages are done. What stays in PyTorch runs as early as possible. Every other node may
    run in any stage from the one that has its inputs to the first that needs its result; partitions are placed only
    where some node has no other choice (the fewest points that hit all intervals). A node runs in the first possible
    partition, unless its result is as large as its inputs (views of inputs, masks as numbers): then it runs in the
    first partition that reads it. Random numbers are drawn in graph order. If session results wait only for readers in
    PyTorch, such as the operands of a weight's gradient, a new stage begins before they hold much memory.
    """
    stay = {node: reason for node, reason in stay.items() if node not in after}
    earliest = _earliest(graph, stay, after)
    last = max(earliest.values(), default=0)
    latest = _latest(graph, stay, earliest, last)
    points = _points([(earliest[node], latest[node]) for node in latest])
    chosen = {node: points[bisect_left(points, earliest[node])] for node in latest}
    for node in _deferrable(graph, latest):
        readers = [earliest[user] if user in stay else chosen.get(user, last) for user in node.users]
        chosen[node] = points[bisect_right(points, min(readers, default=last)) - 1]
    partitions: dict[int, list[Node]] = {}
    eager: dict[int, list[Node]] = {}
    for node in graph.nodes:  # graph order is a topological order
        if node in stay:
            eager.setdefault(earliest[node], []).append(node)
        elif node in chosen:
            partitions.setdefault(chosen[node], []).append(node)
    return tuple(
        GraphStage(tuple(partitions.get(index, ())), tuple(eager.get(index, ())))
        for index in sorted({*partitions, *eager})
    )


def _earliest(graph: torch.fx.Graph, stay: Mapping[Node, str], after: Collection[Node]) -> dict[Node, int]:
    """Return the first stage that has the inputs of each call."""
    stages: dict[Node, int] = {}
    last_random = first = 0
    held: dict[Node, int] = {}
    for node in graph.nodes:
        if (node.op != "call_function" and node not in stay) or node in after:
            continue
        stage = 0 if node in stay else first
        for source in node.all_input_nodes:
            if source in stages:
                stage = max(stage, stages[source] + (1 if source in stay and node not in stay else 0))
        if is_random(node):
            stage = last_random = max(stage, last_random)
        stages[node] = stage
        if node in stay and not is_view(node) and all(user.op == "output" or is_view(user) for user in node.users):
            held |= {source: _bytes(source) or 0 for source in _computed(node) if source not in stay}
            if sum(held.values()) > MOST_HELD:
                first, held = max(first, stage + 1), {}
    return stages


def _computed(node: Node) -> list[Node]:
    """Return the calls whose results a node reads, directly or as a view."""
    sources = (_computed(source) if is_view(source) else [source] for source in node.all_input_nodes)
    return [source for some in sources for source in some if source.op == "call_function"]


def _latest(
    graph: torch.fx.Graph, stay: Mapping[Node, str], earliest: Mapping[Node, int], last: int
) -> dict[Node, int]:
    """Return the last stage at which each onnxruntime node is in time for all readers of its result."""
    latest: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if node not in earliest or node in stay:
            continue
        users = (earliest[user] if user in stay else latest.get(user, last) for user in node.users)
        latest[node] = min(users, default=last)
    return latest


def _deferrable(graph: torch.fx.Graph, nodes: Collection[Node]) -> list[Node]:
    """Return those `nodes` that save no memory by running early, readers before what they read.

    They read only graph inputs and each other, and nothing larger than their results.
    """
    deferrable: dict[Node, None] = {}
    for node in graph.nodes:
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if node in nodes and all(source in deferrable for source in sources):
            size = _bytes(node)
            if size is not None and all(size >= (_bytes(source) or 0) for source in node.all_input_nodes):
                deferrable[node] = None
    return list(reversed(deferrable))


def _bytes(node: Node) -> int | None:
    """Return the size of a node's tensor in bytes; None if it has none."""
    tensor = tensor_of(node)
    return None if tensor is None else seen_elements(tensor) * tensor.element_size()


def _points(intervals: list[tuple[int, int]]) -> list[int]:
    """Return the fewest points such that every interval, including both ends, contains one."""
    points: list[int] = []
    for start, end in sorted(intervals, key=lambda interval: interval[1]):
        if not points or points[-1] < start:
            points.append(end)
    return points


aten = torch.ops.aten


def views_at_readers(graph: torch.fx.Graph) -> tuple[Node, ...]:
    """Give every reader in `graph` its own views, and return the views of the output, which PyTorch creates at the end.

    Views of views are traced back to the tensor that holds the memory. An output that is a view of an input is left
    unchanged: AOTAutograd creates it itself, from the input after the call.
    """
    for node in graph.find_nodes(op="call_function", target=aten._unsafe_view.default):
        if len(node.all_input_nodes[0].users) == 1 and not is_view(node.all_input_nodes[0]):
            node.target = aten.view.default  # no other node reads the memory
    last: tuple[Node, ...] = ()
    for reader in list(graph.nodes):
        if is_view(reader) or reader.target is operator.getitem:
            continue
        copies: dict[Node, Node] = {}
        with graph.inserting_before(reader):
            for source in reader.all_input_nodes:
                for view in reversed(_chain(source, of_output=reader.op == "output")):
                    if view not in copies:
                        copies[view] = graph.node_copy(view, lambda node, copies=copies: copies.get(node, node))
        reader.args = torch.fx.node.map_arg(reader.args, lambda node, copies=copies: copies.get(node, node))
        reader.kwargs = torch.fx.node.map_arg(reader.kwargs, lambda node, copies=copies: copies.get(node, node))
        last = tuple(copies.values())
    for node in reversed(graph.nodes):
        if is_view(node) and not node.users:
            graph.erase_node(node)
    return last


def views_of_pytorch(graph: torch.fx.Graph, stay: Mapping[Node, str]) -> tuple[Node, ...]:
    """Return the views that only nodes in PyTorch read."""
    views: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        if node not in stay and is_view(node) and all(user in stay or user in views for user in node.users):
            views[node] = None
    return tuple(views)


def _chain(node: Node, *, of_output: bool) -> list[Node]:
    """Return the views between what is read and the tensor that holds its memory.

    Empty for an output that is a view of an input. Inside the graph, views with several results are omitted.
    """
    chain = []
    while is_view(node) and (of_output or node.target is not operator.getitem):
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain
