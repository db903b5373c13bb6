"""Views are made where they are read: they compute nothing, but as an output of a session each would be a copy."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch

from onnxtool.torch_backend.nodes import Node, is_view

aten = torch.ops.aten


def views_at_readers(graph: torch.fx.Graph) -> tuple[Node, ...]:
    """Give every reader in `graph` views of its own, and return those of the output: PyTorch makes them at the end.

    Views of views are traced back to the tensor that holds the memory. Where an output is a view of an input, nothing
    changes: AOTAutograd makes such an output itself, from the input after the call.
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
    found: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        if node not in stay and is_view(node) and all(user in stay or user in found for user in node.users):
            found[node] = None
    return tuple(found)


def _chain(node: Node, *, of_output: bool) -> list[Node]:
    """Return the views between what is read and the tensor that holds its memory.

    Empty for an output that is a view of an input. Inside the graph, views with several results are left out.
    """
    chain = []
    while is_view(node) and (of_output or node.target is not operator.getitem):
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain if node.op == "call_function" or not of_output else []
