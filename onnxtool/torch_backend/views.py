"""Views that leave a graph are made by PyTorch: they compute nothing, and share memory with what they are views of."""

from __future__ import annotations

import operator

import torch


def views_last(graph: torch.fx.Graph) -> tuple[torch.fx.Node, ...]:
    """Let all outputs of `graph` that are views be made after all else, and return the nodes that make them.

    Views of views are traced back to what holds the memory. Where that is an input, nothing changes: AOTAutograd makes
    such an output itself, of the input as it is after the call.
    """
    (output,) = graph.find_nodes(op="output")
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    with graph.inserting_before(output):
        for node in output.all_input_nodes:
            chain = _chain(node)
            for view in reversed(chain):
                if view not in copies:
                    copies[view] = graph.node_copy(view, lambda source: copies.get(source, source))
    output.args = torch.fx.node.map_arg(output.args, lambda node: copies.get(node, node))
    for view in sorted(copies, reverse=True):
        if not view.users:
            graph.erase_node(view)
    return tuple(copies.values())


def _chain(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the views that lead from an output to what holds its memory; none where that is an input."""
    chain = []
    while _is_view(node):
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain if node.op == "call_function" else []


def _is_view(node: torch.fx.Node) -> bool:
    """Whether the node's result is a view of its first argument; one of several is taken out by `getitem`."""
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or not node.args
        or not isinstance(node.args[0], torch.fx.Node)
    ):
        return False
    schema = node.target._schema
    alias = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    return alias is not None and not schema.is_mutable
