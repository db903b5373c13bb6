"""Optimize the four exports of one BERT with onnxtool and with its peers: what is fused, in what time, what it buys.

`python scripts/bench_optimize.py` prints two tables as Markdown. The first has a row for each export (dynamo and
TorchScript, sdpa and eager attention) and tool: nodes, fused attentions, size, wall time and largest resident set of
the whole process. The second times the files, in turn, in sessions of onnxruntime as a user would open them.
onnxruntime's own optimizer and onnxscript's are run with the packages of this environment; optimum-onnx and Olive with
`--optimum DIR` and `--olive DIR`, virtual environments that have them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.machine import describe_machine
from harness.peers import EXPORT_WITH_TORCH, OPTIMIZE_WITH_ONNXRUNTIME, OPTIMIZE_WITH_ONNXSCRIPT
from harness.processes import Command, measure, run
from make_models import ROOT

WAYS = tuple((exporter, attention) for exporter in ("dynamo", "torchscript") for attention in ("sdpa", "eager"))
SHAPES = ((8, 128), (1, 128), (1, 16))
UNVERIFIED = "onnxtool --no_verify"


def tools(source: Path, checkpoint: Path, given: argparse.Namespace) -> Iterator[Command]:
    """Yield onnxtool and the peers that are here, each with the file that it writes beside `source`."""
    folder, file = source.parent, str(source)
    ours = (sys.executable, "-m", "onnxtool", "optimize", "--model_path", file, "--force", "--output")
    python = (sys.executable, "-c")
    yield Command("onnxtool, verified", (*ours, f"{folder}/onnxtool.onnx"), folder / "onnxtool.onnx")
    yield Command(UNVERIFIED, (*ours, f"{folder}/unverified.onnx", "--no_verify"), folder / "unverified.onnx")
    for name, code in (
        ("onnxruntime.transformers.optimizer", OPTIMIZE_WITH_ONNXRUNTIME),
        ("onnxscript optimize_for_ort", OPTIMIZE_WITH_ONNXSCRIPT),
    ):
        output = folder / f"{name.partition('.')[0].partition(' ')[0]}.onnx"
        yield Command(name, (*python, code, file, str(output)), output)
    if given.optimum:
        # It looks for a file of this name beside its config.
        one = folder / "one"
        one.mkdir(exist_ok=True)
        for name, target in (("model.onnx", source), ("config.json", checkpoint / "config.json")):
            if not (one / name).exists():
                (one / name).symlink_to(target.resolve())
        words = (f"{given.optimum}/bin/optimum-cli", "onnxruntime", "optimize", "--onnx_model", str(one), "-O2")
        output = folder / "optimum"
        yield Command("optimum-cli -O2", (*words, "-o", str(output)), output / "model_optimized.onnx")
    if given.olive:
        settings = '{"model_type": "bert", "num_heads": 12, "hidden_size": 768}'
        words = (f"{given.olive}/bin/olive", "run-pass", "--pass-name", "OrtTransformersOptimization", "-m", file)
        output = folder / "olive"
        yield Command("olive", (*words, "--pass-config", settings, "-o", str(output)), output / "model.onnx")


def describe(path: Path) -> str:
    """Return the cells of a file: nodes, fused attentions and MB."""
    from onnxtool.summary import summarize_model

    stats = summarize_model(path)
    fused = sum(stats.ops.get(f"com.microsoft::{name}", 0) for name in ("Attention", "MultiHeadAttention"))
    return f"{stats.num_nodes} | {fused} | {stats.size_bytes / 1e6:.1f}"


def time_files(files: Sequence[Path], shape: tuple[int, int], rounds: int) -> list[float]:
    """Return the median milliseconds of one run of each file, one after the other in each round."""
    import numpy as np
    import onnxruntime as ort

    from onnxtool.runtime.session import open_session

    ids = np.random.default_rng(0).integers(0, 30522, shape)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    ort.set_default_logger_severity(4)
    sessions = [open_session(path, provider="cpu") for path in files]
    times: list[list[float]] = [[] for _ in files]
    for number in range(rounds + 1):
        for session, found in zip(sessions, times, strict=True):
            start = time.perf_counter()
            session.run_unchecked({name: feeds[name] for name in session.input_names})
            if number:  # the first run allocates
                found.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(found) for found in times]


def optimize(way: tuple[str, str], checkpoint: Path, folder: Path, given: argparse.Namespace) -> list[Path]:
    """Run every tool on one export, print their rows, and return the files worth timing, the export first."""
    name = "-".join(way)
    source = folder / name / f"{name}.onnx"
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        run(sys.executable, "-c", EXPORT_WITH_TORCH, str(checkpoint), *way, str(source))
    print(f"| {name} | - | {describe(source)} | | |", flush=True)
    files = [source]
    for tool in tools(source, checkpoint, given):
        if given.tools and not tool.name.startswith(tuple(given.tools)):
            continue
        try:
            usage = measure(tool.words)
        except SystemExit as failure:
            print(f"| {name} | {tool.name} | failed: {str(failure).strip().splitlines()[-1]} | | | | |", flush=True)
            continue
        output = tool.output or source
        print(f"| {name} | {tool.name} | {describe(output)} | {usage.wall_s:.1f} | {usage.peak_mb:.0f} |", flush=True)
        if tool.name != UNVERIFIED:  # the same file
            files.append(output)
    return files


def main() -> int:
    """Measure and print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="splade-bert-base", help="a recipe of models/recipes.json")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each file, in turn")
    parser.add_argument("--optimum", type=Path, metavar="DIR", help="a virtual environment with optimum-onnx")
    parser.add_argument("--olive", type=Path, metavar="DIR", help="a virtual environment with olive-ai")
    parser.add_argument("--tools", nargs="+", metavar="NAME", help="run those whose names begin so; default: all")
    parser.add_argument("--work_dir", type=Path, help="where the files go, and stay; default: a temporary folder")
    given = parser.parse_args()
    run(sys.executable, str(ROOT / "scripts" / "make_models.py"), given.model)
    checkpoint = ROOT / "models" / "checkpoints" / given.model
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.work_dir or Path(temporary)).resolve()
        os.chdir(temporary)  # Olive leaves a cache with whole models wherever it is run
        print(f"{describe_machine()}\n")
        print("| export | tool | nodes | attention | MB | wall s | peak MB |\n|---|---|---:|---:|---:|---:|---:|")
        groups = [optimize(way, checkpoint, folder, given) for way in WAYS]
        print("\n| file | " + " | ".join(f"{batch}x{length} ms" for batch, length in SHAPES) + " |")
        print("|---|" + "---:|" * len(SHAPES))
        for files in groups:
            measured = [time_files(files, shape, given.rounds) for shape in SHAPES]
            for place, path in enumerate(files):
                cells = " | ".join(f"{found[place]:.1f} ({found[0] / found[place]:.2f}x)" for found in measured)
                print(f"| {path.relative_to(folder)} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
