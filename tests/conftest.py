"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.workshop import Workshop, trained_model

os.environ["HF_HUB_OFFLINE"] = "1"  # no test, and no process that a test starts, may ask a hub


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The models of this test session."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent / "workshop"
    folder.mkdir(exist_ok=True)
    # The parent of a worker's folder is that of the session; without workers it is that of all sessions.
    return Workshop(folder, folder if "PYTEST_XDIST_WORKER" in os.environ else base / "workshop")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of a sentence encoder with trained weights."""
    return trained_model()
