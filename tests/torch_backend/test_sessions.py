"""The calling thread around a session, and copies, threads and lifetimes of compiled models."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions, execution
from onnxtool.torch_backend.nodes import MANY_ELEMENTS
from onnxtool.torch_backend.sessions import denormals_are_zero, end_openmp_threads, flush_denormals

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


def test_a_copy_of_a_compiled_model_is_a_model_of_its_own() -> None:
    """Training the copy, as for an average of weights, leaves the original as it is."""
    compiled = torch.compile(nn.Linear(4, 2), backend=OrtBackend())
    x = torch.rand(3, 4)
    before = compiled(x)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(twin(x), twin.bias.expand(3, 2))
    assert torch.equal(compiled(x), before)


def test_a_backend_is_pickled_with_its_options_and_without_its_sessions() -> None:
    """As where a process is started for a part of the data."""
    backend = OrtBackend(OrtBackendOptions(preallocate_output=True, rtol=1e-3))
    torch.compile(torch.cos, backend=backend)(torch.rand(3))
    restored = pickle.loads(pickle.dumps(backend))  # noqa: S301 - of its own making
    assert restored.options == backend.options
    assert restored.execution_count == 0


def test_sessions_live_as_long_as_the_compiled_model() -> None:
    """The backend remembers reports and counts, and no memory of onnxruntime."""
    backend = OrtBackend()
    compiled = torch.compile(nn.Linear(4, 2), backend=backend)
    compiled(torch.rand(3, 4)).sum().backward()
    assert [len(graph.sessions) for graph in backend.graphs] == [1, 1]
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert [len(graph.sessions) for graph in backend.graphs] == [0, 0]
    assert backend.execution_count == 2
    assert "operators in 1 session of onnxruntime" in str(backend.explain())


def test_threads_share_a_compiled_model() -> None:
    """Each gets the answers to its own inputs."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).requires_grad_(False)
    compiled = torch.compile(model, backend=OrtBackend())
    inputs = [torch.rand(3, 16) for _ in range(64)]
    compiled(inputs[0])
    with ThreadPoolExecutor(4) as pool:
        for ours, x in zip(pool.map(compiled, inputs), inputs, strict=True):
            torch.testing.assert_close(ours, model(x), atol=1e-6, rtol=1e-5)


class WithCuda:
    """PyTorch as it is where there is CUDA, for a single module."""

    cuda = SimpleNamespace(is_available=lambda: True, nvtx=torch.cuda.nvtx)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_a_profiler_of_cuda_sees_each_run_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a range that also ends after an error."""
    events: list[str] = []
    monkeypatch.setattr(execution, "torch", WithCuda())
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("end"))
    compiled, table = torch.compile(lambda table, index: table[index], backend=OrtBackend()), torch.rand(3)
    for _ in range(3):
        compiled(table, torch.tensor([1]))
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([7]))
    assert events == ["run_onnx_session_with_ortvaluevector", "end"] * 4
