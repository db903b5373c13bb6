"""The backend that TorchDynamo calls with each captured graph: what onnxruntime can run becomes sessions.

The rest stays in PyTorch; a report says what becomes of a model.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch
from torch._guards import CompileContext

from onnxtool.errors import CompilationError
from onnxtool.options import checked
from onnxtool.torch_backend.cache import Cache
from onnxtool.torch_backend.capture import partition, traceable_functions
from onnxtool.torch_backend.execution import SessionCall
from onnxtool.torch_backend.lower.fx_rewrites.rewriter import rewrite_symbolic_sizes, rewritten
from onnxtool.torch_backend.lower.maximum_first import take_maximum_first
from onnxtool.torch_backend.lower.placement import VIEW, reasons_to_stay
from onnxtool.torch_backend.lower.torch_onnx import decompositions, recall_translations
from onnxtool.torch_backend.matmul_placement import ResultMemory, faster_in_pytorch, with_result_memory
from onnxtool.torch_backend.nodes import called, is_random
from onnxtool.torch_backend.options import OrtBackendOptions
from onnxtool.torch_backend.partition import Partition, cut, extract, value_of, views_at_readers
from onnxtool.torch_backend.report import EagerNode, Explanation, GraphReport, PartitionReport
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
    call: Compiled = _assemble(owner, eager, partitions, [pair and pair[1] for pair in calls], views, measured)
    if options.assert_close_to_baseline:
        call = compared(call, original, options)
    report = GraphReport(
        kind=kind,
        partitions=tuple(pair[0] for pair in calls if pair),
        eager=tuple(
            EagerNode(node.name, called(node.target), why)
            for node, why in stay.items()
            if _computes(node) and node not in views and why != VIEW
        ),
        duration_ms=(time.perf_counter() - start) * 1e3,
    )
    return call, CompiledGraph(report, [pair[1] for pair in calls if pair])


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
    for nodes, part, call in zip(eager, partitions, calls, strict=True):
        if part is not None and call is not None:
            results = graph.call_function(call, _arguments(graph, part, copies))
            for index, node in enumerate(part.outputs):
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


NAME = "onnxtool"
_MAX_INSTANCES = 8
_LONG_S = 5


class OrtBackend:
    """Compiles the graphs it is called with, and keeps a record of each."""

    _instances: ClassVar[list[OrtBackend]] = []

    @checked
    def __init__(self, options: OrtBackendOptions | None = None) -> None:
        self.options = options or OrtBackendOptions()
        self.graphs: list[CompiledGraph] = []

    def __reduce__(self) -> tuple[type[OrtBackend], tuple[OrtBackendOptions]]:
        """Copy or pickle only the options: a copied model compiles again because sessions cannot be copied."""
        return OrtBackend, (self.options,)

    def __deepcopy__(self, _memo: dict[int, object]) -> OrtBackend:
        return OrtBackend(self.options)

    @classmethod
    @checked
    def with_options(cls, options: OrtBackendOptions) -> OrtBackend:
        """Return the existing backend with these options, or a new one; the last eight are kept."""
        for instance in cls._instances:
            if instance.options == options:
                return instance
        instance = cls(options)
        cls._instances = [*cls._instances, instance][-_MAX_INSTANCES:]
        return instance

    @classmethod
    def clear_instances(cls) -> None:
        """Forget all instances; graphs they have compiled still work."""
        cls._instances = []

    @property
    def execution_count(self) -> int:
        """The number of session runs of this backend."""
        return sum(graph.num_calls for graph in self.graphs)

    def explain(self) -> Explanation:
        """Report how all graphs so far were compiled."""
        return Explanation(tuple(graph.report for graph in self.graphs))

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a TorchDynamo graph, or a graph of ATen operators if `use_aot_autograd` is off.

        In the latter case, the returned function takes a list of inputs, as AOTAutograd passes them.

        Raises:
            CompilationError: the graph is of the wrong kind.
        """
        if not self.options.use_aot_autograd:
            return self._compiler("graph")(graph_module, example_inputs)
        from torch._dynamo.backends.common import aot_autograd

        if take_maximum_first(graph_module.graph):
            graph_module.recompile()
        with _said_if_long(len(graph_module.graph.nodes)), traceable_functions(self.options.dropout):
            compiled = aot_autograd(**self.autograd_arguments())(graph_module, example_inputs)
        return _with_original_errors(compiled, graph_module)

    def autograd_arguments(self) -> dict[str, Any]:
        """Return the arguments for AOTAutograd, by name.

        They are for `torch._dynamo.backends.common.aot_autograd` and `functorch.compile.aot_function`, which must trace
        inside `traceable_functions`, with the option `dropout` as its argument.
        """
        own = self.options.translations
        recall_translations(Cache(self.options.cache_folder))
        return {
            "fw_compiler": self._compiler("forward"),
            "bw_compiler": self._compiler("backward"),
            "inference_compiler": self._compiler("inference"),
            "partition_fn": self.options.partition_fn or partition,
            "decompositions": {op: decompose for op, decompose in decompositions().items() if op not in own},
        }

    @checked
    def compile(self, graph_module: torch.fx.GraphModule, kind: str) -> Callable[..., Any]:
        """Compile a functional graph of ATen operators whose nodes have fake values.

        Raises:
            CompilationError: a value of the graph is unknown.
        """
        for node in graph_module.graph.nodes:
            if node.op == "placeholder" and "val" not in node.meta:
                raise CompilationError(
                    f"the input {node.name} has no fake value",
                    "without AOTAutograd the backend takes graphs that make_fx or AOTAutograd traced",
                )
        call, graph = compile_graph(graph_module, kind, self.options)
        summary = str(Explanation((graph.report,))).splitlines()[0]
        _LOGGER.info("compiled in %.1f s: %s", graph.report.duration_ms / 1e3, summary)
        self.graphs.append(graph)
        return call

    def _compiler(self, kind: str) -> Callable[..., Callable[..., Any]]:
        from functorch.compile import make_boxed_func

        def compile_traced(graph_module: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return make_boxed_func(self.compile(graph_module, kind))  # type: ignore[no-any-return]

        return compile_traced


@contextlib.contextmanager
def _said_if_long(num_operations: int) -> Iterator[None]:
    """Log a line if compiling takes longer than five seconds, and how often the same code was compiled."""
    compilation = CompileContext.current_compile_id()
    number = (compilation.frame_compile_id or 0) + 1 if compilation is not None else 1
    changed = "; TORCH_LOGS=recompiles says what has changed since the one before" if number > 1 else ""
    text = "compiling takes longer than %d s: a graph of %d operations, number %d for this code%s"
    timer = threading.Timer(_LONG_S, _LOGGER.warning, (text, _LONG_S, num_operations, number, changed))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _with_original_errors(compiled: Callable[..., Any], graph_module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return a function that raises what the user's own functions raise, not what their decompositions do."""

    @functools.wraps(compiled)
    def call(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except (IndexError, RuntimeError):
            torch.fx.GraphModule(graph_module, graph_module.graph).forward(*arguments)  # a call would print the graph
            raise

    return call


@checked
def onnxtool_backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | OrtBackendOptions | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Serve `torch.compile(model, backend="onnxtool", options=...)`.

    Raises:
        CompilationError: an option does not exist, or a mode was given, which only inductor has.
    """
    if mode is not None:
        raise CompilationError(f"the backend has no mode {mode!r}", "pass options instead")
    if not isinstance(options, OrtBackendOptions):
        options = OrtBackendOptions.from_mapping(options or {})
    return OrtBackend.with_options(options)(graph_module, example_inputs)


def register() -> None:
    """Register the backend under its name when this package is importable but not installed.

    An installed package has an entry point, which PyTorch registers itself.
    """
    from torch._dynamo.backends import registry

    if NAME not in entry_points(group="torch_dynamo_backends").names and NAME not in registry._COMPILER_FNS:
        registry.register_backend(onnxtool_backend, name=NAME)


_LOGGER = logging.getLogger(__name__)


@checked
def explain(
    model: Callable[..., Any], *inputs: Any, options: OrtBackendOptions | None = None, **named_inputs: Any
) -> Explanation:
    """Compile `model`, run it once, also backward if its first result has a gradient, and report what runs where.

    The gradients of its parameters are left unchanged.
    """
    backend = OrtBackend(options)
    result = _first_tensor(torch.compile(model, backend=backend)(*inputs, **named_inputs))
    if result.requires_grad:
        leaves = [p for p in model.parameters() if p.requires_grad] if isinstance(model, torch.nn.Module) else []
        leaves += [value for value in (*inputs, *named_inputs.values()) if getattr(value, "requires_grad", False)]
        torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return backend.explain()


def _first_tensor(result: Any) -> torch.Tensor:
    """Return the first tensor in a tensor, a sequence, a mapping or a transformers output."""
    if isinstance(result, Mapping):
        result = tuple(result.values())
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result
