"""Times steps in processes of their own that take turns, for the benchmarks of training and inference steps.

Threads of PyTorch and of onnxruntime spin after a call and would take the next one's cores, so each way of a step gets
a process. Of a block of steps the first is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WARMUP = 3


@dataclass
class Worker:
    """A process that makes steps when it is asked to.

    Attributes:
        greeting: what it said once it was warm.
        blocks: wall and processor milliseconds of each counted step: float64 [steps of a block, 2] a block.
    """

    way: str
    process: subprocess.Popen[str]
    greeting: Any = None
    blocks: list[Floats] = field(default_factory=list)

    @classmethod
    def start(cls, way: str, arguments: Sequence[str], threads: int) -> Worker:
        """Start Python with these arguments, a script that calls `serve`, and wait until it is warm."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        worker = cls(way, process)
        worker.greeting = json.loads(worker._answer())
        return worker

    def run(self, steps: int) -> None:
        """Make a block of steps and keep the durations of all but the first."""
        if self.process.stdin is None:
            raise RuntimeError("the worker has no pipe")
        print(steps + 1, file=self.process.stdin, flush=True)
        self.blocks.append(np.array(json.loads(self._answer()))[1:])

    def stop(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()

    def medians(self) -> Floats:
        """Return the median wall and processor milliseconds of all steps: [2]."""
        return np.median(np.concatenate(self.blocks), axis=0)

    def _answer(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"the process of {self.way} ended")
        return line


def take_turns(starts: Iterable[Callable[[], Worker]], blocks: int, steps: int) -> list[Worker]:
    """Start the workers, one warming up at a time, let them make blocks of steps in turns, and end them."""
    workers: list[Worker] = []
    try:
        for start in starts:
            workers.append(start())  # noqa: PERF401 - one that fails ends the others
        for _ in range(blocks):
            for worker in workers:
                worker.run(steps)
    finally:
        for worker in workers:
            worker.stop()
    return workers


def serve(step: Callable[[], Any], greeting: Any = "warm") -> None:
    """Read numbers of steps, and answer each with the wall and processor milliseconds of every step as JSON."""
    for _ in range(WARMUP):
        step()
    print(json.dumps(greeting), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            wall, processor = time.perf_counter(), time.process_time()
            step()
            times.append([1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)])
        print(json.dumps(times), flush=True)
