"""Run one step in a process of its own, within limits of time and memory.

Steps are forked from a server that has imported torch and transformers already, so that a step takes what it does and
not the seconds of its imports. (`multiprocessing` calls this a fork server; nothing has run in it that forking breaks.)
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOADED = (
    *("torch", "torch.export", "torch.onnx", "onnxruntime", "onnxscript", "transformers"),
    *("survey.judging", "zoo.checkpoint", "onnxtool.cli", "onnxtool.export"),
)

BUG = 70  # the exit code of a step that ended with an exception


@dataclass(frozen=True)
class Limits:
    """What a step may take."""

    time_s: float = 300.0
    memory_gb: float = 8.0


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


class Workers:
    """Starts steps.

    Attributes:
        preloaded: modules that the server imports; a step imports what is not among them.
    """

    def __init__(self, limits: Limits, preloaded: Sequence[str] = PRELOADED) -> None:
        self.limits = limits
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preloaded))

    def run(self, step: Callable[..., Any], folder: Path, name: str, *arguments: Any) -> Outcome:
        """Run `step(*arguments)`, which returns what JSON can hold; its output is kept in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {kind: folder / f"{name}.{kind}" for kind in ("out", "err", "json")}
        for file in files.values():
            file.unlink(missing_ok=True)
        start = time.perf_counter()
        process = self._context.Process(target=_work, args=(step, arguments, files, self.limits))
        process.start()
        process.join(self.limits.time_s)
        exit_code = process.exitcode
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            exit_code = None
        seconds = time.perf_counter() - start
        process.close()
        value = json.loads(files["json"].read_text("utf-8")) if exit_code == 0 and files["json"].exists() else None
        return Outcome(exit_code, value, _text(files["out"]), _text(files["err"]), seconds)


def _text(file: Path) -> str:
    return file.read_text("utf-8", "replace") if file.exists() else ""


def _work(step: Callable[..., Any], arguments: tuple[Any, ...], files: dict[str, Path], limits: Limits) -> None:
    os.setsid()  # so that whatever it starts ends with it
    memory = int(limits.memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(files[kind], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        files["json"].write_text(json.dumps(step(*arguments)), encoding="utf-8")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  it is told, and the process ends
        traceback.print_exc()
        code = BUG
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
