"""Maxima and minima of numbers that are NaN, which onnxruntime passes over, are PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.torch_backend.oracle import require_same

NAN, INF = math.nan, math.inf
FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "amax of rows": lambda x: x.amax(-1),
    "amin of columns, kept": lambda x: x.amin(0, keepdim=True),
    "amax of several dimensions": lambda x: x.amax((0, 1)),
    "max of all": lambda x: x.max(),
    "min of all": lambda x: x.min(),
    "max and its place": lambda x: tuple(x.max(1)),
    "min and its place, kept": lambda x: tuple(x.min(0, keepdim=True)),
    "argmax of rows": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "argmax of columns, kept": lambda x: x.argmax(0, keepdim=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_nan_is_the_extreme_of_its_row(name: str) -> None:
    """Wherever in the row it is, beside infinities as well; nothing of it stays in PyTorch."""
    x = torch.tensor([[1.0, NAN, 3.0, 2.0], [INF, 1.0, 2.0, -INF], [NAN, 5.0, NAN, 1.0], [4.0, 9.0, 9.0, NAN]])
    for values in (x, x[1:2].repeat(3, 1)):
        assert not require_same(FUNCTIONS[name], values).explain().graphs[0].eager


def test_whole_numbers_are_reduced_as_they_are() -> None:
    """They are never NaN, and no operator is spent on it."""
    (graph,) = require_same(lambda x: x.amax(-1), torch.tensor([[3, 7, 1]])).explain().graphs
    assert graph.partitions[0].num_nodes == 1
