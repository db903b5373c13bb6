"""What the tests of trainers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from onnxtool.torch_backend import backend, translator


@pytest.fixture(scope="package", autouse=True)
def shared_sessions() -> Iterator[None]:
    """Keep the sessions of all tests alive, so that a graph that several of them compile is translated once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translator, "_SESSIONS", {})
        patch.setattr(backend, "_LONG_S", 600)  # a slow machine adds no line to the logs
        yield
