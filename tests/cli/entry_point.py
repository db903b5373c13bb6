"""Run onnxtool as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_onnxtool(folder: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `onnxtool` with `arguments` in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "onnxtool", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def run_infer(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `onnxtool infer` without the hub; a warning of Python ends it."""
    return run_onnxtool(folder, "infer", *arguments, **{"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error", **variables})


def json_of(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the one document on the stdout of a command that was done."""
    assert process.returncode == 0, process.stderr
    document: dict[str, Any] = json.loads(process.stdout)
    return document
