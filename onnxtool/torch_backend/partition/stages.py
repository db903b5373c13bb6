"""Cuts a graph into stages: a partition for onnxruntime, what stays in PyTorch, the next partition, and so on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from onnxtool.torch_backend.nodes import Node, is_random, is_view, seen_elements, tensor_of

MOST_HELD = 2**26
"""Bytes of results of a session that may wait for its end, and only PyTorch reads them."""


@dataclass(frozen=True)
class Stage:
    """A partition and what PyTorch runs after it, both in the order of the graph; either may be empty."""

    partition: tuple[Node, ...]
    eager: tuple[Node, ...]


def cut(graph: torch.fx.Graph, stay: Mapping[Node, str], after: Collection[Node] = ()) -> tuple[Stage, ...]:
    """Assign the calls of `graph` to stages, with as few partitions as `stay`, the nodes of PyTorch, allows.

    Nodes in `after` run when all stages are done. What stays in PyTorch runs as early as possible. Every other node may
    run from the stage that has its inputs to the first one that needs its result; partitions are only where some node
    has no other choice (the fewest points that hit all intervals). It runs in the first possible partition, except a
    node whose result is as large as its inputs (views of inputs, masks as numbers): that runs in the first partition
    that reads it. Random numbers are drawn in the order of the graph. Where results of sessions wait for nothing but
    readers in PyTorch, such as the operands of a weight's gradient, a new stage begins before they hold much memory.
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
    for node in graph.nodes:  # the order of the graph, which is one of its topological orders
        if node in stay:
            eager.setdefault(earliest[node], []).append(node)
        elif node in chosen:
            partitions.setdefault(chosen[node], []).append(node)
    return tuple(
        Stage(tuple(partitions.get(index, ())), tuple(eager.get(index, ()))) for index in sorted({*partitions, *eager})
    )


def _earliest(graph: torch.fx.Graph, stay: Mapping[Node, str], after: Collection[Node]) -> dict[Node, int]:
    """Return the first stage that has what each call takes."""
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
    """Return the calls whose results a node reads, itself or as a view."""
    sources = (_computed(source) if is_view(source) else [source] for source in node.all_input_nodes)
    return [source for some in sources for source in some if source.op == "call_function"]


def _latest(
    graph: torch.fx.Graph, stay: Mapping[Node, str], earliest: Mapping[Node, int], last: int
) -> dict[Node, int]:
    """Return the last stage at which each node for onnxruntime is in time for all readers of its result."""
    latest: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if node not in earliest or node in stay:
            continue
        users = (earliest[user] if user in stay else latest.get(user, last) for user in node.users)
        latest[node] = min(users, default=last)
    return latest


def _deferrable(graph: torch.fx.Graph, nodes: Collection[Node]) -> list[Node]:
    """Return those of `nodes` that save no memory by running early, readers before what they read.

    They read inputs of the graph and each other, and nothing larger than their results.
    """
    found: dict[Node, None] = {}
    for node in graph.nodes:
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if node in nodes and all(source in found for source in sources):
            size = _bytes(node)
            if size is not None and all(size >= (_bytes(source) or 0) for source in node.all_input_nodes):
                found[node] = None
    return list(reversed(found))


def _bytes(node: Node) -> int | None:
    """Return the bytes of the tensor that a node gives; None where it gives none."""
    tensor = tensor_of(node)
    return None if tensor is None else seen_elements(tensor) * tensor.element_size()


def _points(intervals: list[tuple[int, int]]) -> list[int]:
    """Return the fewest points such that every interval, both ends included, holds one."""
    points: list[int] = []
    for start, end in sorted(intervals, key=lambda interval: interval[1]):
        if not points or points[-1] < start:
            points.append(end)
    return points
