"""Workers: each contender in a process of its own, which answers requests in turns with the others.

Threads of PyTorch and of onnxruntime spin after a call and would take the next one's cores, so contenders never share a
process. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARMUP = 3
_GREETING = "greeting: "
_SCRIPTS = str(Path(__file__).resolve().parent.parent)


@dataclass
class Worker:
    """A process that answers requests.

    Attributes:
        greeting: what it said once it was ready.
        answers: the blocks of steps that `take_turns` has kept.
    """

    name: str
    process: subprocess.Popen[str]
    greeting: Any = None
    answers: list[Any] = field(default_factory=list)

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None, quiet: bool = False
    ) -> Worker:
        """Start a process that calls `serve`, and wait until it is ready.

        Args:
            name: of the contender.
            command: the interpreter and its arguments.
            environment: variables in addition to those of this process.
            quiet: whether what it writes to standard error is dropped.

        Raises:
            SystemExit: the process ended.
        """
        # A peer's environment has no onnxtool; what `serve` is in has to be found there as well.
        variables = {**os.environ, **(environment or {})}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [_SCRIPTS, variables.get("PYTHONPATH", "")]))
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            env=variables,
        )
        worker = cls(name, process)
        while not (line := worker._line()).startswith(_GREETING):  # libraries print while they load
            pass
        worker.greeting = json.loads(line.removeprefix(_GREETING))
        return worker

    def ask(self, request: Any) -> Any:
        """Send a request, and return its answer.

        Raises:
            SystemExit: the process ended.
        """
        if self.process.stdin is None:
            raise RuntimeError("the worker has no pipe")
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self._line())

    def stop(self) -> None:
        """Close its pipes, by which it ends."""
        with self.process:
            pass

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            self.stop()
            raise SystemExit(f"the process of {self.name} ended; what it printed is above")
        return line


def serve(answer: Callable[[Any], Any], greeting: Any = "ready") -> None:
    """Greet, and answer each request of the process that started this one, until it closes the pipe."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print while they run
    print(_GREETING + json.dumps(greeting), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def serve_steps(step: Callable[[], Any], greeting: Any = "ready") -> None:
    """Warm up; answer each number of steps with the wall and processor milliseconds of every step."""

    def answer(count: int) -> list[list[float]]:
        times = []
        for _ in range(count):
            wall, processor = time.perf_counter(), time.process_time()
            step()
            times.append([1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)])
        return times

    for _ in range(WARMUP):
        step()
    serve(answer, greeting)


def times_in_turns(
    runs: Sequence[Callable[[], Any]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Let functions run in turns, forwards and backwards; return the seconds of each, without those of a first turn."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(turns + 1):
        for run, seconds in list(zip(runs, times, strict=True))[:: 1 if turn % 2 else -1]:
            start = clock()
            run()
            seconds.append(clock() - start)
    return [seconds[1:] for seconds in times]


def take_turns(starts: Iterable[Callable[[], Worker]], blocks: int, steps: int) -> list[Worker]:
    """Start workers that serve steps, one at a time, and let them make blocks of steps in turns; end them.

    The first step of a block is not kept: it finds the caches as another worker left them.
    """
    workers: list[Worker] = []
    try:
        for start in starts:
            workers.append(start())  # noqa: PERF401 - one that fails ends the others
        for _ in range(blocks):
            for worker in workers:
                worker.answers.append(worker.ask(steps + 1)[1:])
    finally:
        for worker in workers:
            worker.stop()
    return workers
