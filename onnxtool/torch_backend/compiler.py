"""Compiles a graph of ATen operators: what onnxruntime can run becomes sessions, the rest stays in PyTorch."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from onnxtool.torch_backend.inductor_chains import Chain, in_chains
from onnxtool.torch_backend.lower.fx_rewrites.rewriter import rewritten
from onnxtool.torch_backend.lower.fx_rewrites.symbolic_sizes import rewrite_symbolic_sizes
from onnxtool.torch_backend.lower.placement import VIEW, reasons_to_stay
from onnxtool.torch_backend.matmul_placement import faster_in_pytorch
from onnxtool.torch_backend.nodes import called
from onnxtool.torch_backend.options import OrtBackendOptions
from onnxtool.torch_backend.partition.partitions import Partition, extract, value_of
from onnxtool.torch_backend.partition.stages import cut
from onnxtool.torch_backend.partition.views import views_at_readers
from onnxtool.torch_backend.report import EagerNode, GraphReport, PartitionReport
from onnxtool.torch_backend.run.baseline import compared
from onnxtool.torch_backend.run.execution import SessionCall
from onnxtool.torch_backend.run.result_memory import ResultMemory, with_result_memory
from onnxtool.torch_backend.run.sessions import select_providers
from onnxtool.torch_backend.translator import PartitionError, Translated, Translator

Compiled = Callable[..., Any]


class CompiledGraph:
    """The record of a graph that was compiled; it does not keep the graph's sessions alive.

    Attributes:
        report: which operators run where, and why.
    """

    def __init__(self, report: GraphReport, sessions: Sequence[SessionCall]) -> None:
        self.report = report
        self._sessions = tuple(map(weakref.ref, sessions))
        self._counts = tuple(session.count for session in sessions)

    @property
    def sessions(self) -> tuple[SessionCall, ...]:
        """The calls of sessions, in their order; none once the compiled graph is gone."""
        return tuple(session for reference in self._sessions if (session := reference()) is not None)

    @property
    def num_calls(self) -> int:
        """How often its sessions were called, all together."""
        return sum(count.calls for count in self._counts)


def compile_graph(owner: torch.fx.GraphModule, kind: str, options: OrtBackendOptions) -> tuple[Compiled, CompiledGraph]:
    """Compile a functional graph of ATen operators whose nodes have their fake values as `meta["val"]`.

    `kind` is the graph's kind in the report: forward, backward or inference. Nodes that turn out not to compile stay in
    PyTorch, and the graph is cut again. The first result takes the graph's inputs and returns its outputs.
    """
    start = time.perf_counter()
    original, owner = owner, rewritten(owner)
    translator = Translator(options)
    views = views_at_readers(owner.graph)
    rewrite_symbolic_sizes(owner.graph)
    rejected: dict[str, str] = translator.rejected_before(owner)
    measured = faster_in_pytorch(owner, reasons_to_stay(owner.graph, rejected), translator)
    while True:
        stay = reasons_to_stay(owner.graph, measured | rejected)
        stages = cut(owner.graph, stay, views)
        partitions = [extract(owner, stage.partition) if stage.partition else None for stage in stages]
        try:
            calls = [
                _call(owner, partition, index, translator) if partition else None
                for index, partition in enumerate(partitions)
            ]
        except PartitionError as error:
            rejected |= error.nodes
            continue
        break
    translator.remember(owner, rejected)
    eager = [list(in_chains(owner, stage.eager, translator)) for stage in stages]
    call: Compiled = _assemble(owner, eager, partitions, [made and made[1] for made in calls], views, measured)
    if options.assert_close_to_baseline:
        call = compared(call, original, options)
    in_kernels = {
        node: item.reason for items in eager for item in items if isinstance(item, Chain) for node in item.nodes
    }
    report = GraphReport(
        kind=kind,
        partitions=tuple(made[0] for made in calls if made),
        eager=tuple(
            EagerNode(node.name, called(node.target), in_kernels.get(node, why))
            for node, why in stay.items()
            if _computes(node) and node not in views and why != VIEW
        ),
        duration_ms=(time.perf_counter() - start) * 1e3,
    )
    return call, CompiledGraph(report, [made[1] for made in calls if made])


def _computes(node: torch.fx.Node) -> bool:
    """Whether the node is an operator: neither one of several results of another, nor arithmetic of Python on sizes."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return False
    return not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _call(
    owner: torch.fx.GraphModule, partition: Partition, index: int, translator: Translator
) -> tuple[PartitionReport, SessionCall]:
    inputs = [value_of(owner, node) for node in partition.inputs]
    outputs = [node.meta["val"] for node in partition.outputs]
    # Without the nodes that permute inputs back.
    num_nodes = sum(map(_computes, partition.module.graph.nodes)) - sum(order is not None for order in partition.orders)
    providers = select_providers(translator.options, inputs, outputs)
    translated: Translated = translator.translate(partition, providers)
    call = SessionCall(f"onnxruntime_{index}", translated, partition, inputs, translator.options)
    return PartitionReport(num_nodes, translated.num_onnx_nodes, tuple(translated.session.get_providers())), call


def _assemble(
    owner: torch.fx.GraphModule,
    eager: Sequence[Sequence[torch.fx.Node | Chain]],
    partitions: Sequence[Partition | None],
    calls: Sequence[SessionCall | None],
    views: Sequence[torch.fx.Node],
    with_memory: Container[str],
) -> torch.fx.GraphModule:
    """Return the graph in which each partition is one call of a session.

    The results of nodes named in `with_memory` are in memory of the graph.
    """
    graph, memory = torch.fx.Graph(), ResultMemory()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in owner.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)

    def call_whole(partition: Partition, call: Callable[..., Any]) -> None:
        results = graph.call_function(call, _arguments(graph, partition, copies))
        for index, node in enumerate(partition.outputs):
            copies[node] = graph.call_function(operator.getitem, (results, index))

    for items, partition, call in zip(eager, partitions, calls, strict=True):
        if partition is not None and call is not None:
            call_whole(partition, call)
        for item in items:
            if isinstance(item, Chain):
                call_whole(item.partition, item.kernel)
                continue
            copies[item] = graph.node_copy(item, copies.__getitem__)
            if item.name in with_memory:
                copies[item].target = with_result_memory(item, memory)
    for node in views:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    (output,) = owner.graph.find_nodes(op="output")
    graph.node_copy(output, copies.__getitem__)
    return torch.fx.GraphModule(owner, graph, class_name="CompiledGraph")


def _arguments(
    graph: torch.fx.Graph, partition: Partition, copies: Mapping[torch.fx.Node, torch.fx.Node]
) -> tuple[torch.fx.Node, ...]:
    """Return the inputs of a partition, each in the order of its memory."""
    permute = torch.ops.aten.permute.default
    return tuple(
        copies[node] if order is None else graph.call_function(permute, (copies[node], list(order)))
        for node, order in zip(partition.inputs, partition.orders, strict=True)
    )
