"""Cuts a graph into stages: a piece for onnxruntime, then what stays in PyTorch, then the next piece."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from onnxtool.torch_backend.lower.random import is_random
from onnxtool.torch_backend.sizes import seen_elements

Node: TypeAlias = torch.fx.Node


@dataclass(frozen=True)
class Stage:
    """One piece and what PyTorch does after it, both in the order of the graph; either may be empty."""

    piece: tuple[Node, ...]
    eager: tuple[Node, ...]


def cut(graph: torch.fx.Graph, stay: Mapping[Node, str], after: Collection[Node] = ()) -> tuple[Stage, ...]:
    """Assign the calls of `graph` but those that run `after` all stages, in as few pieces as those in `stay` allow.

    What stays in PyTorch runs as early as it can. Every other node may run from the stage that has its inputs to the
    first one that needs its result, and pieces are only where some node has no other choice (the points that stab all
    intervals). It runs in the first piece that it can, but for what is as large as what it is made of (views of inputs,
    masks as numbers): that runs in the first piece that reads it. Random numbers are drawn in the order of the graph.
    """
    stay = {node: reason for node, reason in stay.items() if node not in after}
    earliest = _earliest(graph, stay, after)
    last = max(earliest.values(), default=0)
    latest = _latest(graph, stay, earliest, last)
    points = _points([(earliest[node], latest[node]) for node in latest])
    chosen = {node: points[bisect_left(points, earliest[node])] for node in latest}
    for node in _put_off(graph, latest):
        readers = [earliest[user] if user in stay else chosen.get(user, last) for user in node.users]
        chosen[node] = points[bisect_right(points, min(readers, default=last)) - 1]
    pieces: dict[int, list[Node]] = {}
    eager: dict[int, list[Node]] = {}
    for node in graph.nodes:  # the order of the graph, which is one of its topological orders
        if node in stay:
            eager.setdefault(earliest[node], []).append(node)
        elif node in chosen:
            pieces.setdefault(chosen[node], []).append(node)
    return tuple(
        Stage(tuple(pieces.get(index, ())), tuple(eager.get(index, ()))) for index in sorted({*pieces, *eager})
    )


def _earliest(graph: torch.fx.Graph, stay: Mapping[Node, str], after: Collection[Node]) -> dict[Node, int]:
    """Return the first stage that has what each call takes."""
    stages: dict[Node, int] = {}
    last_random = 0
    for node in graph.nodes:
        if (node.op != "call_function" and node not in stay) or node in after:
            continue
        stage = 0
        for source in node.all_input_nodes:
            if source in stages:
                stage = max(stage, stages[source] + (1 if source in stay and node not in stay else 0))
        if is_random(node):
            stage = last_random = max(stage, last_random)
        stages[node] = stage
    return stages


def _latest(
    graph: torch.fx.Graph, stay: Mapping[Node, str], earliest: Mapping[Node, int], last: int
) -> dict[Node, int]:
    """Return the last stage at which each node for onnxruntime is in time for all that take its result."""
    latest: dict[Node, int] = {}
    for node in reversed(graph.nodes):
        if node not in earliest or node in stay:
            continue
        users = (earliest[user] if user in stay else latest.get(user, last) for user in node.users)
        latest[node] = min(users, default=last)
    return latest


def _put_off(graph: torch.fx.Graph, nodes: Collection[Node]) -> list[Node]:
    """Return those of `nodes` that save no memory by running early, readers before what they read.

    They take inputs of the graph and each other, and nothing larger than what they give.
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
    value = node.meta.get("val")
    return seen_elements(value) * value.element_size() if isinstance(value, torch.Tensor) else None


def _points(intervals: list[tuple[int, int]]) -> list[int]:
    """Return the fewest points of which every interval, both ends included, holds one."""
    points: list[int] = []
    for start, end in sorted(intervals, key=lambda interval: interval[1]):
        if not points or points[-1] < start:
            points.append(end)
    return points
