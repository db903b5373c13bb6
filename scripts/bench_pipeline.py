"""Measure the pipeline on a SPLADE-shaped model of BERT-base size, each step beside what one would write by hand.

Every command runs as a process of its own, in turn with its counterpart; printed are the medians of wall time and CPU
time and the largest resident set, as the operating system accounts them, and the ratios onnxtool / counterpart. The
counterparts verify nothing and describe nothing. `make bench` runs this; it takes some minutes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from make_models import ROOT

PLAIN_EXPORT = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1]).eval()
tokens = AutoTokenizer.from_pretrained(sys.argv[1])(["some text", "another one"], return_tensors="pt")
axes = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in tokens}
config = OnnxConfig(dynamic=True, dynamic_shapes=axes)
OnnxExporter().export(model, dict(tokens), config=config).save_pretrained(sys.argv[2])
"""
PLAIN_OPTIMIZE = """
import sys
from onnxruntime.transformers import optimizer
model = optimizer.optimize_model(sys.argv[1], model_type="bert", num_heads=12, hidden_size=768)
model.save_model_to_file(sys.argv[2])
"""
PLAIN_STATS = """
import collections, json, sys, onnx
model = onnx.load(sys.argv[1])
print(json.dumps(collections.Counter(node.op_type for node in model.graph.node)))
"""


@dataclass(frozen=True)
class Usage:
    """What one process took."""

    wall_s: float
    cpu_s: float
    peak_mb: float


# The peak of a process starts at that of the one that made it, so a small one stands in between.
LAUNCHER = """
import os, sys, time
start = time.perf_counter()
nothing = os.open(os.devnull, os.O_WRONLY)
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nothing, 1)])
_, status, usage = os.wait4(process, 0)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


def measure(command: Sequence[str]) -> Usage:
    """Run `command` to its end and return what it took.

    Raises:
        SystemExit: the command failed; what it said is printed.
    """
    launched = [sys.executable, "-S", "-c", LAUNCHER, *command]
    done = subprocess.run(launched, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr}")
    return Usage(*(float(figure) for figure in done.stdout.split()))


def compare(ours: Sequence[str], theirs: Sequence[str], runs: int) -> tuple[list[Usage], list[Usage]]:
    """Measure both commands in turn, `runs` times each."""
    pairs = [(measure(ours), measure(theirs)) for _ in range(runs)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def median(usages: Sequence[Usage]) -> Usage:
    """Return the median of each figure."""
    return Usage(
        *(statistics.median(getattr(usage, name) for usage in usages) for name in ("wall_s", "cpu_s", "peak_mb"))
    )


def main() -> int:
    """Measure and print the table as Markdown."""
    parser = argparse.ArgumentParser(description="Measure the pipeline beside hand-written counterparts.")
    parser.add_argument("--model", default="splade-bert-base", help="a recipe of models/recipes.json")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command (stats: five times as many)")
    arguments = parser.parse_args()
    # In a process of its own: a child's peak memory starts at its parent's, which torch would make half a gigabyte.
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_models.py", arguments.model], check=True, capture_output=True
    )
    checkpoint = ROOT / "models" / "checkpoints" / arguments.model
    python = [sys.executable, "-c"]
    onnxtool = [sys.executable, "-m", "onnxtool"]
    with tempfile.TemporaryDirectory() as folder:
        exported, optimized = f"{folder}/m.onnx", f"{folder}/m-optimized.onnx"
        rows = {
            "export, verified | transformers.exporters": (
                [*onnxtool, "export", "--model_name", str(checkpoint), "--output", exported, "--force"],
                [*python, PLAIN_EXPORT, str(checkpoint), f"{folder}/plain"],
                arguments.runs,
            ),
            "optimize, verified | onnxruntime.transformers.optimizer": (
                [*onnxtool, "optimize", "--model_path", exported, "--force"],
                [*python, PLAIN_OPTIMIZE, exported, f"{folder}/plain.onnx"],
                arguments.runs,
            ),
            "optimize --no_verify | onnxruntime.transformers.optimizer": (
                [*onnxtool, "optimize", "--model_path", exported, "--force", "--no_verify"],
                [*python, PLAIN_OPTIMIZE, exported, f"{folder}/plain.onnx"],
                arguments.runs,
            ),
            "stats | onnx.load": (
                [*onnxtool, "stats", exported, "--format", "json"],
                [*python, PLAIN_STATS, exported],
                5 * arguments.runs,
            ),
            "stats of two | onnx.load of one": (
                [*onnxtool, "stats", optimized, exported, "--format", "json"],
                [*python, PLAIN_STATS, exported],
                5 * arguments.runs,
            ),
        }
        print("| onnxtool | counterpart | wall s | CPU s | peak MB | ratios: wall, CPU, peak |")
        print("|---|---|---:|---:|---:|---:|")
        for name, (ours, theirs, runs) in rows.items():
            mine, other = (median(usages) for usages in compare(ours, theirs, runs))
            figures = [(mine.wall_s, other.wall_s), (mine.cpu_s, other.cpu_s), (mine.peak_mb, other.peak_mb)]
            ratios = ", ".join(f"{first / second:.2f}" for first, second in figures)
            cells = " | ".join(f"{first:.3g} / {second:.3g}" for first, second in figures)
            print(f"| {name} | {cells} | {ratios} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
