"""Eager PyTorch as the oracle: the same function, compiled and not, on the same inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions

TOLERANCE = 1e-5
"""Of forward and gradients: float32 sums in another order."""


def require_same(
    function: Callable[..., Any],
    *inputs: Any,
    options: OrtBackendOptions | None = None,
    atol: float = TOLERANCE,
    **compile_options: Any,
) -> OrtBackend:
    """Insist that `function` gives the same results, gradients and changes of its state compiled and eager.

    Gradients are those of the sum of all floating results, each times a fixed random tensor. Returns the backend.
    """
    backend = OrtBackend(options)
    eager = copy.deepcopy(function)
    compiled = torch.compile(function, backend=backend, **compile_options)
    expected = _run(eager, _fresh(inputs), _state(eager))
    actual = _run(compiled, _fresh(inputs), _state(function))
    _require_close(actual, expected, atol)
    return backend


def _run(function: Callable[..., Any], inputs: tuple[Any, ...], state: dict[str, torch.Tensor]) -> list[Any]:
    torch.manual_seed(1)
    results = function(*inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    found: list[Any] = [leaf.detach().clone() for leaf in leaves]
    differentiable = [leaf for leaf in leaves if leaf.requires_grad]
    if differentiable:
        generator = torch.Generator().manual_seed(2)
        weights = [torch.rand(leaf.shape, generator=generator).to(leaf.dtype) for leaf in differentiable]
        torch.stack(
            [(leaf * weight).sum().double() for leaf, weight in zip(differentiable, weights, strict=True)]
        ).sum().backward()
    gradients = [leaf.grad for leaf in (*pytree.tree_leaves(inputs), *state.values()) if isinstance(leaf, torch.Tensor)]
    return [*found, *gradients, *(value.detach().clone() for value in state.values())]


def _fresh(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_leaf(value) if isinstance(value, torch.Tensor) else value for value in inputs)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its layout."""
    if 0 in tensor.stride():
        return tensor
    return tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.requires_grad)


def _state(function: Callable[..., Any]) -> dict[str, torch.Tensor]:
    return (
        dict([*function.named_parameters(), *function.named_buffers()]) if isinstance(function, torch.nn.Module) else {}
    )


def _require_close(actual: list[Any], expected: list[Any], atol: float) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol, equal_nan=True)
            assert ours.stride() == theirs.stride() or ours.numel() < 2
