"""Measure how long a second process takes to compile a model that the cache on disk knows.

`python scripts/bench_torch_cache.py` compiles each case of torch_backend_steps.py and makes one step, in processes of
their own, in turns: with an empty cache, with the cache that this one left, through PyTorch's `aot_eager`, which only
traces and cuts, as TorchDynamo and AOTAutograd do in every process, whatever the backend remembers, and by inductor
with an empty cache and with what this one left. PyTorch's caches unpickle what they find, so onnxtool uses none.
Wall time with two threads, as inductor compiles in other processes; imports and a first eager step are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.machine import describe_machine

WAYS = ("first", "second", "aot_eager", "inductor", "inductor again")
THREADS = 2


def main() -> None:
    """Print a row a case: seconds to compile and make a step, and the share of the first."""
    arguments = _parse()
    if arguments.way:
        print(_compile(arguments.cases[0], arguments.way, arguments.folder))
        return
    print(f"{describe_machine(THREADS)}; seconds, medians of {arguments.rounds}")
    print(f"{'case':<22} {'first':>7} {'second':>7} {'of first':>9} {'tracing':>8} {'inductor':>9} {'again':>7}")
    for case in arguments.cases:
        rounds = [_round(case) for _ in range(arguments.rounds)]
        first, second, *others = (statistics.median(times[way] for times in rounds) for way in WAYS)
        cells = f"{others[0]:>8.2f} {others[1]:>9.2f} {others[2]:>7.2f}"
        print(f"{case:<22} {first:>7.2f} {second:>7.2f} {second / first:>9.2f} {cells}", flush=True)
    print(f"at the end: {describe_machine(THREADS)}")


def _parse() -> argparse.Namespace:
    from torch_backend_steps import CASES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _round(case: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return {way: _in_a_process(case, way, folder) for way in WAYS}


def _in_a_process(case: str, way: str, folder: str) -> float:
    command = [sys.executable, __file__, "--cases", case, "--way", way, "--folder", folder]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def _compile(name: str, way: str, folder: Path) -> float:
    """Return the seconds that compiling and the first step take."""
    import torch
    from torch_backend_steps import CASES, model_step

    from onnxtool.torch_backend import OrtBackend, OrtBackendOptions

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    case = CASES[name]()
    model_step(case)()
    ours = way in ("first", "second")
    step = model_step(case, OrtBackend(OrtBackendOptions(cache_folder=folder)) if ours else way.removesuffix(" again"))
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
