"""Time a step through torch.compile: eager PyTorch, this backend, inductor, and the step's products alone.

`python scripts/bench_torch_backend.py` prints a table as Markdown: the median wall time of a step, its ratio to eager
PyTorch with a 95 % interval, and the same of the processor time. Each way runs in a process of its own, because
threads of PyTorch and of onnxruntime spin after a call and would take the next one's cores; the processes take turns, a
block of steps each, of which the first is not counted. The row `products` is what nobody can do without: the products
of matrices and the convolutions of the step in eager PyTorch, and nothing else. The cases and sizes are those of
scripts/torch_backend_steps.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch_backend_steps import CASES, WAYS

Floats = NDArray[np.float64]
STEPS = Path(__file__).resolve().with_name("torch_backend_steps.py")
RESAMPLES = 2000


@dataclass
class Worker:
    """A way to run a case, in a process of its own.

    Attributes:
        flops: of the products of a step, from the worker that runs those; else 0.
        blocks: wall and processor milliseconds of each counted step: float64 [steps of a block, 2] a block.
    """

    way: str
    process: subprocess.Popen[str]
    flops: int = 0
    blocks: list[Floats] = field(default_factory=list)

    @classmethod
    def start(cls, case: str, way: str, threads: int) -> Worker:
        """Start the process and wait until it is warm."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            [sys.executable, str(STEPS), case, way, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        worker = cls(way, process)
        worker.flops = json.loads(worker._answer())
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


def main() -> None:
    """Print the table of each case."""
    arguments = _parse()
    print(f"{arguments.threads} threads, {arguments.blocks} blocks of {arguments.steps} steps\n")
    print("| case | way | wall ms | of eager | processor ms | of eager | GFLOP/s of the products |")
    print("|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        _measure(case, arguments)
    print(f"\nload average {os.getloadavg()[0]:.1f} at the end")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="Turns of each process.")
    parser.add_argument("--steps", type=int, default=10, help="Counted steps of a block.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="The first is the measure.")
    return parser.parse_args()


def _measure(case: str, arguments: argparse.Namespace) -> None:
    workers: list[Worker] = []
    try:
        for way in arguments.ways:
            workers.append(Worker.start(case, way, arguments.threads))  # noqa: PERF401 - one that fails ends the others
        for _ in range(arguments.blocks):
            for worker in workers:
                worker.run(arguments.steps)
    finally:
        for worker in workers:
            worker.stop()
    for worker in workers:
        wall, processor = worker.medians()
        ratios = [_ratio(worker, workers[0], column) if worker is not workers[0] else "1" for column in (0, 1)]
        speed = f"{worker.flops / wall / 1e6:.0f}" if worker.flops else ""
        print(
            f"| {case} | {worker.way} | {wall:.1f} | {ratios[0]} | {processor:.1f} | {ratios[1]} | {speed} |",
            flush=True,
        )


def _ratio(worker: Worker, measure: Worker, column: int) -> str:
    """Return the ratio of two medians, and the interval of 95 % of those of blocks drawn anew.

    Steps of a block resemble each other, so whole blocks are drawn (Künsch 1989); blocks of one turn stay together,
    because the machine was as busy for the one as for the other.
    """
    ours, theirs = (np.stack([block[:, column] for block in one.blocks]) for one in (worker, measure))
    draw = np.random.default_rng(0)
    turns = draw.integers(0, len(ours), (RESAMPLES, len(ours)))
    ratios = np.median(ours[turns].reshape(RESAMPLES, -1), axis=1) / np.median(
        theirs[turns].reshape(RESAMPLES, -1), axis=1
    )
    low, high = np.quantile(ratios, (0.025, 0.975))
    return f"{np.median(ours) / np.median(theirs):.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
