"""Run one function in a process of its own, within limits of time and memory, and keep what it prints.

Processes are forked from a server that may have imported torch and transformers already, so that a step takes what it
does and not the seconds of its imports. (`multiprocessing` calls this a fork server; nothing has run in it that forking
breaks.) For POSIX systems.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUG = 70  # the exit code of a step that ended with an exception


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        exit_code: None where the time ran out; minus the signal where one ended it.
        value: what the step returned; None where it did not.
        stdout: what it printed; so is `stderr`.
    """

    exit_code: int | None
    value: Any
    stdout: str
    stderr: str
    seconds: float


class Isolation:
    """Starts steps.

    Attributes:
        preloaded: modules that the server imports; a step imports what is not among them.
        memory_gb: what a step may take; 0 for all there is.
    """

    def __init__(self, preloaded: Sequence[str] = (), memory_gb: float = 0.0) -> None:
        self._memory_bytes = int(memory_gb * 2**30)
        # Steps end by os._exit, so tqdm does not release its lock.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))

    def run(self, step: Callable[..., Any], log: Path, time_s: float, *arguments: Any) -> Outcome:
        """Run `step(*arguments)`, which returns what JSON can hold; its output is kept in LOG.out and LOG.err."""
        log.parent.mkdir(parents=True, exist_ok=True)
        files = {kind: log.with_name(f"{log.name}.{kind}") for kind in ("out", "err", "json")}
        for file in files.values():
            file.write_bytes(b"")
        start = time.perf_counter()
        process = self._context.Process(target=_work, args=(step, arguments, files, self._memory_bytes))
        process.start()
        try:
            process.join(time_s)
            exit_code = process.exitcode
        finally:  # its time is over, or this process was interrupted
            if process.is_alive():
                with suppress(ProcessLookupError):  # it has not come as far as its own group
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()
                process.join()
        process.close()
        stdout, stderr, value = (file.read_text("utf-8", "replace") for file in files.values())
        return Outcome(exit_code, json.loads(value or "null"), stdout, stderr, time.perf_counter() - start)


def _work(step: Callable[..., Any], arguments: tuple[Any, ...], files: dict[str, Path], memory_bytes: int) -> None:
    os.setsid()  # so that whatever it starts ends with it
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(files[kind], os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        value = json.dumps(step(*arguments))
        files["json"].write_text(value, encoding="utf-8")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(end.code if isinstance(end.code, str) else "", end="", file=sys.stderr)
    except BaseException:  # noqa: BLE001  it is printed, and the process ends
        traceback.print_exc()
        code = BUG
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
