"""Latencies in blocks, and statistics of them with their uncertainty.

Successive latencies are correlated: disturbances last for a while. An interval that takes them for
independent is too narrow, so whole blocks are resampled (moving-block bootstrap, Künsch 1989).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.reports import Json

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]  # of the last axis: float64 [..., N] to float64 [...]

# From this part of the time on, in which threads have no core, latencies are the scheduler's.
MAX_WAITED = 0.03
_REPLICATES = 1000
_MAX_DRAWN = 1 << 20  # values at once: 8 MB
_FEWEST_BLOCKS = 6  # with fewer, runs are drawn in their place
_SEED = 0
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Block:
    """Runs one right after the other.

    Attributes:
        latencies_ms: wall time of each.
        core_ms: what the calling thread spent of it on a core.
        preemptions: how often a thread of this process had to leave its core, in each run.
        waited_ms: how long all threads were ready and had no core, in sum; None where the system does not say.
        kernel_ms: what the reference kernel took before.
        wall_ms: from the first run to the last, with what is between them; 0 where only latencies are known.
    """

    latencies_ms: tuple[float, ...]
    core_ms: tuple[float, ...]
    preemptions: tuple[int, ...]
    waited_ms: float | None
    kernel_ms: float
    wall_ms: float = 0.0


@dataclass(frozen=True)
class TimedShape:
    """The runs of one model on one shape, as a gate sees them.

    Attributes:
        figures: the result in JSON.
    """

    figures: Json
    blocks: tuple[Block, ...]
    waited_share: float | None


def latencies(blocks: Sequence[Block]) -> list[float]:
    """Return the latencies of all blocks in their order, in milliseconds."""
    return [latency for block in blocks for latency in block.latencies_ms]


def waited_share(blocks: Sequence[Block], threads: int) -> float | None:
    """Return the part of the time that a thread was ready and had no core, on average over `threads` of them."""
    waited = [block.waited_ms for block in blocks if block.waited_ms is not None]
    if len(waited) < len(blocks):
        return None
    wall_ms = sum(max(block.wall_ms, sum(block.latencies_ms)) for block in blocks)
    return min(1.0, sum(waited) / (max(1, threads) * wall_ms))


def own_latencies(blocks: Sequence[Block]) -> list[Floats]:
    """Return what runs on one thread took without what others did: the time on a core, of runs that had to leave it.

    A run computes and does not wait, so that is what it takes on a free core. A run without preemption keeps its
    latency.
    """
    return [
        np.where(np.asarray(block.preemptions) > 0, np.asarray(block.core_ms), np.asarray(block.latencies_ms))
        for block in blocks
    ]


def robust_spread(values: Sequence[float] | Floats) -> float:
    """Return 1.4826 * median absolute deviation / median: the coefficient of variation without its outliers."""
    samples = np.asarray(values, dtype=np.float64)
    middle = float(np.median(samples))
    return _NORMAL * float(np.median(np.abs(samples - middle))) / middle if middle else 0.0


def drift(values: Sequence[float]) -> float:
    """Return the median of the last third over that of the first third, less 1."""
    third = len(values) // 3
    if not third:
        return 0.0
    return float(np.median(values[-third:]) / np.median(values[:third])) - 1.0


def replicates(groups: Sequence[Floats], statistic: Statistic, seed: int = _SEED) -> Floats:
    """Return the statistic of a thousand resamples: float64 [1000].

    Args:
        groups: the samples by block; whole blocks are drawn, or single samples where there are few blocks.
        statistic: of all samples together.
        seed: two sets of samples that were taken together take the same one, and are drawn together.
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


def median_interval(blocks: Sequence[Block]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median latency."""
    return interval(
        replicates([np.asarray(block.latencies_ms) for block in blocks], lambda samples: np.median(samples, axis=-1))
    )
