"""Copies, threads and lifetimes of compiled models."""

from __future__ import annotations

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions


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
