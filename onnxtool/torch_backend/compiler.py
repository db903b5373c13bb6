"""Compile a graph of ATen operators: what onnxruntime can run becomes sessions; the rest stays in PyTorch."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from onnxtool.errors import CompilationError
from onnxtool.torch_backend.execution import SessionCall
from onnxtool.torch_backend.lower.fx_rewrites.rewriter import rewrite_symbolic_sizes, rewritten
from onnxtool.torch_backend.lower.placement import VIEW, reasons_to_stay
from onnxtool.torch_backend.matmul_placement import ResultMemory, faster_in_pytorch, with_result_memory
from onnxtool.torch_backend.nodes import called, is_random
from onnxtool.torch_backend.options import OrtBackendOptions
from onnxtool.torch_backend.partition import Partition, cut, extract, value_of, views_at_readers
from onnxtool.torch_backend.report import EagerNode, GraphReport, PartitionReport
from onnxtool.torch_backend.sessions import select_providers
from onnxtool.torch_backend.translator import PartitionError, Translated, Translator

Compiled = Callable[..., Any]


class CompiledGraph:
    """The record of a compiled graph; it does not keep the graph's sessions alive.

    Attributes:
        report: which operators run where, and why.
    """

    def __init__(self, report: GraphReport, sessions: Sequence[SessionCall]) -> None:
        self.report = report
        self._sessions = tuple(map(weakref.ref, sessions))
        self._counts = tuple(session.count for session in sessions)

    @property
    def sessions(self) -> tuple[SessionCall, ...]:
        """The session calls, in order; empty once the compiled graph is gone."""
        return tuple(session for reference in self._sessions if (session := reference()) is not None)

    @property
    def num_calls(self) -> int:
        """The total number of calls of its sessions."""
        return sum(count.calls for count in self._counts)


def compile_graph(owner: torch.fx.GraphModule, kind: str, options: OrtBackendOptions) -> tuple[Compiled, CompiledGraph]:
    """Compile a functional graph of ATen operators whose nodes have fake values in `meta["val"]`.

    `kind` is the graph's kind in the report: forward, backward or inference. Nodes that fail to compile stay in
    PyTorch, and the graph is partitioned again. The first result takes the graph's inputs and returns its outputs.
    """
    start = time.perf_counter()
    original, owner = owner, rewritten(owner, options.translations)
    translator = Translator(options)
    views = views_at_readers(owner.graph)
    rewrite_symbolic_sizes(owner.graph)
    rejected: dict[str, str] = translator.rejected_before(owner)
    stay = reasons_to_stay(owner.graph, rejected)
    translator.require_own(owner, stay)
    measured = faster_in_pytorch(owner, stay, translator)
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
    eager = [stage.eager for stage in stages]
    call: Compiled = _assemble(owner, eager, partitions, [made and made[1] for made in calls], views, measured)
    if options.assert_close_to_baseline:
        call = compared(call, original, options)
    report = GraphReport(
        kind=kind,
        partitions=tuple(made[0] for made in calls if made),
        eager=tuple(
            EagerNode(node.name, called(node.target), why)
            for node, why in stay.items()
            if _computes(node) and node not in views and why != VIEW
        ),
        duration_ms=(time.perf_counter() - start) * 1e3,
    )
    return call, CompiledGraph(report, [made[1] for made in calls if made])


def _computes(node: torch.fx.Node) -> bool:
    """Return whether the node is an operator: not a getitem on another's results, nor Python arithmetic on sizes."""
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
    eager: Sequence[Sequence[torch.fx.Node]],
    partitions: Sequence[Partition | None],
    calls: Sequence[SessionCall | None],
    views: Sequence[torch.fx.Node],
    with_memory: Container[str],
) -> torch.fx.GraphModule:
    """Return a graph in which each partition is a single session call.

    The results of nodes named in `with_memory` use the graph's memory.
    """
    graph, memory = torch.fx.Graph(), ResultMemory()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in owner.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for nodes, partition, call in zip(eager, partitions, calls, strict=True):
        if partition is not None and call is not None:
            results = graph.call_function(call, _arguments(graph, partition, copies))
            for index, node in enumerate(partition.outputs):
                copies[node] = graph.call_function(operator.getitem, (results, index))
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.name in with_memory:
                copies[node].target = with_result_memory(node, memory)
    for node in views:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    (output,) = owner.graph.find_nodes(op="output")
    graph.node_copy(output, copies.__getitem__)
    return torch.fx.GraphModule(owner, graph, class_name="CompiledGraph")


def _arguments(
    graph: torch.fx.Graph, partition: Partition, copies: Mapping[torch.fx.Node, torch.fx.Node]
) -> tuple[torch.fx.Node, ...]:
    """Return the inputs of a partition, each in its memory order."""
    permute = torch.ops.aten.permute.default
    return tuple(
        copies[node] if order is None else graph.call_function(permute, (copies[node], list(order)))
        for node, order in zip(partition.inputs, partition.orders, strict=True)
    )


def compared(call: Callable[..., Any], owner: torch.fx.GraphModule, options: OrtBackendOptions) -> Callable[..., Any]:
    """Return a function that calls both the compiled graph and the original, and requires equal results.

    Both draw the same random numbers.

    Raises:
        CompilationError: raised by the function if the results differ by more than the tolerance.
    """
    eager = torch.fx.GraphModule(owner, _copied(owner.graph))
    draws = any(is_random(node) for node in owner.graph.nodes)
    own = dict.fromkeys(called(node.target) for node in owner.graph.nodes if node.target in options.translations)
    cause = f"correct the translation of {', '.join(own)}" if own else "report it with the model that dump_onnx writes"

    def checked(*arguments: Any) -> Any:
        state = torch.get_rng_state() if draws else None
        expected = eager(*[value.clone() if isinstance(value, torch.Tensor) else value for value in arguments])
        if state is not None:
            torch.set_rng_state(state)
        actual = call(*arguments)
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            if isinstance(theirs, torch.Tensor):
                _require_close(ours, theirs, index, options, cause)
        return actual

    return checked


def _require_close(
    ours: torch.Tensor, theirs: torch.Tensor, index: int, options: OrtBackendOptions, cause: str
) -> None:
    try:
        torch.testing.assert_close(ours, theirs, rtol=options.rtol, atol=options.atol, equal_nan=True)
    except AssertionError as error:
        raise CompilationError(
            f"result {index} of a graph differs from PyTorch's: {' '.join(str(error).split())}",
            f"raise rtol and atol if that is expected; else {cause}",
        ) from error


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
