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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.machine import describe_machine
from harness.peers import EXPORT_WITH_TORCH, OPTIMIZE_WITH_ONNXRUNTIME, OPTIMIZE_WITH_ONNXSCRIPT
from harness.processes import Usage, measure, median, run
from make_models import ROOT

WAYS = tuple((exporter, attention) for exporter in ("dynamo", "torchscript") for attention in ("sdpa", "eager"))


@dataclass(frozen=True)
class Tool:
    """One way to optimize a file.

    Attributes:
        command: with {source}, {output} and {folder} for the files.
        result: where in the folder it writes what it makes; empty for the output.
    """

    name: str
    command: tuple[str, ...]
    result: str = ""

    def run(self, source: Path, output: Path, folder: Path, runs: int) -> Usage | None:
        """Return the medians of a few runs; None where the tool fails."""
        command = [part.format(source=source, output=output, folder=folder) for part in self.command]
        try:
            return median([measure(command) for _ in range(runs)])
        except SystemExit as failure:
            print(f"{self.name} on {source.name}: {str(failure).strip().splitlines()[-1]}", file=sys.stderr)
            return None


def tools(optimum: Path | None, olive: Path | None) -> tuple[Tool, ...]:
    """Return onnxtool and the peers that are here."""
    python = (sys.executable, "-c")
    ours = (sys.executable, "-m", "onnxtool", "optimize", "--model_path", "{source}", "--output", "{output}", "--force")
    found = [
        Tool("onnxtool, verified", ours),
        Tool("onnxtool --no_verify", (*ours, "--no_verify")),
        Tool("onnxruntime.transformers.optimizer", (*python, OPTIMIZE_WITH_ONNXRUNTIME, "{source}", "{output}")),
        Tool("onnxscript optimize_for_ort", (*python, OPTIMIZE_WITH_ONNXSCRIPT, "{source}", "{output}")),
    ]
    if optimum is not None:
        command = (
            str(optimum / "bin" / "optimum-cli"),
            "onnxruntime",
            "optimize",
            "--onnx_model",
            "{folder}/one",
            "-O2",
        )
        found.append(Tool("optimum-cli -O2", (*command, "-o", "{folder}/optimum"), "optimum/model_optimized.onnx"))
    if olive is not None:
        settings = '{{"model_type": "bert", "num_heads": 12, "hidden_size": 768}}'
        one_pass = (str(olive / "bin" / "olive"), "run-pass", "--pass-name", "OrtTransformersOptimization")
        files = ("-m", "{source}", "--pass-config", settings, "-o", "{folder}/olive")
        found.append(Tool("olive", (*one_pass, *files), "olive/model.onnx"))
    return tuple(found)


def describe(path: Path) -> dict[str, Any]:
    """Return nodes, fused attentions and bytes of a file."""
    from onnxtool.summary import summarize_model

    stats = summarize_model(path)
    attentions = sum(
        count
        for operator, count in stats.ops.items()
        if operator.removeprefix("com.microsoft::") in ("Attention", "MultiHeadAttention")
    )
    return {"nodes": stats.num_nodes, "attention": attentions, "MB": round(stats.size_bytes / 1e6, 1)}


def time_files(files: Sequence[Path], batch: int, length: int, rounds: int) -> dict[Path, float]:
    """Return the median milliseconds of one run of each file, one after the other in each round."""
    import numpy as np
    import onnxruntime as ort

    from onnxtool.runtime.session import open_session

    generator = np.random.default_rng(0)
    ids = generator.integers(0, 30522, (batch, length))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    ort.set_default_logger_severity(4)
    sessions = {path: open_session(path, provider="cpu") for path in files}
    times: dict[Path, list[float]] = {path: [] for path in files}
    for number in range(rounds + 1):
        for path, session in sessions.items():
            start = time.perf_counter()
            session.run_unchecked({name: feeds[name] for name in session.input_names})
            if number:  # the first run allocates
                times[path].append((time.perf_counter() - start) * 1e3)
    return {path: statistics.median(found) for path, found in times.items()}


