"""Python processes that import what this one imports, and nothing that lies in the working directory."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module; without `-P`, a `json.py` of the working directory would run as well."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Return the variables with which a module is found where this process finds it."""
    places = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in places if place)}
