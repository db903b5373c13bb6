"""Compares each call of a compiled graph with the same graph in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onnxtool.errors import CompilationError
from onnxtool.torch_backend.nodes import is_random
from onnxtool.torch_backend.options import OrtBackendOptions


def compared(call: Callable[..., Any], owner: torch.fx.GraphModule, options: OrtBackendOptions) -> Callable[..., Any]:
    """Return a function that calls the compiled graph and the graph itself, and requires equal results.

    Both draw the same random numbers.

    Raises:
        CompilationError: raised by the function where they differ by more than the tolerance.
    """
    eager = torch.fx.GraphModule(owner, _copy(owner.graph))
    draws = any(is_random(node) for node in owner.graph.nodes)

    def checked(*arguments: Any) -> Any:
        state = torch.get_rng_state() if draws else None
        expected = eager(*[value.clone() if isinstance(value, torch.Tensor) else value for value in arguments])
        if state is not None:
            torch.set_rng_state(state)
        actual = call(*arguments)
        for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            if isinstance(theirs, torch.Tensor):
                _require_close(ours, theirs, index, options)
        return actual

    return checked


def _require_close(ours: torch.Tensor, theirs: torch.Tensor, index: int, options: OrtBackendOptions) -> None:
    try:
        torch.testing.assert_close(ours, theirs, rtol=options.rtol, atol=options.atol, equal_nan=True)
    except AssertionError as error:
        raise CompilationError(
            f"result {index} of a graph differs from PyTorch's: {' '.join(str(error).split())}",
            "raise rtol and atol if that is expected; else report it with the model that dump_onnx writes",
        ) from error


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
