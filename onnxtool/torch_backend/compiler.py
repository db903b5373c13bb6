"""Compiles a graph of ATen operators: what onnxruntime can run becomes sessions, the rest stays as it is."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from onnxtool.torch_backend.lower.fx_rewrites.arithmetic import SHORTCUTS
from onnxtool.torch_backend.lower.fx_rewrites.rewriter import rewritten
from onnxtool.torch_backend.lower.fx_rewrites.symbolic_sizes import prepare_numbers
from onnxtool.torch_backend.lower.placement import VIEW, reasons_to_stay
from onnxtool.torch_backend.partition.partitions import Piece, extract, value_of
from onnxtool.torch_backend.partition.stages import Stage, cut
from onnxtool.torch_backend.partition.views import views_at_readers
from onnxtool.torch_backend.report import EagerNode, GraphReport, PieceReport
from onnxtool.torch_backend.run.baseline import compared
from onnxtool.torch_backend.run.cache import called
from onnxtool.torch_backend.run.execution import SessionCall
from onnxtool.torch_backend.run.sessions import select_providers
from onnxtool.torch_backend.translator import PieceError, Translated, Translator

if TYPE_CHECKING:
    from onnxtool.torch_backend.options import OrtBackendOptions

Compiled = Callable[..., Any]


class CompiledGraph:
    """What is remembered of a graph that was compiled; it does not keep the graph's sessions alive.

    Attributes:
        report: what went where and why.
    """

    def __init__(self, report: GraphReport, sessions: Sequence[SessionCall]) -> None:
        self.report = report
        self._sessions = tuple(map(weakref.ref, sessions))
        self._counts = tuple(session.count for session in sessions)

    @property
    def sessions(self) -> tuple[SessionCall, ...]:
        """The calls into onnxruntime, in their order; none once nobody can call the graph any more."""
        return tuple(session for reference in self._sessions if (session := reference()) is not None)

    @property
    def num_calls(self) -> int:
        """How often its sessions were called, all together."""
        return sum(count.calls for count in self._counts)


def compile_graph(owner: torch.fx.GraphModule, kind: str, options: OrtBackendOptions) -> tuple[Compiled, CompiledGraph]:
    """Compile a functional graph of ATen operators whose nodes have their fake values as `meta["val"]`.

    `kind` is what the report calls the graph: forward, backward or inference. What turns out not to compile stays in
    PyTorch, and the graph is cut anew. What is returned first takes the graph's inputs and returns its outputs.
    """
    start = time.perf_counter()
    original, owner = owner, rewritten(owner, SHORTCUTS)
    translator = Translator(options)
    views = views_at_readers(owner.graph)
    prepare_numbers(owner.graph)
    rejected: dict[str, str] = translator.rejected_before(owner)
    while True:
        stay = reasons_to_stay(owner.graph, rejected)
        stages = cut(owner.graph, stay, views)
        pieces = [extract(owner, stage.piece) if stage.piece else None for stage in stages]
        try:
            calls = [_call(owner, piece, index, translator) if piece else None for index, piece in enumerate(pieces)]
        except PieceError as error:
            rejected |= error.nodes
            continue
        break
    translator.remember(owner, rejected)
    call: Compiled = _assemble(owner, stages, pieces, [made and made[1] for made in calls], views)
    if options.assert_close_to_baseline:
        call = compared(call, original, options)
    report = GraphReport(
        kind=kind,
        pieces=tuple(made[0] for made in calls if made),
        eager=tuple(
            EagerNode(node.name, called(node.target), why)
            for node, why in stay.items()
            if _computes(node) and node not in views and why != VIEW
        ),
        duration_ms=(time.perf_counter() - start) * 1e3,
    )
    return call, CompiledGraph(report, [made[1] for made in calls if made])


def _computes(node: torch.fx.Node) -> bool:
    """Whether the node is an operator: not one of the results of another, and no arithmetic of Python on sizes."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return False
    return not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _call(
    owner: torch.fx.GraphModule, piece: Piece, index: int, translator: Translator
) -> tuple[PieceReport, SessionCall]:
    inputs = [value_of(owner, node) for node in piece.inputs]
    outputs = [node.meta["val"] for node in piece.outputs]
    # Not the graph's own are those that turn inputs back.
    num_nodes = sum(map(_computes, piece.module.graph.nodes)) - sum(order is not None for order in piece.orders)
    providers = select_providers(translator.options, inputs, outputs)
    translated: Translated = translator.translate(piece, providers)
    call = SessionCall(f"onnxruntime_{index}", translated, piece, inputs, translator.options)
    return PieceReport(num_nodes, translated.num_onnx_nodes, tuple(translated.session.get_providers())), call


def _assemble(
    owner: torch.fx.GraphModule,
    stages: Sequence[Stage],
    pieces: Sequence[Piece | None],
    calls: Sequence[SessionCall | None],
    views: Sequence[torch.fx.Node],
) -> torch.fx.GraphModule:
    """Write the graph anew: each piece is one call of a session."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in owner.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for stage, piece, call in zip(stages, pieces, calls, strict=True):
        if piece is not None and call is not None:
            results = graph.call_function(call, _arguments(graph, piece, copies))
            for index, node in enumerate(piece.outputs):
                copies[node] = graph.call_function(operator.getitem, (results, index))
        for node in stage.eager:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in views:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    (output,) = owner.graph.find_nodes(op="output")
    graph.node_copy(output, copies.__getitem__)
    return torch.fx.GraphModule(owner, graph, class_name="CompiledGraph")


def _arguments(
    graph: torch.fx.Graph, piece: Piece, copies: Mapping[torch.fx.Node, torch.fx.Node]
) -> tuple[torch.fx.Node, ...]:
    """Return the inputs of a piece, each in the order of its memory."""
    permute = torch.ops.aten.permute.default
    return tuple(
        copies[node] if order is None else graph.call_function(permute, (copies[node], list(order)))
        for node, order in zip(piece.inputs, piece.orders, strict=True)
    )
