"""Rewrites a graph of ATen operators before it is cut: the same numbers with fewer passes over memory.

onnxruntime computes one operator after the other, and most of them are as slow as the memory they read and write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

Node: TypeAlias = torch.fx.Node
Rule = Callable[[Node], "Node | None"]
"""Takes a node and returns the one that replaces it, which it has inserted before it; None where it has nothing better.

It changes no other node: those that nobody reads any more are removed afterwards.
"""


def rewritten(owner: torch.fx.GraphModule, rules: tuple[Rule, ...]) -> torch.fx.GraphModule:
    """Return a copy of `owner`, whose nodes have their fake values as `meta["val"]`, to which `rules` were applied."""
    copies: dict[Node, Node] = {}
    graph = torch.fx.Graph()
    for node in owner.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = copy.copy(node.meta)
    for node in list(graph.nodes):
        for rule in rules:
            replacement = rule(node) if node.op == "call_function" else None
            if replacement is not None and _same_kind(node, replacement):
                node.replace_all_uses_with(replacement)
                break
    module = torch.fx.GraphModule(owner, graph, class_name="Rewritten")
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def call(before: Node, target: Any, *arguments: Any, **options: Any) -> Node:
    """Insert a call of `target` before a node, with the fake value of its result."""
    graph = before.graph
    values = torch.fx.node.map_arg(arguments, lambda node: node.meta["val"])
    with graph.inserting_before(before):
        node = graph.call_function(target, arguments, options)
    node.meta["val"] = target(*values, **options)
    return node


def tensor_of(node: object) -> torch.Tensor | None:
    """Return the fake tensor that a node gives; None where it gives none, or is none."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_call(node: object, *targets: Any) -> bool:
    """Whether an argument is a call of one of `targets`."""
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in targets


def _same_kind(node: Node, replacement: Node) -> bool:
    """Whether both give tensors of the same type, shape and layout, for all sizes of a dynamic graph."""
    ours, theirs = tensor_of(replacement), tensor_of(node)
    if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.dim() != theirs.dim():
        return False
    numbers = zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)
    return all(statically_known_true(first == second) for first, second in numbers)
