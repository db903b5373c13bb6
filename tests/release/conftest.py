"""A hub that is none, for all tests of releases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.release.hub import TOKEN, Hub, reached


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with reached(Hub(TOKEN), monkeypatch, tmp_path) as found:
        yield found
