"""Helpers to try the backend on a model: a backend for torch.compile, one training step, an explanation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxtool.options import checked
from onnxtool.torch_backend.backend import OrtBackend
from onnxtool.torch_backend.options import OrtBackendOptions, refuse_unknown
from onnxtool.torch_backend.report import Explanation

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_LOGGER = logging.getLogger(__name__)


@checked
def make_aot_ort(
    dynamic: bool = False, rewrite: bool = False, verbose: int = 0, **others: object
) -> tuple[Callable[..., Any], OrtBackend]:
    """Make a new backend for one model.

    Args:
        dynamic: has no effect and serves callers of the original: `torch.compile(dynamic=...)` decides whether graphs
            have fixed or symbolic sizes, and both are compiled.
        rewrite: whether passes of `onnxtool optimize` clean up each model before its session is made.
        verbose: 1 or more logs, at level INFO, how each graph was compiled.
        **others: none; options of other exporters are refused by name.

    Returns:
        What to pass as `torch.compile(backend=...)`, and the backend itself, which counts calls and explains.

    Raises:
        CompilationError: there are `others`.
    """
    refuse_unknown(sorted(others), ("dynamic", "rewrite", "verbose"))
    backend = OrtBackend(OrtBackendOptions(pre_ort_model_transforms=("tidy",) if rewrite else ()))

    def compile_captured(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        call = backend(graph_module, example_inputs)
        if verbose:
            _LOGGER.info("%s", backend.explain())
        return call

    return compile_captured, backend


@checked
def train_loop(
    model: torch.nn.Module,
    *inputs: Any,
    loss_fn: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[torch.Tensor, ...]:
    """Train `model` for one step on `inputs`, towards ones, and return the gradients of its parameters.

    By default the loss is the mean squared error, and the optimizer is plain gradient descent. The loss is that of the
    first tensor that the model returns.

    Raises:
        ValueError: no parameter has a gradient.
    """
    loss_fn = loss_fn or torch.nn.MSELoss()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    optimizer.zero_grad()
    prediction = _first_tensor(model(*inputs))
    loss_fn(prediction, torch.ones_like(prediction)).backward()
    optimizer.step()
    gradients = tuple(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    if not gradients:
        raise ValueError("no parameter of the model has a gradient")
    return gradients


@checked
def explain(
    model: Callable[..., Any], *inputs: Any, options: OrtBackendOptions | None = None, **named_inputs: Any
) -> Explanation:
    """Compile `model`, run it once, and backwards where its first result has a gradient, and report what runs where.

    The gradients of its parameters are left as they were.
    """
    backend = OrtBackend(options)
    result = _first_tensor(torch.compile(model, backend=backend)(*inputs, **named_inputs))
    if result.requires_grad:
        leaves = [p for p in model.parameters() if p.requires_grad] if isinstance(model, torch.nn.Module) else []
        leaves += [value for value in (*inputs, *named_inputs.values()) if getattr(value, "requires_grad", False)]
        torch.autograd.grad(result.sum(), leaves, allow_unused=True)
    return backend.explain()


def _first_tensor(result: Any) -> torch.Tensor:
    """Return the first tensor of a tensor, a sequence, a mapping or one of transformers' outputs."""
    if isinstance(result, Mapping):
        result = tuple(result.values())
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result
