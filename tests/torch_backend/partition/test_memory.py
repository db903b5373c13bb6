"""What shares memory in eager PyTorch shares it when compiled: outputs, inputs, and what is changed in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.lower.placement import SIZE
from tests.torch_backend.oracle import require_same


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "views",
    [
        lambda y: (y, y.view(-1), y.t(), y[1]),
        lambda y: (y[:, 1:], y.flatten()),
        lambda y: (*y.split(2, 1), y),
        lambda y: (y, y.unsqueeze(0).expand(3, 3, 4)),
        lambda y: (y, y),
    ],
)
def test_outputs_that_are_views_of_one_tensor(views: Callable[..., tuple[torch.Tensor, ...]], dynamic: bool) -> None:
    """Changing one in place changes the others, and none of the next call."""
    backend = OrtBackend()
    compiled = torch.compile(lambda x: views(x * 2), backend=backend, dynamic=dynamic)
    x = torch.rand(3, 4)
    for _ in range(2):
        ours, theirs = compiled(x), views(x * 2)
        for results in (ours, theirs):
            results[0].add_(1)
        assert [result.stride() for result in ours] == [result.stride() for result in theirs]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert {node.reason for graph in backend.graphs for node in graph.report.eager} <= {SIZE}
    assert all(graph.report.partitions for graph in backend.graphs)


def test_outputs_with_gradients_that_are_views_of_one_tensor() -> None:
    """Gradients of all of them come together."""
    require_same(lambda x: ((y := x.exp()), y.t(), y[0].detach(), y.view(-1)), torch.rand(3, 4, requires_grad=True))


def test_a_view_that_another_operator_takes_stays_in_the_session() -> None:
    """Only the output is made by PyTorch: the graph is not cut there."""
    backend = require_same(lambda x: ((y := x.exp().t()), y.sin()), torch.rand(3, 4))
    assert [len(graph.partitions) for graph in backend.explain().graphs] == [1]


CHANGES: dict[str, Callable[..., object]] = {
    "an input": lambda x, y: x.mul_(2) + y,
    "views of an input": lambda x, y: (x[1:].add_(1), x.t()[0].mul_(3), x + y)[2],
    "an input by another": lambda x, y: (x.copy_(y.flip(0)), y.copy_(x * 2))[0],
    "a new tensor": lambda x, y: (x + y).clamp_(min=0.5).t_().exp_(),
    "rows that are chosen": lambda x, y: x.index_fill_(0, torch.tensor([1]), 7.0) + y,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_changed_in_place(change: Callable[..., object]) -> None:
    """Whoever holds the tensor sees the change."""
    ours, theirs = ([torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)] for _ in range(2))
    results = torch.compile(change, backend=OrtBackend())(*ours), change(*theirs)
    torch.testing.assert_close([results[0], *ours], [results[1], *theirs], atol=1e-6, rtol=1e-6)


def test_inputs_that_share_memory() -> None:
    """A change of the one is seen in the other, and in what both are cut out of."""

    def change(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2 + y

    compiled = torch.compile(change, backend=OrtBackend())
    for first, second in ((slice(4), slice(2, 6)), (slice(6), slice(6)), (slice(1, 3), slice(3, 5))):
        ours, theirs = torch.arange(6.0), torch.arange(6.0)
        results = [function(base[first], base[second]) for function, base in ((compiled, ours), (change, theirs))]
        torch.testing.assert_close(*results, atol=0, rtol=0)
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_outputs_that_are_inputs_are_the_inputs() -> None:
    """Not copies of them: changing the output changes the input."""
    x = torch.zeros(3, 4)
    same, view, made = torch.compile(lambda x: (x, x.view(-1), x + 1), backend=OrtBackend())(x)
    view.add_(1)
    assert same is x
    assert x.eq(1).all()
    assert made.eq(1).all()


def test_a_function_that_returns_nothing_changes_a_buffer() -> None:
    """There is no output, and work to be done."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> None:
            self.total.add_(x)

    require_same(Counter(), torch.rand(3))
