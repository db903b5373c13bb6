"""Packages of the group dev-all, without which a test is skipped: stores, servers and other people's clients."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

GROUP = "dev-all"


def need(name: str) -> Any:
    """Import a module of the group, or skip the test that asks for it."""
    return pytest.importorskip(name, reason=f"{name} is of the group {GROUP}")


def missing(*names: str) -> str:
    """Return which packages of the group are not installed, as a reason to skip; an empty text for none."""
    found = ", ".join(name for name in names if importlib.util.find_spec(name) is None)
    return found and f"{found}, of the group {GROUP}"
