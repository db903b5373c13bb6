"""The backend that TorchDynamo calls with each captured graph, and a report of what it does with a model."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

import torch
from torch._guards import CompileContext

from onnxtool.errors import CompilationError
from onnxtool.options import checked
from onnxtool.torch_backend.cache import Cache
from onnxtool.torch_backend.capture import partition, traceable_functions
from onnxtool.torch_backend.compiler import CompiledGraph, compile_graph
from onnxtool.torch_backend.lower.maximum_first import take_maximum_first
from onnxtool.torch_backend.lower.torch_onnx import decompositions, recall_translations
from onnxtool.torch_backend.options import OrtBackendOptions
from onnxtool.torch_backend.report import Explanation

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
            "decompositions": {op: made for op, made in decompositions().items() if op not in own},
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
