"""Measure `onnxtool export` beside `optimum-cli export onnx` on one checkpoint, pair by pair.

optimum needs an older transformers, so it lives in an environment of its own:

    python3 -m venv DIR && DIR/bin/pip install torch 'optimum-onnx[onnxruntime]==0.1.0'
    python scripts/bench_export.py --optimum DIR/bin/optimum-cli

Both run as whole processes, in turn, so that whatever else the machine does meets both; the ratios are of one pair
each. Wall and CPU time and the largest resident set (which counts the mapped pages of files as well) are what the
operating system accounts. onnxtool verifies each of its files on nine shapes and masks; optimum compares two, and
keeps a file that differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from harness.machine import describe_machine
from harness.processes import Usage, measure, run
from make_models import ROOT

_FIGURES = tuple(field.name for field in fields(Usage))


@dataclass(frozen=True)
class Pair:
    """One run of each, one after the other."""

    onnxtool: Usage
    optimum: Usage
    onnxtool_mb: float
    optimum_mb: float

    @property
    def ratios(self) -> dict[str, float]:
        """Return onnxtool / optimum of each figure."""
        return {
            **{name: getattr(self.onnxtool, name) / getattr(self.optimum, name) for name in _FIGURES},
            "file_mb": self.onnxtool_mb / self.optimum_mb,
        }


def run_pair(ours: Sequence[str], theirs: Sequence[str], checkpoint: Path, *, task: str) -> Pair:
    """Export `checkpoint` with `ours` and then with `theirs` (the beginnings of their command lines)."""
    with tempfile.TemporaryDirectory() as folder:
        mine, other = Path(folder) / "onnxtool", Path(folder) / "optimum"
        ours = [*ours, "--model_name", str(checkpoint), "--output", str(mine / "model.onnx"), "--quiet"]
        theirs = [*theirs, "--model", str(checkpoint), "--task", task, str(other)]
        return Pair(measure(ours), measure(theirs), _graph_mb(mine), _graph_mb(other))


def _graph_mb(folder: Path) -> float:
    """Return the size of the graph and its external data."""
    return sum(file.stat().st_size for file in folder.glob("*.onnx*")) / 1e6


def summarize(pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """Return the medians of both and of the ratios, by figure."""
    figures: dict[str, dict[str, float]] = {}
    for name in (*_FIGURES, "file_mb"):
        if name == "file_mb":
            mine, other = [pair.onnxtool_mb for pair in pairs], [pair.optimum_mb for pair in pairs]
        else:
            mine = [getattr(pair.onnxtool, name) for pair in pairs]
            other = [getattr(pair.optimum, name) for pair in pairs]
        ratios = [pair.ratios[name] for pair in pairs]
        figures[name] = {
            "onnxtool": statistics.median(mine),
            "optimum": statistics.median(other),
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
    return figures


def print_table(figures: dict[str, dict[str, float]], num_pairs: int) -> None:
    """Print the medians as Markdown."""
    print(f"{describe_machine()}\n")
    print(f"| medians of {num_pairs} | onnxtool | optimum-cli | ratio | lowest | highest |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in figures.items():
        cells = " | ".join(f"{row[key]:.4g}" for key in ("onnxtool", "optimum"))
        ratios = " | ".join(f"{row[key]:.2f}" for key in ("ratio", "ratio_min", "ratio_max"))
        print(f"| {name} | {cells} | {ratios} |")


def main() -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="Measure onnxtool export beside optimum-cli export onnx.")
    parser.add_argument("--optimum", required=True, type=Path, metavar="PATH", help="the optimum-cli to compare with")
    parser.add_argument("--model", default="splade-bert-base", help="a recipe of models/recipes.json, or a checkpoint")
    parser.add_argument("--task", default="fill-mask", help="optimum's name of the task; it infers none from a folder")
    parser.add_argument("--exporter", default="auto", help="onnxtool's --exporter")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each")
    parser.add_argument("--format", choices=("markdown", "json"), default="markdown")
    arguments = parser.parse_args()
    if not arguments.optimum.is_file():
        parser.error(f"there is no {arguments.optimum}; see the beginning of this file")
    checkpoint = Path(arguments.model)
    if not checkpoint.is_dir():
        # In a process of its own: a child's peak memory starts at its parent's, which torch would make half a gigabyte.
        maker = [sys.executable, str(ROOT / "scripts" / "make_models.py"), arguments.model]
        run(*maker)
        checkpoint = ROOT / "models" / "checkpoints" / arguments.model
    ours = [sys.executable, "-m", "onnxtool", "export", "--exporter", arguments.exporter]
    theirs = [str(arguments.optimum), "export", "onnx"]
    pairs = []
    for number in range(arguments.pairs):
        pairs.append(run_pair(ours, theirs, checkpoint, task=arguments.task))
        print(f"pair {number + 1} of {arguments.pairs}: {_line(pairs[-1])}", file=sys.stderr, flush=True)
    figures = summarize(pairs)
    if arguments.format == "json":
        document = {"model": checkpoint.name, "figures": figures, "pairs": [asdict(pair) for pair in pairs]}
        print(json.dumps(document, indent=2))
    else:
        print_table(figures, len(pairs))
    return 0


def _line(pair: Pair) -> str:
    return ", ".join(f"{name} {ratio:.2f}x" for name, ratio in pair.ratios.items())


if __name__ == "__main__":
    sys.exit(main())
