"""Sizes that only the data decides: one graph where TorchDynamo captures them, and right for any of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.torch_backend.oracle import require_same


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    """TorchDynamo breaks the graph at such sizes if it is not told otherwise."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def test_places_of_what_is_not_zero() -> None:
    """Their number is known to nobody before the call."""

    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = x.nonzero()
        return found, x[x > 0.5] * 2, x.flatten()[found[:, 0]]

    require_same(places, torch.rand(3, 4, requires_grad=True), fullgraph=True)


def test_a_size_that_is_an_element_of_a_tensor() -> None:
    """It leaves the graph as a number, too."""

    def cut(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        size = count.item()
        torch._check(size >= 0)
        torch._check(size <= x.shape[0])
        return torch.zeros(size) + 1, x[:size].sum(), size + 1

    require_same(cut, torch.rand(5, 4), torch.tensor(3), fullgraph=True)
