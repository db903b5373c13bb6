"""Latencies in blocks: statistics with their uncertainty, and warnings about unreliable ones.

Successive latencies are correlated, because disturbances last for a while. An interval that assumes independent runs
is too narrow, so intervals are taken over the medians of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxtool.runtime.timing import interval_of_median

Floats = NDArray[np.float64]

_FEWEST_BLOCKS = 6  # of an interval
_FEWEST_RUNS = ((95, 20), (99, 100))  # with fewer, the percentile is (nearly) the largest value
_MAX_SPREAD = 0.10
_MAX_DRIFT = 0.05
_MAX_HALF_INTERVAL = 0.05
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


def robust_spread(values: Sequence[float] | Floats) -> float:
    """Return 1.4826 * median absolute deviation / median: a coefficient of variation that is robust to outliers."""
    samples = np.asarray(values, dtype=np.float64)
    middle = float(np.median(samples))
    return _NORMAL * float(np.median(np.abs(samples - middle))) / middle if middle else 0.0


def drift(values: Sequence[float] | Floats) -> float:
    """Return the median of the last third divided by the median of the first third, minus 1."""
    third = len(values) // 3
    if not third:
        return 0.0
    return float(np.median(values[-third:]) / np.median(values[:third])) - 1.0


def median_interval(blocks: Sequence[Floats]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median latency.

    It is taken over the medians of the blocks; over single runs if there are few blocks.
    """
    runs = np.concatenate(blocks)
    return interval_of_median([float(np.median(one)) for one in (blocks if len(blocks) >= _FEWEST_BLOCKS else runs)])


def shape_warnings(samples: Floats, p50_interval_ms: tuple[float, float], *, is_repeated: bool) -> Iterator[str]:
    """Yield reasons why the figures of a shape are unreliable, each with its figure.

    Args:
        samples: the latencies of all runs, in order.
        p50_interval_ms: the 95 % confidence interval of their median.
        is_repeated: whether all runs have the same inputs, and so should take the same time.
    """
    short = [f"a p{percent} needs {needed}" for percent, needed in _FEWEST_RUNS if len(samples) < needed]
    if short:
        yield f"{len(samples)} runs are few: {' and '.join(short)}"
    spread, moved = robust_spread(samples), drift(samples)
    if is_repeated and spread > _MAX_SPREAD:
        yield f"the runs spread by {spread:.0%} around their median (1.4826 MAD; quiet machines stay below 5 %)"
    # The median of a third of the runs has its own error.
    error = 1.25 * spread / max(1, len(samples) // 3) ** 0.5
    if is_repeated and abs(moved) > _MAX_DRIFT + 2 * error:
        yield f"the last third of the runs took {moved:+.0%} of the time of the first third"
    low, high = p50_interval_ms
    middle = (low + high) / 2
    if middle and (high - low) / 2 > _MAX_HALF_INTERVAL * middle:
        yield f"the median is known to ±{(high - low) / 2 / middle:.0%} only (95 %: {low:.2f} to {high:.2f} ms)"
