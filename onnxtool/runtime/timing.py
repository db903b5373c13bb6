"""Latencies and memory of this process."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Limit and usage of a container's memory, by versions 2 and 1 of control groups.
_CONTROL_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class LatencySummary:
    """Latencies in milliseconds; percentiles interpolate linearly between the sorted samples."""

    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    mean: float
    stdev: float


def summarize_latencies(samples_ms: Sequence[float]) -> LatencySummary:
    """Summarize latencies in milliseconds; there must be at least one. The deviation is the population's."""
    import numpy as np

    samples = np.asarray(samples_ms, dtype=np.float64)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(samples, [50, 90, 95, 99]))
    return LatencySummary(
        min=float(samples.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(samples.max()),
        mean=float(samples.mean()),
        stdev=float(samples.std()),
    )


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of independent values, whatever their distribution.

    The k-th smallest and the k-th largest, with k from the binomial distribution (Conover, Practical Nonparametric
    Statistics, 3.2). Below six values there is none, and the extremes are returned.
    """
    ordered, count = sorted(values), len(values)
    weight, below, k = 0.5**count, 0.5**count, 0
    while below <= 0.025:
        k += 1
        weight *= (count - k + 1) / k
        below += weight
    place = max(0, k - 1)
    return ordered[place], ordered[count - 1 - place]


class Stopwatch:
    """Wall time by stage, in milliseconds; laps with the same name add up."""

    def __init__(self) -> None:
        self.laps_ms: dict[str, float] = {}
        self._start = time.perf_counter()

    def lap(self, name: str) -> None:
        """Record the time since the last lap under `name`."""
        now = time.perf_counter()
        self.laps_ms[name] = self.laps_ms.get(name, 0.0) + (now - self._start) * 1e3
        self._start = now


def peak_rss_bytes() -> int:
    """Return the peak resident set of this process in bytes; 0 if the system does not report it."""
    try:
        # after exec on Linux, getrusage starts with the parent's peak.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _peak_by_getrusage()
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else _peak_by_getrusage()


def reset_peak_rss() -> bool:
    """Reset `peak_rss_bytes` to the current resident set; return whether the system supports that (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5)
    except OSError:
        return False
    return True


def available_memory_bytes() -> int | None:
    """Return the memory still available to this process, by the system and its control group; None if unknown."""
    kilobytes = _number_in("/proc/meminfo", r"^MemAvailable:\s*(\d+) kB$")
    bounds = [] if kilobytes is None else [kilobytes * 1024]
    for limit_file, usage_file in _CONTROL_GROUPS:
        limit, usage = (_number_in(f"/sys/fs/cgroup/{name}", r"^(\d+)$") for name in (limit_file, usage_file))
        bounds += [] if limit is None or usage is None else [max(0, limit - usage)]
    return min(bounds, default=None)


def _number_in(path: str, pattern: str) -> int | None:
    """Return the number matched by a pattern in a system file; None if there is none."""
    try:
        found = re.search(pattern, Path(path).read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


def _peak_by_getrusage() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such module
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
