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
    folder = tmp_path_factory.getbasetemp().parent / "workshop"
    folder.mkdir(exist_ok=True)
    return Workshop(folder)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of a sentence encoder with trained weights."""
    return trained_model()
