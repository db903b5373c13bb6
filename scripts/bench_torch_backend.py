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
import sys
from functools import partial
from pathlib import Path

import numpy as np
from harness.machine import describe_machine
from harness.workers import Worker, median_step_ms, take_turns, thread_variables
from torch_backend_steps import CASES, VOCABULARY, WAYS

STEPS = Path(__file__).resolve().with_name("torch_backend_steps.py")
RESAMPLES = 2000


def main() -> None:
    """Print the table of each case."""
    arguments = _parse()
    print(f"{describe_machine(arguments.threads)}; {arguments.blocks} blocks of {arguments.steps} steps, ", end="")
    print(f"{arguments.vocabulary} words\n")
    print("| case | way | wall ms | of eager | processor ms | of eager | GFLOP/s of the products |")
    print("|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        _measure(case, arguments)
    print(f"\nat the end: {describe_machine(arguments.threads)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="Turns of each process.")
    parser.add_argument("--steps", type=int, default=10, help="Counted steps of a block.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="Words of the language models.")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS), help="The first is the measure.")
    return parser.parse_args()


def _measure(case: str, arguments: argparse.Namespace) -> None:
    threads = arguments.threads
    starts = [
        partial(
            Worker.start,
            way,
            [sys.executable, str(STEPS), case, way, str(threads), str(arguments.vocabulary)],
            environment=thread_variables(threads),
        )
        for way in arguments.ways
    ]
    workers = take_turns(starts, arguments.blocks, arguments.steps)
    for worker in workers:
        wall, processor = median_step_ms(worker)
        ratios = [_ratio(worker, workers[0], column) if worker is not workers[0] else "1" for column in (0, 1)]
        speed = f"{worker.greeting / wall / 1e6:.0f}" if worker.greeting else ""
        print(
            f"| {case} | {worker.name} | {wall:.1f} | {ratios[0]} | {processor:.1f} | {ratios[1]} | {speed} |",
            flush=True,
        )


def _ratio(worker: Worker, measure: Worker, column: int) -> str:
    """Return the ratio of two medians, and the interval of 95 % of those of blocks drawn anew.

    Steps of a block resemble each other, so whole blocks are drawn (Künsch 1989); blocks of one turn stay together,
    because the machine was as busy for the one as for the other.
    """
    ours, theirs = (np.stack([np.array(block)[:, column] for block in one.answers]) for one in (worker, measure))
    draw = np.random.default_rng(0)
    turns = draw.integers(0, len(ours), (RESAMPLES, len(ours)))
    ratios = np.median(ours[turns].reshape(RESAMPLES, -1), axis=1) / np.median(
        theirs[turns].reshape(RESAMPLES, -1), axis=1
    )
    low, high = np.quantile(ratios, (0.025, 0.975))
    return f"{np.median(ours) / np.median(theirs):.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
