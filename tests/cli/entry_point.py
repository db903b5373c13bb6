"""Run onnxtool as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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
