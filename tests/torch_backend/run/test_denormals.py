"""Numbers below 1.2e-38 count as zero inside of sessions and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.run.denormals import are_flushed, flushed

TINY = 1e-40


@pytest.fixture(autouse=True)
def kept_numbers() -> Iterator[None]:
    """Other tests may count on small numbers."""
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize(("flush", "expected"), [(True, 0.0), (False, 2 * TINY)])
def test_small_numbers_are_zero_inside_of_a_session_where_that_is_wanted(flush: bool, expected: float) -> None:
    """It is an option."""
    compiled = torch.compile(lambda x: x * 2, backend=OrtBackend(OrtBackendOptions(flush_denormals=flush)))
    torch.testing.assert_close(compiled(torch.full((3,), TINY)), torch.full((3,), expected), atol=0, rtol=1e-4)


@pytest.mark.parametrize("before", [False, True])
def test_the_thread_is_left_as_it_was(before: bool) -> None:
    """Also by the first session of a process."""
    torch.set_flush_denormal(before)
    torch.compile(lambda x: x * 3, backend=OrtBackend())(torch.rand(3))
    assert are_flushed() is before
    with flushed():
        assert are_flushed()
    assert are_flushed() is before


def test_a_masked_softmax_has_zeros_where_it_is_masked() -> None:
    """Not the smallest numbers there are."""
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)
    softmax = torch.compile(lambda x: x.masked_fill(mask, -torch.inf).softmax(-1), backend=OrtBackend())
    assert bool((softmax(torch.rand(8, 8))[mask] == 0).all())
