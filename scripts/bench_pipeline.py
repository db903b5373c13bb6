"""Measure the pipeline on a SPLADE-shaped model of BERT-base size, each step beside what one would write by hand.

Every command runs as a process of its own, in turn with its counterpart; printed are the medians of wall time and CPU
time and the largest resident set, as the operating system accounts them, and the ratios onnxtool / counterpart. The
counterparts verify nothing and describe nothing. `make bench` runs this; it takes some minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

from harness.machine import describe_machine
from harness.peers import DESCRIBE_WITH_ONNX, EXPORT_WITH_TRANSFORMERS, OPTIMIZE_WITH_ONNXRUNTIME
from harness.processes import measure_in_turns, median, run
from make_models import ROOT


def main() -> int:
    """Measure and print the table as Markdown."""
    parser = argparse.ArgumentParser(description="Measure the pipeline beside hand-written counterparts.")
    parser.add_argument("--model", default="splade-bert-base", help="a recipe of models/recipes.json")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command (stats: five times as many)")
    arguments = parser.parse_args()
    # In a process of its own: a child's peak memory starts at its parent's, which torch would make half a gigabyte.
    run(sys.executable, str(ROOT / "scripts" / "make_models.py"), arguments.model)
    checkpoint = ROOT / "models" / "checkpoints" / arguments.model
    python = [sys.executable, "-c"]
    onnxtool = [sys.executable, "-m", "onnxtool"]
    with tempfile.TemporaryDirectory() as folder:
        exported, optimized = f"{folder}/m.onnx", f"{folder}/m-optimized.onnx"
        rows = {
            "export, verified | transformers.exporters": (
                [*onnxtool, "export", "--model_name", str(checkpoint), "--output", exported, "--force"],
                [*python, EXPORT_WITH_TRANSFORMERS, str(checkpoint), f"{folder}/plain"],
                arguments.runs,
            ),
            "optimize, verified | onnxruntime.transformers.optimizer": (
                [*onnxtool, "optimize", "--model_path", exported, "--force"],
                [*python, OPTIMIZE_WITH_ONNXRUNTIME, exported, f"{folder}/plain.onnx"],
                arguments.runs,
            ),
            "optimize --no_verify | onnxruntime.transformers.optimizer": (
                [*onnxtool, "optimize", "--model_path", exported, "--force", "--no_verify"],
                [*python, OPTIMIZE_WITH_ONNXRUNTIME, exported, f"{folder}/plain.onnx"],
                arguments.runs,
            ),
            "stats | onnx.load": (
                [*onnxtool, "stats", exported, "--format", "json"],
                [*python, DESCRIBE_WITH_ONNX, exported],
                5 * arguments.runs,
            ),
            "stats of two | onnx.load of one": (
                [*onnxtool, "stats", optimized, exported, "--format", "json"],
                [*python, DESCRIBE_WITH_ONNX, exported],
                5 * arguments.runs,
            ),
        }
        print(f"{describe_machine()}\n")
        print("| onnxtool | counterpart | wall s | CPU s | peak MB | ratios: wall, CPU, peak |")
        print("|---|---|---:|---:|---:|---:|")
        for name, (ours, theirs, runs) in rows.items():
            mine, other = map(median, measure_in_turns({"ours": ours, "theirs": theirs}, runs).values())
            figures = [(mine.wall_s, other.wall_s), (mine.cpu_s, other.cpu_s), (mine.peak_mb, other.peak_mb)]
            ratios = ", ".join(f"{first / second:.2f}" for first, second in figures)
            cells = " | ".join(f"{first:.3g} / {second:.3g}" for first, second in figures)
            print(f"| {name} | {cells} | {ratios} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
