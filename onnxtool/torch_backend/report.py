"""Report which operators run in onnxruntime, which stay in PyTorch, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class PartitionReport:
    """A partition of a graph, run as one session.

    Attributes:
        num_nodes: number of PyTorch operators in it.
        num_onnx_nodes: number of nodes in its ONNX model.
        providers: its session's providers, in order.
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


@short_repr
@dataclass(frozen=True)
class GraphReport:
    """The report on a compiled graph.

    Attributes:
        kind: forward, backward or inference.
        partitions: the partitions, in order.
        eager: the operators that stay in PyTorch, in graph order.
        duration_ms: compilation time.
    """

    kind: str
    partitions: tuple[PartitionReport, ...]
    eager: tuple[EagerNode, ...]
    duration_ms: float

    @property
    def num_nodes(self) -> int:
        """The number of PyTorch operators in the whole graph."""
        return sum(partition.num_nodes for partition in self.partitions) + len(self.eager)


@dataclass(frozen=True)
class StepTimes:
    """The time of training steps, forward and backward, in onnxruntime and in PyTorch; see `ModuleWithLoss`.

    Attributes:
        in_onnxruntime: whether steps run in onnxruntime from then on, otherwise in PyTorch.
        onnxruntime_ms: median of a step in onnxruntime.
        pytorch_ms: median of a step in PyTorch, for inputs of the same size.
        num_steps: number of measured steps of each, in turns.
    """

    in_onnxruntime: bool
    onnxruntime_ms: float
    pytorch_ms: float
    num_steps: int

    def __str__(self) -> str:
        library = "onnxruntime" if self.in_onnxruntime else "PyTorch"
        return (
            f"training steps run in {library}: {self.onnxruntime_ms:.1f} ms in onnxruntime, {self.pytorch_ms:.1f} ms "
            f"in PyTorch (medians of {self.num_steps} steps each, in turns)"
        )


@short_repr
@dataclass(frozen=True)
class Explanation:
    """The report on a model's compiled graphs; `str()` gives a readable text.

    Attributes:
        graphs: the graphs, in the order of their compilation.
        steps: where the steps of a `ModuleWithLoss` run; None if that was not measured (yet).
    """

    graphs: tuple[GraphReport, ...]
    steps: StepTimes | None = None

    def __str__(self) -> str:
        lines = [line for graph in self.graphs for line in _lines(graph)]
        return "\n".join([*lines, *([str(self.steps)] if self.steps else [])]) or "no graph was compiled"


def _lines(graph: GraphReport) -> list[str]:
    inside = sum(partition.num_nodes for partition in graph.partitions)
    sessions = f"{len(graph.partitions)} session{'' if len(graph.partitions) == 1 else 's'}"
    lines = [f"{graph.kind}: {inside} of {graph.num_nodes} operators in {sessions} of onnxruntime"]
    reasons = Counter((node.operator, node.reason) for node in graph.eager)
    lines += [f"  {count} x {name} in PyTorch: {reason}" for (name, reason), count in reasons.most_common()]
    return lines
