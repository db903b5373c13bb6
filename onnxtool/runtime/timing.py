"""Latencies, their summary, and wall time by stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass


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
