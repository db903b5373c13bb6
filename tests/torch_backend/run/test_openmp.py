"""PyTorch's threads do not wait busily beside those of onnxruntime, and come back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtool.torch_backend import OrtBackend
from onnxtool.torch_backend.run import execution
from onnxtool.torch_backend.run.openmp import pause
from onnxtool.torch_backend.sizes import MANY_ELEMENTS


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_team_of_threads_ends_and_the_next_kernel_makes_another() -> None:
    x = torch.randn(MANY_ELEMENTS)
    pause()
    before = num_threads()
    expected = torch.erfinv(x)
    assert num_threads() == before + 1
    pause()
    assert num_threads() == before
    torch.testing.assert_close(torch.erfinv(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("size", "pauses"), [(MANY_ELEMENTS, 1), (100, 0)])
def test_only_what_onnxruntime_has_threads_for_ends_a_team(
    size: int, pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small session would cost less than the next team."""
    called: list[None] = []
    monkeypatch.setattr(execution, "pause", lambda: called.append(None))
    torch.compile(lambda x: x.exp() + 1, backend=OrtBackend())(torch.randn(size))
    assert len(called) == pauses


def test_threads_of_a_session_wait_busily_during_a_call_only() -> None:
    backend = OrtBackend()
    compiled: Any = torch.compile(lambda x: x.exp() + 1, backend=backend)
    compiled(torch.randn(3))
    options = backend.graphs[0].sessions[0].session.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
