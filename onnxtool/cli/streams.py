"""What the process prints to, made fit for any name and any reader before a command runs."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path


def ready_streams() -> None:
    """Let stdout and stderr take every text, as UTF-8, whatever the locale says and even where they were closed.

    JSON knows no other encoding, and names of models are of any script. A closed stream becomes the null device: a
    file that is opened later would take its descriptor, and get what libraries print.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def drop_output() -> None:
    """Let what stdout still holds go nowhere, after it could not be written: Python writes it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
