"""A part of a graph as a graph of its own, with what it takes and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Node: TypeAlias = torch.fx.Node


@dataclass(frozen=True)
class Piece:
    """Nodes that onnxruntime runs in one session.

    Attributes:
        module: the piece as a graph: a placeholder for each of `inputs`, the results `outputs` as a tuple.
        inputs: nodes of the whole graph that the piece takes, in their order.
        outputs: nodes of the whole graph, in the piece, that others take.
        names: for each node of `module`, the name of the node of the whole graph.
    """

    module: torch.fx.GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    names: dict[str, str]


def extract(owner: torch.fx.GraphModule, nodes: Sequence[Node]) -> Piece:
    """Copy `nodes` of the graph of `owner`, which are in its order, into a graph of their own."""
    inside = set(nodes)
    taken = {source: None for node in nodes for source in node.all_input_nodes if source not in inside}
    order = {node: index for index, node in enumerate(owner.graph.nodes)}
    inputs = tuple(sorted(taken, key=order.__getitem__))
    # A result of several values is no value itself: those that are taken out of it are.
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": value_of(owner, node)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    module = torch.fx.GraphModule(owner, graph, class_name="Piece")
    return Piece(module, inputs, outputs, {copy.name: node.name for node, copy in copies.items()})


def value_of(owner: torch.fx.GraphModule, node: Node) -> object:
    """Return what the node is known to give: its fake value, or the constant that it stands for."""
    if node.op == "get_attr" and "val" not in node.meta:
        value: object = owner
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value
    return node.meta["val"]
