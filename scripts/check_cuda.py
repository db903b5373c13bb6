"""Run the whole pipeline on an NVIDIA GPU in fp32, fp16 and bf16, and compare its numbers with PyTorch and the CPU.

`python scripts/check_cuda.py --work DIR` exports, optimizes and verifies MiniLM, encodes and times texts with it, and
trains it with torch.compile, OrtTrainer and training artifacts. It prints the tables as Markdown, and fails if a number
exceeds its bound. Each step is a process of its own, and the whole stops after eight minutes; `--precisions` divides
the work among several runs. `--device cpu` is the dry run without a GPU: the same steps with one layer of MiniLM.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import cuda_steps
from cuda_steps import EXPORTED, SIZES, TORCH_DTYPES, Run
from harness.machine import describe_gpu, describe_machine
from harness.steps import Result, Step, print_tables, problems_of, run_steps

from onnxtool.optimize.options import PRECISIONS
from onnxtool.runtime.providers import cuda_problem, runtime_version


def make_steps(run: Run, precisions: Sequence[str]) -> Iterator[Step]:
    """Yield all steps, the fp32 export first: it is what gets optimized, and what encodes the corpus on the CPU."""

    def step(function: Callable[[Run, str], Result], precision: str, *needs: str) -> Step:
        name = "-".join(filter(None, (function.__name__, precision)))
        return Step(name, function.__name__, partial(function, run, precision), needs)

    yield step(cuda_steps.pytorch, "")
    for precision in precisions:
        file = ""
        if precision in EXPORTED:
            yield step(cuda_steps.export, precision, "pytorch")
            file = f"export-{precision}"
        if precision in PRECISIONS[run.device]:
            yield step(cuda_steps.optimize, precision, "export-fp32")
            file = f"optimize-{precision}"
        if precision == "fp32":
            yield step(cuda_steps.corpus, "", "export-fp32")
            yield step(cuda_steps.artifacts, precision, "export-fp32")
        if file:
            yield step(cuda_steps.infer, precision, file)
            yield step(cuda_steps.benchmark, precision, file)
            yield step(cuda_steps.corpus, precision, file, "corpus")
        yield step(cuda_steps.compiled, precision, "pytorch")
        yield step(cuda_steps.trainer, precision, "pytorch")


def left_out(run: Run, steps: Sequence[Step]) -> Iterator[str]:
    """Yield the precisions that are not run, and why."""
    names = {step.name for step in steps}
    for precision in TORCH_DTYPES:
        if f"compiled-{precision}" not in names:
            reason = "not in --precisions" if run.device == "cuda" else "CPUs compute in float32 (--precisions adds it)"
            yield f"{precision}: left out, {reason}"


def missing_gpu() -> str:
    """Return what onnxruntime or PyTorch lacks to use a GPU; empty if both can."""
    if problem := cuda_problem():
        return problem
    import torch

    return "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} cannot use CUDA"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and print their tables; return 1 if a number is wrong or a step has no result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of files and logs")
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda")
    parser.add_argument("--precisions", nargs="+", choices=tuple(TORCH_DTYPES), help="default: all; for the CPU, fp32")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this time")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers' Trainer spreads batches over several
    start, run = time.perf_counter(), Run(options.work.resolve(), options.device)
    wanted = options.precisions or (list(TORCH_DTYPES) if run.device == "cuda" else ["fp32"])
    steps = list(make_steps(run, [precision for precision in TORCH_DTYPES if precision in {"fp32", *wanted}]))
    if run.device == "cuda" and (problem := missing_gpu()):
        print(f"error: no GPU to check: {problem}\nhint: --device cpu runs the steps without one", file=sys.stderr)
        return 1
    outcomes = run_steps(steps, run.work / "logs", minutes=options.minutes)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    print(f"{describe_gpu() or 'no GPU'}; {describe_machine()}; onnxruntime {runtime_version()}, {versions}")
    print_tables(outcomes)
    print("".join(f"- {note}\n" for note in left_out(run, steps)))
    problems = list(problems_of(outcomes))
    print("".join(f"WRONG {problem}\n" for problem in problems))
    print(f"{len(outcomes)} steps, {len(problems)} problems, {time.perf_counter() - start:.0f} s")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
