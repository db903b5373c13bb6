"""Latencies in blocks: statistics with their uncertainty, and warnings about unreliable ones.

Successive latencies are correlated, because disturbances last for a while. An interval that assumes independence is too
narrow, so whole blocks are resampled (moving-block bootstrap, Künsch 1989).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.reports import Json

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]  # of the last axis: float64 [..., N] to float64 [...]

_REPLICATES = 1000
_MAX_DRAWN = 1 << 20  # values at once: 8 MB
_FEWEST_BLOCKS = 6  # with fewer, single runs are drawn instead
_SEED = 0
_FEWEST_RUNS = ((95, 20), (99, 100))  # with fewer, the percentile is (nearly) the largest value
_MAX_SPREAD = 0.10
_MAX_DRIFT = 0.05
_MAX_HALF_INTERVAL = 0.05
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class TimedShape:
    """The runs of one model on one shape, as a gate sees them.

    Attributes:
        figures: the result in JSON.
        blocks: latencies in milliseconds of runs one right after the other.
    """

    figures: Json
    blocks: tuple[Floats, ...]


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


def replicates(groups: Sequence[Floats], statistic: Statistic, seed: int = _SEED) -> Floats:
    """Return the statistic of a thousand resamples: float64 [1000].

    Args:
        groups: the samples by block; whole blocks are drawn, or single samples if there are few blocks.
        statistic: the statistic of all samples together.
        seed: samples that were taken together use the same seed, so that they are drawn together.
    """
    units = list(groups)
    if len(units) < _FEWEST_BLOCKS:
        units = list(np.concatenate(units).reshape(-1, 1))
    drawn = np.random.default_rng(seed).integers(0, len(units), (_REPLICATES, len(units)))
    if len({unit.size for unit in units}) > 1:
        return np.array([statistic(np.concatenate([units[place] for place in places])) for places in drawn])
    stacked = np.stack(units)
    parts = np.array_split(drawn, min(_REPLICATES, -(-_REPLICATES * stacked.size // _MAX_DRAWN)))
    return np.concatenate([statistic(stacked[part].reshape(len(part), -1)) for part in parts])


def interval(values: Floats) -> tuple[float, float]:
    """Return the middle 95 % of the replicates."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def median_interval(blocks: Sequence[Floats]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median latency."""
    return interval(replicates(blocks, lambda samples: np.median(samples, axis=-1)))


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
