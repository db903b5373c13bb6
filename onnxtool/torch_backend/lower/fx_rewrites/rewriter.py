"""Rewrites a graph of ATen operators before it is cut: the same numbers with fewer passes over memory.

onnxruntime computes one operator after the other, and most of them are as slow as the memory they read and write.
"""

from __future__ import annotations

import copy

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxtool.torch_backend.lower.decisions import decision
from onnxtool.torch_backend.lower.fx_rewrites.empty_tensors import empty_result
from onnxtool.torch_backend.nodes import Node, tensor_of


def rewritten(owner: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of `owner`, whose nodes have their fake values as `meta["val"]`, with all rewrites applied.

    A result without elements becomes a constant, whatever computes it. All other rewrites are those of the operator in
    `lower/decisions.py`.
    """
    copies: dict[Node, Node] = {}
    graph = torch.fx.Graph()
    for node in owner.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = copy.copy(node.meta)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        for rewrite in (empty_result, *decision(node.target).fx_rewrites):
            replacement = rewrite(node)
            if replacement is not None and _same_kind(node, replacement):
                node.replace_all_uses_with(replacement)
                break
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(owner, graph, class_name="Rewritten")


def _same_kind(node: Node, replacement: Node) -> bool:
    """Whether both give tensors of the same type, shape and layout, for all sizes of a dynamic graph."""
    ours, theirs = tensor_of(replacement), tensor_of(node)
    if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.dim() != theirs.dim():
        return False
    numbers = zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)
    return all(statically_known_true(first == second) for first, second in numbers)
