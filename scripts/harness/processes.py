"""Measure whole processes as the operating system accounts them, in turns, and print the table."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.machine import describe_machine
from harness.pages import print_head, print_row


@dataclass(frozen=True)
class Command:
    """A contender that is a whole process.

    Attributes:
        words: its command line.
        output: the file or the folder of graphs that it writes, for its size.
    """

    name: str
    words: Sequence[str]
    output: Path | None = None


def describe(output: Path | None) -> tuple[object, ...]:
    """Return nodes, fused attentions and megabytes of a file or of a folder of graphs; empty cells for none."""
    from onnxtool.summary import summarize_model

    if output is None:
        return "", "", ""
    summaries = [summarize_model(file) for file in (output.glob("*.onnx") if output.is_dir() else [output])]
    kinds = ("com.microsoft::Attention", "com.microsoft::MultiHeadAttention")
    num_fused = sum(summary.ops.get(kind, 0) for summary in summaries for kind in kinds)
    size_mb = sum(summary.size_bytes for summary in summaries) / 1e6
    return sum(summary.num_nodes for summary in summaries), num_fused, f"{size_mb:.1f}"


# The peak of a process starts at that of its parent, so a small process starts the measured one.
_LAUNCHER = """
import os, sys, time
start = time.perf_counter()
nothing = os.open(os.devnull, os.O_WRONLY)
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nothing, 1)])
_, status, usage = os.wait4(process, 0)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


def run(*command: str) -> str:
    """Run a command that is not measured, and return what it prints.

    Raises:
        SystemExit: the command failed; what it said is printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr}")
    return done.stdout


def measure(words: Sequence[str]) -> list[float]:
    """Run a command to its end and return its wall seconds, processor seconds and peak megabytes.

    Raises:
        SystemExit: the command failed; what it said is printed.
    """
    return [float(figure) for figure in run(sys.executable, "-S", "-c", _LAUNCHER, *words).split()]


def compare(commands: Sequence[Command], rounds: int) -> None:
    """Run all commands in turns, and print their medians and the ratios of the first one's to them as Markdown.

    In turns, because what else the machine does then bears on all of them alike.
    """
    turns = [[measure(command.words) for command in commands] for _ in range(rounds)]
    medians = [
        [statistics.median(column) for column in zip(*usages, strict=True)] for usages in zip(*turns, strict=True)
    ]
    print(f"\n{rounds} rounds in turns; {describe_machine()}\n")
    columns = "command | wall s | CPU s | peak MB | nodes | attention | file MB | first / this: wall, CPU, peak"
    print_head(columns.split(" | "))
    for command, usage in zip(commands, medians, strict=True):
        ratios = ", ".join(f"{first / own:.2f}" for first, own in zip(medians[0], usage, strict=True))
        print_row(command.name, *(f"{figure:.3g}" for figure in usage), *describe(command.output), ratios)
