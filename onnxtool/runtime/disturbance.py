"""What other processes take from this one while it runs, by the system's own accounts.

A latency on a machine with other work is mostly that of its scheduler. Linux says how long each thread was ready and
had no core (`schedstat`, Documentation/scheduler/sched-stats.rst), and every Unix how often one was made to leave it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_THREADS = Path("/proc/self/task")
_CONTROL_GROUP = Path("/sys/fs/cgroup/cpu.stat")
_PROCESSORS = Path("/sys/devices/system/cpu")


def _preemptions() -> Callable[[], int]:
    if sys.platform == "win32":  # has no such account
        return lambda: 0
    import resource

    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


# How often threads of this process were made to leave their cores so far; always 0 on Windows.
count_preemptions = _preemptions()


@contextmanager
def waiting_clock() -> Iterator[Callable[[], int] | None]:
    """Give a function that says how long the present threads were ready without a core so far, in nanoseconds in sum.

    None where the system does not say. Threads that start later are not in it.
    """
    with ExitStack() as stack:
        try:
            files = [stack.enter_context((thread / "schedstat").open("rb", buffering=0)) for thread in _threads()]
        except OSError:
            yield None
            return
        yield lambda: sum(_waited_ns(file.fileno()) for file in files)


def _threads() -> list[Path]:
    return sorted(_THREADS.iterdir())


def _waited_ns(descriptor: int) -> int:
    try:
        return int(os.pread(descriptor, 64, 0).split()[1])
    except OSError:  # the thread is gone
        return 0


def load_average() -> float | None:
    """Return the runnable threads of the machine, averaged over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def throttlings() -> dict[str, int]:
    """Return how often this machine slowed its processors down so far, by the reason; empty where it does not say.

    `quota`: the container had used up its share of processor time. `heat`: a core was too hot.
    """
    counts = {}
    try:
        lines = dict(line.split() for line in _CONTROL_GROUP.read_text(encoding="ascii").splitlines())
        counts["quota"] = int(lines["nr_throttled"])
    except (OSError, KeyError, ValueError):
        pass
    heat = [_number(path) for path in _PROCESSORS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")]
    if heat:
        counts["heat"] = sum(heat)
    return counts


def clock_share() -> float | None:
    """Return the cores' mean frequency over their highest one; None where the system does not say."""
    shares = []
    for folder in _PROCESSORS.glob("cpu[0-9]*/cpufreq"):
        present, highest = _number(folder / "scaling_cur_freq"), _number(folder / "cpuinfo_max_freq")
        if present and highest:
            shares.append(present / highest)
    return sum(shares) / len(shares) if shares else None


def stolen_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the part of the processors' time that the host gave to other machines, between two `processor_times`."""
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else 0.0


def processor_times() -> tuple[int, int]:
    """Return the ticks that the host took from this machine, and all ticks; zeros where they are not known."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return 0, 0
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
