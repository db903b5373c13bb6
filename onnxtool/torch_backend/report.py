"""What went to onnxruntime, what stayed in PyTorch, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class PieceReport:
    """A part of a graph that is one session.

    Attributes:
        num_nodes: operators of PyTorch in it.
        num_onnx_nodes: nodes of its ONNX model.
        providers: the providers of its session, in their order.
    """

    num_nodes: int
    num_onnx_nodes: int
    providers: tuple[str, ...]


@dataclass(frozen=True)
class EagerNode:
    """An operator that stays in PyTorch: its name in the graph, the operator, and the reason."""

    name: str
    operator: str
    reason: str


@dataclass(frozen=True)
class GraphReport:
    """What became of one graph.

    Attributes:
        kind: forward, backward or inference.
        pieces: the sessions in their order.
        eager: what stayed in PyTorch, in the order of the graph.
        duration_ms: from the graph to what can be called.
    """

    kind: str
    pieces: tuple[PieceReport, ...]
    eager: tuple[EagerNode, ...]
    duration_ms: float

    @property
    def num_nodes(self) -> int:
        """Operators of PyTorch in the whole graph."""
        return sum(piece.num_nodes for piece in self.pieces) + len(self.eager)


@dataclass(frozen=True)
class Explanation:
    """What became of the graphs of a model; as a string, a text for people."""

    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        return "\n".join(line for graph in self.graphs for line in _lines(graph)) or "no graph was compiled"


def _lines(graph: GraphReport) -> list[str]:
    inside = sum(piece.num_nodes for piece in graph.pieces)
    sessions = f"{len(graph.pieces)} session{'' if len(graph.pieces) == 1 else 's'}"
    lines = [f"{graph.kind}: {inside} of {graph.num_nodes} operators in {sessions} of onnxruntime"]
    reasons = Counter((node.operator, node.reason) for node in graph.eager)
    lines += [f"  {count} x {name} in PyTorch: {reason}" for (name, reason), count in reasons.most_common()]
    return lines
