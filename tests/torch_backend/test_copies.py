"""Copies, threads and lifetimes of compiled models."""

from __future__ import annotations

import copy
import pickle

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
