"""Run onnxtool as a user does: in this process where that shows the same, else in one of its own."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from onnxtool.cli import run_arguments


def run_onnxtool(folder: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `onnxtool` with `arguments` in `folder`, in this process: its streams, files, exit code and tracebacks.

    What the command leaves in its stdout without flushing it is lost, and what libraries write to the descriptors of
    stdout and stderr is captured as well. `environment` holds while the command runs; a variable that Python reads when
    it starts needs `run_process`.
    """
    words = [os.fsdecode(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _process_state(folder, environment), _streams(out, err):
            try:
                code = run_arguments(words)
            except SystemExit as stopped:
                code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
            except BaseException:  # noqa: BLE001  a bug: what Python itself does with it
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
        texts = [(stream.seek(0), stream.read().decode("utf-8"))[1] for stream in (out, err)]
    return subprocess.CompletedProcess(["onnxtool", *words], code, *texts)


def run_process(folder: Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m onnxtool` with `arguments` in `folder`."""
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
    return run_onnxtool(folder, "infer", *arguments, **{"PYTHONWARNINGS": "error", **variables})


def json_of(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the one document on the stdout of a command that was done."""
    assert process.returncode == 0, process.stderr
    document: dict[str, Any] = json.loads(process.stdout)
    return document


@contextlib.contextmanager
def _process_state(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Give a command the state of a new process, and take back what it changed."""
    variables, level = dict(os.environ), logging.root.level
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        with contextlib.chdir(folder), warnings.catch_warnings():
            _warn_as_python_does(environment.get("PYTHONWARNINGS", ""))
            os.environ.update(environment)
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        logging.root.setLevel(level)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        gc.enable()  # `onnxtool export` turns the collector off until its process ends
        atexit.unregister(gc.freeze)


def _warn_as_python_does(action: str) -> None:
    """Print warnings on stderr, except for those that Python itself hides, or make each an error."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: IO[str] | None = None,
        line: str | None = None,
    ) -> None:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = show
    warnings.simplefilter("error" if action == "error" else "default")
    if action != "error":
        for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", hidden)


@contextlib.contextmanager
def _streams(out: IO[bytes], err: IO[bytes]) -> Iterator[None]:
    """Let stdout and stderr, and their descriptors, write to `out` and `err`."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    ours: list[IO[str]] = []
    saved = [os.dup(number) for number in (1, 2)]
    try:
        for number, file in ((1, out), (2, err)):
            os.dup2(file.fileno(), number)
        # Never closed: loggers that were set up meanwhile keep them.
        ours += [open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2)]  # noqa: SIM115
        sys.stdout, sys.stderr = ours
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        ours.clear()  # only now: a stream that goes writes what it still holds
