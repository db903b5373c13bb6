"""The calling thread around a session: denormal numbers are zero inside and nowhere else, OpenMP threads end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.nodes import MANY_ELEMENTS
from onnxtool.torch_backend.run import execution
from onnxtool.torch_backend.run.thread_state import denormals_are_zero, end_openmp_threads, flush_denormals

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
    assert denormals_are_zero() is before
    with flush_denormals():
        assert denormals_are_zero()
    assert denormals_are_zero() is before


def test_a_masked_softmax_has_zeros_where_it_is_masked() -> None:
    """Not the smallest numbers there are."""
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)
    softmax = torch.compile(lambda x: x.masked_fill(mask, -torch.inf).softmax(-1), backend=OrtBackend())
    assert bool((softmax(torch.rand(8, 8))[mask] == 0).all())


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_team_of_threads_ends_and_the_next_kernel_makes_another() -> None:
    x = torch.randn(MANY_ELEMENTS)
    end_openmp_threads()
    before = num_threads()
    expected = torch.erfinv(x)
    assert num_threads() == before + 1
    end_openmp_threads()
    assert num_threads() == before
    torch.testing.assert_close(torch.erfinv(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("size", "pauses"), [(MANY_ELEMENTS, 1), (100, 0)])
def test_only_what_onnxruntime_has_threads_for_ends_a_team(
    size: int, pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small session would cost less than the next team."""
    called: list[None] = []
    monkeypatch.setattr(execution, "end_openmp_threads", lambda: called.append(None))
    torch.compile(lambda x: x.exp() + 1, backend=OrtBackend())(torch.randn(size))
    assert len(called) == pauses


def test_threads_of_a_session_wait_busily_during_a_call_only() -> None:
    backend = OrtBackend()
    compiled: Any = torch.compile(lambda x: x.exp() + 1, backend=backend)
    compiled(torch.randn(3))
    options = backend.graphs[0].sessions[0].session.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
