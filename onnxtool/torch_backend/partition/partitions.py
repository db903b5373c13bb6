"""A part of a graph as a graph of its own, with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onnxtool.torch_backend.nodes import MANY_ELEMENTS, Node, order_in_memory, seen_elements, tensor_of


@dataclass(frozen=True)
class Partition:
    """Nodes that onnxruntime runs in one session.

    Attributes:
        module: the partition as a graph: a placeholder for each of `inputs`, the results `outputs` as a tuple.
        inputs: nodes of the whole graph that the partition takes, in their order.
        orders: for each input, the order of dimensions in which it is passed, that of its memory; None where unchanged.
        outputs: nodes of the partition that other nodes of the whole graph take.
        names: for each node of `module`, the name of the node of the whole graph.
    """

    module: torch.fx.GraphModule
    inputs: tuple[Node, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[Node, ...]
    names: dict[str, str]

    @property
    def is_large(self) -> bool:
        """Whether some tensor of the CPU in it has so many elements that several threads are worth their start."""
        return any(map(_is_large, self.module.graph.nodes))


def _is_large(node: Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.device.type == "cpu" and seen_elements(tensor) >= MANY_ELEMENTS


def extract(owner: torch.fx.GraphModule, nodes: Sequence[Node]) -> Partition:
    """Copy `nodes` of the graph of `owner`, which are in its order, into a graph of their own."""
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
    """Return the node for an input, which is passed in another order and permuted back inside."""
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
    """Return the fake value of a node, or the constant that it names."""
    if node.op == "get_attr" and "val" not in node.meta:
        value: object = owner
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value
    return node.meta["val"]
