"""Run commands in forks of a process that has everything imported, each within limits of time and memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_SECONDS = 20.0
MAX_EXPORT_SECONDS = 90.0  # which runs PyTorch on all cases as well
MAX_BYTES = 1 << 30  # of memory that a process may have for itself
_PRELOADED = (
    *("click", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript.rewriter", "rich", "tokenizers"),
    *("onnxtool.cli.artifacts", "onnxtool.cli.entry", "onnxtool.cli.infer", "onnxtool.cli.optimize"),
    *("onnxtool.infer", "onnxtool.optimize.run", "onnxtool.stats", "onnxtool.benchmarking"),
    *("onnxtool.training.artifacts.generation", "onnxtool.runtime.session"),
)


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; below 0 the signal that ended it.
        seconds: of wall clock.
        stderr: what it wrote there, at most 100,000 characters.
        is_late: it did not end in time, and was ended.
    """

    code: int
    seconds: float
    stderr: str
    is_late: bool = False

    @property
    def fault(self) -> str:
        """Say what a user could not accept; empty where the command ended as it should."""
        if self.is_late:
            return f"took more than {self.seconds:.0f} s"
        if self.code not in (0, 1, 2):
            return f"ended with {self.code}"
        if "Traceback" in self.stderr:
            return "printed a traceback"
        errors = sum(line.startswith("error:") for line in self.stderr.splitlines())
        if errors != (self.code != 0):
            return f"ended with {self.code} and {errors} errors"
        return ""


def preload() -> None:
    """Import what the commands import, once for all of them."""
    import importlib

    for name in _PRELOADED:
        importlib.import_module(name)


def run_command(arguments: Sequence[str], folder: Path) -> Ended:
    """Run `onnxtool` with `arguments` in `folder`, in a fork of this process."""
    with tempfile.TemporaryFile() as errors:
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _become(arguments, folder, errors.fileno())
        limit = MAX_EXPORT_SECONDS if arguments[0] == "export" else MAX_SECONDS
        code = _wait(child, start + limit)
        seconds = time.monotonic() - start
        errors.seek(0)
        return Ended(code, seconds, errors.read(100_000).decode(errors="replace"), seconds >= limit)


def _become(arguments: Sequence[str], folder: Path, errors: int) -> None:
    code = 70
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(errors, 2)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
        sys.argv = ["onnxtool", *arguments]
        from onnxtool.cli import run

        try:
            run()
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001  what an interpreter would print and end with 1
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(child: int, deadline: float) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.002)
