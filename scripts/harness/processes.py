"""Measure whole processes as the operating system accounts them, in turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Usage:
    """What one process took."""

    wall_s: float
    cpu_s: float
    peak_mb: float


# The peak of a process starts at that of the one that made it, so a small one stands in between.
_LAUNCHER = """
import os, sys, time
start = time.perf_counter()
nothing = os.open(os.devnull, os.O_WRONLY)
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, nothing, 1)])
_, status, usage = os.wait4(process, 0)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


def run(*command: str) -> None:
    """Run a command that is not measured.

    Raises:
        SystemExit: the command failed; what it said is printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr}")


def measure(command: Sequence[str]) -> Usage:
    """Run `command` to its end and return what it took.

    Raises:
        SystemExit: the command failed; what it said is printed.
    """
    launched = [sys.executable, "-S", "-c", _LAUNCHER, *command]
    done = subprocess.run(launched, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} … failed:\n{done.stderr}")
    return Usage(*(float(figure) for figure in done.stdout.split()))


def measure_in_turns(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[Usage]]:
    """Measure each command `rounds` times, in turns: what else the machine does bears on all of them alike."""
    usages: dict[str, list[Usage]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            usages[name].append(measure(command))
    return usages


def median(usages: Sequence[Usage]) -> Usage:
    """Return the median of each figure."""
    return Usage(*(statistics.median(getattr(one, field.name) for one in usages) for field in fields(Usage)))
