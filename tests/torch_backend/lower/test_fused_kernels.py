"""Large operators for which PyTorch has one kernel stay there; small ones become ONNX, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.lower import channels_last
from onnxtool.torch_backend.lower.placement import FUSED
from onnxtool.torch_backend.nodes import MANY_ELEMENTS
from tests.torch_backend.oracle import TOLERANCE, require_same

ROWS = MANY_ELEMENTS // 256
CONVOLUTION_TOLERANCE = 3e-4
"""Gradients of weights before a batch normalization are small differences of sums over all pixels."""


LAYOUT_TOLERANCE = 4e-3
"""And PyTorch's sums over pixels have more rounding in the layout of its convolutions."""


def left_to_kernels(backend: OrtBackend) -> set[str]:
    """Return the operators that stay in PyTorch for their kernels."""
    found = {node.operator for graph in backend.explain().graphs for node in graph.eager if node.reason == FUSED}
    return {name.split(".")[1] for name in found}


def perceptron() -> nn.Module:
    """Return layers whose gradients have many elementwise operators."""
    return nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 2))


def pictures() -> nn.Module:
    """Return a block of a net for images, between two convolutions."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 2, 1))
    )


def test_large_gradients_stay_in_pytorch_and_the_report_says_why() -> None:
    """Each at the size from which on it is large."""
    backend = require_same(perceptron(), torch.rand(ROWS, 8, requires_grad=True))
    assert left_to_kernels(backend) == {"gelu_backward", "native_layer_norm_backward"}
    assert FUSED in str(backend.explain())


def test_small_gradients_become_onnx() -> None:
    """One row less than is large."""
    backend = require_same(perceptron(), torch.rand(ROWS - 1, 8, requires_grad=True))
    assert left_to_kernels(backend) == set()
    assert all(len(graph.partitions) == 1 and not graph.eager for graph in backend.explain().graphs)


@pytest.mark.parametrize(("rows", "kernels"), [(ROWS, {"gelu_backward", "native_layer_norm_backward"}), (16, set())])
def test_dynamic_sizes_count_as_those_of_the_first_call(rows: int, kernels: set[str]) -> None:
    """Whatever comes later has the same graph: a choice by its size would make another one."""
    model, backend = perceptron(), OrtBackend()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for number in (rows, ROWS, 16):
        x = torch.rand(number, 8)
        result = compiled(x)
        torch.testing.assert_close(result, model(x), atol=TOLERANCE, rtol=TOLERANCE)
        result.sum().backward()
    assert left_to_kernels(backend) == kernels
    assert len(backend.explain().graphs) == 2


def test_a_block_of_large_pictures_stays_in_pytorch_as_a_whole() -> None:
    """The rectifier as well, which would be a session of its own."""
    backend = require_same(pictures(), torch.rand(2, 3, 64, 64, requires_grad=True), atol=LAYOUT_TOLERANCE)
    assert left_to_kernels(backend) == {
        *("_native_batch_norm_legit_functional", "native_batch_norm_backward", "relu", "threshold_backward"),
        "max_pool2d_with_indices_backward",
    }


def test_a_block_of_small_pictures_becomes_onnx() -> None:
    """The same operators, of fewer elements."""
    backend = require_same(pictures(), torch.rand(2, 3, 16, 16, requires_grad=True), atol=CONVOLUTION_TOLERANCE)
    assert left_to_kernels(backend) == set()


def test_large_pictures_become_onnx_where_nothing_is_trained() -> None:
    """Nobody asks a pool where its maxima were, and normalization is a factor and a summand."""
    backend = require_same(pictures().eval().requires_grad_(False), torch.rand(2, 3, 64, 64))
    (graph,) = backend.explain().graphs
    assert len(graph.partitions) == 1
    assert not graph.eager


def test_a_rectifier_between_products_becomes_onnx() -> None:
    """Its forward costs a cut where nothing beside it stays."""
    backend = require_same(nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 2)), torch.rand(ROWS, 8))
    assert left_to_kernels(backend) == {"threshold_backward"}


class Residual(nn.Module):
    """Adds a block to its input, and returns pictures too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means [N, 8] and pictures [N, 8, H, W]."""
        pictures = self.first(x)
        sums = pictures + self.block(pictures)
        return torch.nn.functional.dropout(sums, 0.1).mean((2, 3)), sums


@pytest.mark.parametrize(("make", "dynamic"), [(pictures, False), (Residual, False), (Residual, True)])
def test_large_pictures_are_computed_as_eager_pytorch_does_with_channels_last(
    make: Callable[[], nn.Module], dynamic: bool
) -> None:
    """Bit for bit, in the layout that eager PyTorch gives without it, and with its random numbers."""
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    theirs.to(memory_format=torch.channels_last)
    x = torch.rand(2, 3, 64, 64)
    found = []
    for model, picture in (
        (torch.compile(ours, backend=OrtBackend(), dynamic=dynamic), x),
        (theirs, x.contiguous(memory_format=torch.channels_last)),
    ):
        torch.manual_seed(0)
        results = model(picture) if make is Residual else (model(picture),)
        results[-1].square().sum().backward()
        found.append((results[-1].detach(), *(parameter.grad for parameter in model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert all(one.is_contiguous() for one in found[0])


def test_a_step_goes_on_in_the_layout_of_its_pictures_if_the_other_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been changed by then."""

    def _values(*_arguments: object) -> None:
        raise RuntimeError("no such layout")

    monkeypatch.setattr(channels_last, "_values", _values)
    with pytest.warns(RuntimeWarning, match="_values failed at convolution.*no such layout"):
        backend = require_same(pictures(), torch.rand(2, 3, 64, 64, requires_grad=True), atol=CONVOLUTION_TOLERANCE)
    assert channels_last.LAYOUT not in str(backend.explain())


def test_pictures_with_channels_last_keep_their_layout() -> None:
    """As eager PyTorch does, whatever kernel ran."""
    x = torch.rand(2, 3, 64, 64).contiguous(memory_format=torch.channels_last).requires_grad_()
    require_same(pictures().to(memory_format=torch.channels_last), x, atol=CONVOLUTION_TOLERANCE)
