"""What every test of the backend needs: a fresh TorchDynamo and a seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from onnxtool.torch_backend import OrtBackend


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing that an earlier test compiled is used again, and random numbers are the same every time."""
    torch._dynamo.reset()
    OrtBackend.clear_instances()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
