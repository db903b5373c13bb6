"""Tensors without elements: their results have the shapes and values that eager PyTorch gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.lower.placement import EMPTY
from tests.torch_backend.oracle import require_same

REDUCTIONS: list[Callable[..., object]] = [torch.sum, torch.mean, torch.all, torch.logsumexp]


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=lambda function: function.__name__)
def test_what_is_reduced_over_an_empty_batch(reduce: Callable[..., object]) -> None:
    """Sums are zero, and means are not a number."""
    backend = require_same(lambda x: reduce(x, 0), torch.rand(0, 6))
    assert {node.reason for node in backend.explain().graphs[0].eager} == {EMPTY}


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=lambda function: function.__name__)
def test_what_is_reduced_inside_of_an_empty_batch(reduce: Callable[..., object]) -> None:
    """There is no result for no row, and the reduced dimension is gone."""
    require_same(lambda x: reduce(x, -1), torch.rand(0, 6))


def test_a_batch_becomes_empty_and_is_filled_again() -> None:
    """Gradients of parameters are zero for no row, and right before and after."""
    model, backend = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)), OrtBackend()
    compiled = torch.compile(model, backend=backend)
    for size in (3, 5, 0, 1, 7, 0):
        x, gradients = torch.rand(size, 4), []
        for function in (compiled, model):
            model.zero_grad()
            function(x).square().sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-4)


def test_a_size_that_data_decides_may_be_zero() -> None:
    """One graph serves all sizes, and PyTorch computes the calls with nothing in them."""
    backend = OrtBackend()
    compiled = torch.compile(lambda x: (x.mean(0), x.mean(), x.exp().sum(-1)), backend=backend, fullgraph=True)
    for size in (3, 0, 5):
        x = torch.rand(size, 4)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        expected = (x.mean(0), x.mean(), x.exp().sum(-1))
        torch.testing.assert_close(compiled(x), expected, equal_nan=True, atol=1e-6, rtol=1e-6)
    assert len(backend.graphs) == 1
    assert backend.graphs[0].report.partitions


@pytest.mark.parametrize("dim", [0, -1, (0, -1)])
def test_a_slice_inside_of_a_session_may_be_empty(dim: object) -> None:
    """Of an empty tensor, onnxruntime reduces no negative axis; the axes of its models are not negative."""
    backend = OrtBackend()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x[:, : x.shape[1] // 3].exp().sum(dim)

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for size in (9, 2, 6):
        x = torch.rand(3, size)
        torch.testing.assert_close(compiled(x), function(x), atol=1e-6, rtol=1e-6)
    compiled = torch.compile(lambda x, y: torch.relu(x[x.shape[0] - y.shape[0] :]).sum(dim), backend=backend)
    for rows in (3, 2, 5):
        x, y = torch.rand(5, 4), torch.rand(rows)
        torch._dynamo.decorators.mark_unbacked(y, 0)
        torch.testing.assert_close(compiled(x, y), x[5 - rows :].relu().sum(dim), atol=1e-6, rtol=1e-6)


def test_an_empty_result_inside_of_a_graph_does_not_cut_it() -> None:
    """A result of no element is a constant of its shape, and everything around it stays in one session."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nothing = (x[:, :0] * 2).exp()
        return torch.cat([x.sin(), nothing], 1), nothing.t()

    backend = require_same(function, torch.rand(3, 4))
    report = backend.explain().graphs[0]
    assert (len(report.partitions), report.eager) == (1, ())
