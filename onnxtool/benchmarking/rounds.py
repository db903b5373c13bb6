"""The timing loop: blocks of runs of one model, or of several in turns.

A block is a few runs one right after the other, so that caches, and threads that spin between two operators, are as in
an application that serves one request after another. The run after another model's block does not count.

Successive latencies are correlated, because disturbances last for a while. An interval that assumes independent runs is
too narrow, so intervals are taken over the medians of whole blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.runtime.running import Session, is_nested, is_part
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
    return interval_of_median([float(np.median(part)) for part in (blocks if len(blocks) >= _FEWEST_BLOCKS else runs)])


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


Feeds = Mapping[str, NDArray[Any]]
Call = Callable[[], object]
BlockEnd = Callable[[int, float], bool]  # of the runs of a block so far and the seconds they took

_BLOCKS = 20  # as many as a shape is divided into
_RUNS_OF_BLOCK = 5  # at least, so that the run that does not count is no more than a sixth


@dataclass(frozen=True)
class SessionRunner:
    """A session of onnxruntime."""

    session: Session

    @property
    def load_ms(self) -> float:
        """From the file to the session."""
        return self.session.load_ms

    def prepare(self, feeds: Feeds) -> Callable[[], object]:
        """Return a run on the inputs that the graph has, in its dtypes."""
        return partial(self.session.run_unchecked, self.session.nested(self._own(feeds)))

    def outputs(self, feeds: Feeds) -> Mapping[str, NDArray[Any]]:
        """Run once."""
        return self.session.run(self._own(feeds))

    def _own(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        inputs = self.session.model.structure.inputs
        holders = [info for info in inputs if is_nested(info)]
        parts = {name: array for name, array in feeds.items() for info in holders if is_part(name, info)}
        return parts | {
            info.name: feeds[info.name] if info.dtype == "string" else feeds[info.name].astype(info.dtype, copy=False)
            for info in inputs
            if info.name in feeds and info.name not in parts
        }


@dataclass(frozen=True)
class RoundLimits:
    """Limits of a shape, of which the first that is met stops it. `duration_s` is for each model."""

    runs: float
    duration_s: float


def _block_end(limits: RoundLimits, remaining: RoundLimits) -> BlockEnd:
    """Return what ends the first block of a round: the limits of a shape, and what is left of them."""
    most = min(remaining.runs, max(_RUNS_OF_BLOCK, limits.runs / _BLOCKS))
    usual_s = limits.duration_s / _BLOCKS

    def is_done(runs: int, seconds: float) -> bool:
        return runs >= most or seconds >= remaining.duration_s or (runs >= _RUNS_OF_BLOCK and seconds >= usual_s)

    return is_done


def _after(count: int) -> BlockEnd:
    return lambda runs, _seconds: runs >= count


class InterleavedRuns:
    """Blocks of runs, of one model or of several in turns; each model is a cycle of calls, one per batch of inputs.

    Attributes:
        blocks: the latencies in milliseconds of each block, for each model.
    """

    def __init__(self, models: Sequence[Sequence[Call]]) -> None:
        self.models = models
        self.blocks: list[list[Floats]] = [[] for _ in models]
        self._places = [0 for _ in models]
        self._num_rounds = 0

    def warm_up(self, runs: int) -> None:
        """Run each model `runs` times without counting."""
        for calls in self.models:
            for place in range(runs):
                calls[place % len(calls)]()

    def take(self, limits: RoundLimits) -> None:
        """Take blocks until a limit is met: one of each model per round, in reverse order in every second round.

        So neither gains from its place.
        """
        end = time.perf_counter() + limits.duration_s * len(self.models)
        num_runs = 0
        while True:
            first, *later = range(len(self.models)) if self._num_rounds % 2 == 0 else reversed(range(len(self.models)))
            remaining = RoundLimits(limits.runs - num_runs, max(0.0, end - time.perf_counter()))
            count = self._take_block(first, _block_end(limits, remaining))
            for which in later:  # as many runs, so that all run the same inputs
                self._take_block(which, _after(count))
            self._num_rounds += 1
            num_runs += count
            if num_runs >= limits.runs or time.perf_counter() >= end:
                return

    def _take_block(self, which: int, is_done: BlockEnd) -> int:
        """Take a block of one model, and return how many runs it has."""
        latencies_ns = self._runs(which, is_done)
        self.blocks[which].append(np.asarray(latencies_ns) / 1e6)
        return len(latencies_ns)

    def _runs(self, which: int, is_done: BlockEnd) -> list[int]:
        calls, place, clock = self.models[which], self._places[which], time.perf_counter_ns
        if len(self.models) > 1:  # the next call runs once without counting, and is counted afterwards
            calls[place % len(calls)]()
        latencies_ns: list[int] = []
        begin = end = clock()
        while not latencies_ns or not is_done(len(latencies_ns), (end - begin) / 1e9):
            call = calls[(place + len(latencies_ns)) % len(calls)]
            start = clock()
            outputs = call()
            end = clock()
            latencies_ns.append(end - start)
            # Freed here, not when the next run assigns them: that would be inside its time.
            del outputs
        self._places[which] += len(latencies_ns)
        return latencies_ns
