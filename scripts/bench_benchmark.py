"""Measure the benchmark itself: against a hand-written loop, and as a gate, on a model that is slowed down on purpose.

Run `python scripts/bench_benchmark.py`, or with `--model_path MODEL.onnx` on a model of your own. Two tables are
printed. The first has the median of the loop of `onnxtool infer --benchmark` over that of a plain one around
`InferenceSession.run` on the same inputs, in turns. The second says how often `--baseline` with `--fail_if` passed the
unchanged model, and how often it caught one that takes 15 % longer, each run in a process of its own, against a
baseline made before them. The model of the baseline is still there then, and is timed again in turns; `--without_model`
judges by figures alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from harness.machine import describe_machine
from make_models import ROOT, trained_model
from onnx import TensorProto, helper, numpy_helper

import onnxtool
from onnxtool.benchmarking.rounds import InterleavedRuns, Limits, SessionRunner
from onnxtool.model_file import ModelFile
from onnxtool.runtime.feeds import FeedShape, index_bounds, random_feeds
from onnxtool.runtime.timing import interval_of_median

WIDTH = 256  # of the product that slows a model down
SLOWDOWN = 1.15
WARMUP = 3


def main() -> int:
    """Print both tables; exit with 1 where a figure is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", type=Path, help="An ONNX file; without it, MiniLM, exported and optimized.")
    parser.add_argument("--shape", default="1x16", help="Batch and sequence.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="Of the comparison with a loop.")
    parser.add_argument("--pairs", type=int, default=20, help="Of a round.")
    parser.add_argument("--runs", type=int, default=5, help="Of each side of a pair.")
    parser.add_argument("--gates", type=int, default=20, help="Benchmarks of each model against the baseline.")
    parser.add_argument("--duration", type=float, default=5.0, help="Seconds of each.")
    parser.add_argument("--fail_if", default="p50>+10%")
    parser.add_argument("--without_model", action="store_true", help="Judge by the baseline's figures alone.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model_path or make_model(Path(folder))
        print(f"{path.name}, {options.shape}; {describe_machine(options.threads)}\n")
        is_close = compare_with_loop(path, options) if options.rounds else True
        is_right = judge(path, Path(folder), options) if options.gates else True
    print(f"\nat the end: {describe_machine(options.threads)}")
    return 0 if is_close and is_right else 1


def make_model(folder: Path) -> Path:
    """Export and optimize MiniLM."""
    model = folder / "minilm.onnx"
    run_onnxtool("export", "--model_name", str(trained_model()), "--output", str(model), "--quiet")
    run_onnxtool("optimize", "--model_path", str(model), "--quiet")
    return folder / "minilm-optimized.onnx"


def run_onnxtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command; 1 is the exit code of a gate that is met."""
    command = [sys.executable, "-m", "onnxtool", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or done.stderr.startswith("error"):
        sys.exit(done.stderr)
    return done


def shape_of(text: str) -> tuple[int, int]:
    """Read `1x16`."""
    batch_size, _, length = text.partition("x")
    return int(batch_size), int(length)


def feeds_of(path: Path, shape: str) -> Mapping[str, Any]:
    """Make the inputs that the benchmark makes."""
    model = ModelFile.open(path)
    return random_feeds(model.structure.inputs, FeedShape.full(*shape_of(shape)), index_bounds(model), seed=0)


def open_session(path: Path, threads: int) -> Any:
    """Open a session as the file asks for it, by hand."""
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 4
    disabled = ModelFile.open(path).metadata.get("onnxtool.session.disabled_optimizers", "")
    return ort.InferenceSession(
        str(path), settings, providers=["CPUExecutionProvider"], disabled_optimizers=disabled.split(",")
    )


def time_by_hand(session: Any, feeds: Mapping[str, Any], runs: int) -> tuple[float, float]:
    """Return the median latency, and the median processor time of the thread, in milliseconds."""
    session.run(None, feeds)
    walls, cores = [], []
    for _ in range(runs):
        core, start = time.thread_time(), time.perf_counter()
        session.run(None, feeds)
        walls.append(time.perf_counter() - start)
        cores.append(time.thread_time() - core)
    return float(np.median(walls)) * 1e3, float(np.median(cores)) * 1e3


def compare_with_loop(path: Path, options: argparse.Namespace) -> bool:
    """Print the ratios of the first table; return whether the medians are within 3 %.

    A block of the library's loop and as many runs by hand, in the same session, are a pair, in turns the other way
    round. Sessions are opened anew for each round.
    """
    feeds = feeds_of(path, options.shape)
    ratios: list[float] = []
    for place in range(options.rounds):
        session = onnxtool.open_session(path, provider="cpu", threads=options.threads)
        # The very same one: of two sessions one may lie better in memory, by up to a tenth.
        by_hand = session._inference  # noqa: SLF001
        contender = SessionRunner(session)
        turns = InterleavedRuns([[contender.prepare(feeds)]])
        turns.warm_up(WARMUP)
        pairs = []
        for pair in range(options.pairs):
            loop = time_by_hand(by_hand, feeds, options.runs)[0] if pair % 2 else None
            turns.warm_up(1)
            turns.take(Limits(options.runs, float("inf")))
            loop = loop or time_by_hand(by_hand, feeds, options.runs)[0]
            pairs.append(float(np.median(turns.blocks[0][-1])) / loop)
        ratios += pairs
        print(
            f"round {place + 1}: {options.pairs} pairs of {options.runs} runs, ratio {np.median(pairs):.3f}", flush=True
        )
    low, high = interval_of_median(ratios)
    print(f"p50 over that of the loop: {np.median(ratios):.3f} (95 %: {low:.3f} to {high:.3f})")
    return bool(abs(np.median(ratios) - 1.0) <= 0.03)


def judge(path: Path, folder: Path, options: argparse.Namespace) -> bool:
    """Print the second table; return whether every verdict was right."""
    slow, slowdown = make_slower(path, folder / "slower.onnx", options)
    print(f"the slower model takes {slowdown:.3f} of the time, on one thread without what others took")
    batch_size, length = shape_of(options.shape)
    common = ["infer", "--benchmark", "--quiet", "--provider", "cpu", "--threads", str(options.threads)]
    common += ["--batch_size", str(batch_size), "--sequence_length", str(length), "--duration", str(options.duration)]
    baseline = folder / "baseline.json"
    measured = folder / "measured.onnx"
    shutil.copyfile(path, measured)
    run_onnxtool(*common, "--model_path", str(measured), "--format", "json", "--output", str(baseline))
    if options.without_model:
        measured.unlink()
    common += ["--baseline", str(baseline), "--fail_if", options.fail_if]
    right = {"unchanged": 0, "slower": 0}
    for place in range(options.gates):
        for name, model, wanted in (("unchanged", path, 0), ("slower", slow, 1)):
            start = time.perf_counter()
            done = run_onnxtool(*common, "--model_path", str(model))
            right[name] += done.returncode == wanted
            row = next(line for line in done.stdout.splitlines() if line.startswith(options.fail_if))
            print(
                f"{place + 1:3} {name:9} exit {done.returncode}  {time.perf_counter() - start:5.1f} s  {row}",
                flush=True,
            )
    passed, caught = (f"{count} of {options.gates}" for count in right.values())
    print(f"passed unchanged: {passed}; caught slower: {caught}")
    return all(count == options.gates for count in right.values())


def make_slower(path: Path, output: Path, options: argparse.Namespace) -> tuple[Path, float]:
    """Write a model that computes the same with as many more products as make it take 15 % longer, and say how much."""
    feeds = feeds_of(path, options.shape)
    fast = open_session(path, 1)
    count = 16
    slowdown = 1.0
    for _ in range(4):
        write_slower(path, output, count)
        slowdown = ratio_in_turns(fast, open_session(output, 1), feeds)
        if abs(slowdown - SLOWDOWN) < 0.01:
            break
        count = max(1, round(count * (SLOWDOWN - 1.0) / max(0.01, slowdown - 1.0)))
    return output, slowdown


def ratio_in_turns(fast: Any, slow: Any, feeds: Mapping[str, Any], rounds: int = 15, runs: int = 12) -> float:
    """Return the median ratio of processor times, in turns."""
    ratios = [time_by_hand(slow, feeds, runs)[1] / time_by_hand(fast, feeds, runs)[1] for _ in range(rounds)]
    return float(np.median(ratios))


def write_slower(path: Path, output: Path, count: int) -> None:
    """Add `count` products to the graph whose result, times zero, is added to the first output."""
    model = onnx.load(str(path))
    graph, name = model.graph, model.graph.output[0].name
    for node in graph.node:
        for place, value in enumerate(node.output):
            if value == name:
                node.output[place] = "without_more"
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    graph.initializer.extend(
        [
            numpy_helper.from_array(weight, "more_weight"),
            numpy_helper.from_array(np.full((1, WIDTH), 1e-3, np.float32), "more_row"),
            numpy_helper.from_array(np.array([-1], np.int64), "more_axis"),
            numpy_helper.from_array(np.array(0.0, np.float32), "more_zero"),
        ]
    )
    nodes = [
        helper.make_node("Cast", [graph.input[0].name], ["more_floats"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["more_floats", "more_axis"], ["more_column"]),
        helper.make_node("MatMul", ["more_column", "more_row"], ["more_0"]),
    ]
    nodes += [helper.make_node("MatMul", [f"more_{k}", "more_weight"], [f"more_{k + 1}"]) for k in range(count)]
    nodes += [
        helper.make_node("ReduceMean", [f"more_{count}"], ["more_mean"], keepdims=0),
        helper.make_node("Mul", ["more_mean", "more_zero"], ["more_nothing"]),
        helper.make_node("Add", ["without_more", "more_nothing"], [name]),
    ]
    graph.node.extend(nodes)
    onnx.save(model, str(output))


if __name__ == "__main__":
    sys.exit(main())