def main() -> int:
    """Measure and print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="splade-bert-base", help="a recipe of models/recipes.json")
    parser.add_argument("--runs", type=int, default=1, help="runs of each tool; the median is printed")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each file, in turn")
    parser.add_argument("--optimum", type=Path, metavar="DIR", help="a virtual environment with optimum-onnx")
    parser.add_argument("--olive", type=Path, metavar="DIR", help="a virtual environment with olive-ai")
    parser.add_argument("--tools", nargs="+", metavar="NAME", help="run those whose names begin so; default: all")
    parser.add_argument("--ways", nargs="+", default=["-".join(way) for way in WAYS], metavar="EXPORTER-ATTENTION")
    parser.add_argument("--work_dir", type=Path, help="where the files go, and stay; default: a temporary folder")
    arguments = parser.parse_args()
    run(sys.executable, str(ROOT / "scripts" / "make_models.py"), arguments.model)
    checkpoint = ROOT / "models" / "checkpoints" / arguments.model
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work_dir or Path(temporary)).resolve()
        os.chdir(temporary)  # Olive leaves a cache with whole models wherever it is run
        files = _optimize(checkpoint, folder, arguments)
        _print_times(files, arguments.rounds)
    return 0


def _optimize(checkpoint: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, list[Path]]:
    """Run every tool on every export, print the first table, and return the files worth timing of each export."""
    print(f"{describe_machine()}\n")
    print("| export | tool | nodes | attention | MB | wall s | peak MB |\n|---|---|---:|---:|---:|---:|---:|")
    files: dict[str, list[Path]] = {}
    for way in arguments.ways:
        source = folder / way / f"{way}.onnx"
        source.parent.mkdir(parents=True, exist_ok=True)
        if not source.exists():
            measure([sys.executable, "-c", EXPORT_WITH_TORCH, str(checkpoint), *way.split("-"), str(source)])
        _lay_out(source, checkpoint)
        found = describe(source)
        print(f"| {way} | - | {found['nodes']} | {found['attention']} | {found['MB']} | | |", flush=True)
        files[way] = [source]
        for number, tool in enumerate(tools(arguments.optimum, arguments.olive)):
            if arguments.tools and not tool.name.startswith(tuple(arguments.tools)):
                continue
            output = folder / way / (tool.result or f"{number}.onnx")
            usage = tool.run(source, output, folder / way, arguments.runs)
            if usage is None or not output.exists():
                print(f"| {way} | {tool.name} | failed | | | | |", flush=True)
                continue
            found = describe(output)
            cells = f"{found['nodes']} | {found['attention']} | {found['MB']}"
            print(f"| {way} | {tool.name} | {cells} | {usage.wall_s:.1f} | {usage.peak_mb:.0f} |", flush=True)
            if number != 1:  # the same file, verified or not
                files[way].append(output)
    return files


def _lay_out(source: Path, checkpoint: Path) -> None:
    """Put the export into a folder of its own under the name that optimum-onnx looks for, beside its config."""
    folder = source.parent / "one"
    folder.mkdir(exist_ok=True)
    for name, target in (("model.onnx", source), ("config.json", checkpoint / "config.json")):
        if not (folder / name).exists():
            (folder / name).symlink_to(target.resolve())


def _print_times(files: Mapping[str, Sequence[Path]], rounds: int) -> None:
    """Time the files of each export against the export itself, the first of them."""
    shapes = ((8, 128), (1, 128), (1, 16))
    print("\n| file | " + " | ".join(f"{batch}x{length} ms" for batch, length in shapes) + " |")
    print("|---|" + "---:|" * len(shapes))
    for group in files.values():
        measured = [time_files(group, *shape, rounds) for shape in shapes]
        for path in group:
            cells = " | ".join(f"{found[path]:.1f} ({found[group[0]] / found[path]:.2f}x)" for found in measured)
            print(f"| {path.relative_to(group[0].parent.parent)} | {cells} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
