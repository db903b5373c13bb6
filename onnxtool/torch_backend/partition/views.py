"""Views are made where they are read: they compute nothing, but at the border of a session each would be a copy."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TypeAlias

import torch

Node: TypeAlias = torch.fx.Node
aten = torch.ops.aten


def views_at_readers(graph: torch.fx.Graph) -> tuple[Node, ...]:
    """Give every reader in `graph` views of its own, and return those of the output: PyTorch makes them after all else.

    Views of views are traced back to what holds the memory. Where an output is a view of an input, nothing changes:
    AOTAutograd makes such an output itself, of the input as it is after the call.
    """
    for node in graph.find_nodes(op="call_function", target=aten._unsafe_view.default):
        if len(node.all_input_nodes[0].users) == 1 and not is_view(node.all_input_nodes[0]):
            node.target = aten.view.default  # nobody else sees the memory
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


def left_to_pytorch(graph: torch.fx.Graph, stay: Mapping[Node, str]) -> tuple[Node, ...]:
    """Return the views that are read by what stays in PyTorch."""
    found: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        if node not in stay and is_view(node) and all(user in stay or user in found for user in node.users):
            found[node] = None
    return tuple(found)


def is_view(node: Node) -> bool:
    """Whether the node's result is a view of its first argument; one of several is taken out by `getitem`."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or not node.args
        or not isinstance(node.args[0], torch.fx.Node)
    ):
        return False
    schema = node.target._schema
    alias = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    return alias is not None and not schema.is_mutable


def _chain(node: Node, *, of_output: bool) -> list[Node]:
    """Return the views that lead from what is read to what holds its memory.

    Of an output none where that is an input; of what a graph reads itself not those with several results.
    """
    chain = []
    while is_view(node) and (of_output or node.target is not operator.getitem):
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain if node.op == "call_function" or not of_output else []
