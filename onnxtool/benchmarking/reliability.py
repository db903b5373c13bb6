"""What makes a measurement unreliable, each with its figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from onnxtool.benchmarking.samples import (
    MAX_WAITED,
    Block,
    drift,
    latencies,
    own_latencies,
    robust_spread,
    waited_share,
)
from onnxtool.runtime.disturbance import clock_share, load_average, processor_times, stolen_share, throttlings

_MAX_SPREAD = 0.10
_MAX_DRIFT = 0.05
_MAX_KERNEL_DRIFT = 0.10
_MAX_HALF_INTERVAL = 0.05
_MAX_STOLEN = 0.02
_LOWEST_CLOCK = 0.8
# Below these the percentile is the largest value, or nearly so.
_FEWEST_RUNS = ((95, 20), (99, 100))


def shape_warnings(
    blocks: Sequence[Block], threads: int, p50_interval_ms: tuple[float, float], *, is_repeated: bool
) -> Iterator[str]:
    """Yield what makes the figures of a shape unreliable.

    Args:
        blocks: the runs.
        threads: that computed on the host; 0 for a device.
        p50_interval_ms: the 95 % confidence interval of the median.
        is_repeated: whether all runs are on the same inputs, so that they should take the same time.
    """
    samples = latencies(blocks)
    short = [f"a p{percent} needs {needed}" for percent, needed in _FEWEST_RUNS if len(samples) < needed]
    if short:
        yield f"{len(samples)} runs are few: {' and '.join(short)}"
    waited = waited_share(blocks, threads)
    if waited is not None and waited > MAX_WAITED:
        # Spread, drift and interval are then those of the scheduler, and say nothing more.
        free = _free(blocks, threads)
        yield f"threads of this process waited for a core {waited:.0%} of the time, as others use it{free}"
    else:
        yield from _scatter(samples) if is_repeated else ()
        low, high = p50_interval_ms
        middle = (low + high) / 2
        if middle and (high - low) / 2 > _MAX_HALF_INTERVAL * middle:
            yield f"the median is known to ±{(high - low) / 2 / middle:.0%} only (95 %: {low:.2f} to {high:.2f} ms)"
    moved = drift([block.kernel_ms for block in blocks])
    if abs(moved) > _MAX_KERNEL_DRIFT:
        yield f"the machine itself changed its speed: a fixed piece of arithmetic took {moved:+.0%} at the end"


def _scatter(samples: Sequence[float]) -> Iterator[str]:
    spread, moved = robust_spread(samples), drift(samples)
    if spread > _MAX_SPREAD:
        yield f"the runs spread by {spread:.0%} around their median (1.4826 MAD; quiet machines stay below 5 %)"
    # The median of a third of the runs has an error of its own.
    error = 1.25 * spread / max(1, len(samples) // 3) ** 0.5
    if abs(moved) > _MAX_DRIFT + 2 * error:
        yield f"the last third of the runs took {moved:+.0%} of the time of the first third"


def _free(blocks: Sequence[Block], threads: int) -> str:
    """Tell the median on a free core, where that is known: on one thread."""
    if threads != 1:
        return ""
    median = statistics.median(latency for samples in own_latencies(blocks) for latency in samples)
    return f"; without that the median is {median:.2f} ms"


class MachineWatch:
    """What happens to the machine from now on."""

    def __init__(self) -> None:
        self.load_before = load_average()
        self._times, self._throttlings = processor_times(), throttlings()

    def warnings(self, threads: int, cores: int) -> Iterator[str]:
        """Yield what happened to the machine meanwhile that makes figures unreliable."""
        for reason, count in throttlings().items():
            more = count - self._throttlings.get(reason, 0)
            if more > 0:
                yield f"processors were slowed down {more} times meanwhile ({reason})"
        share = clock_share()
        if share is not None and share < _LOWEST_CLOCK:
            yield f"the processors run at {share:.0%} of their highest clock"
        stolen = stolen_share(self._times, processor_times())
        if stolen > _MAX_STOLEN:
            yield f"the host of this virtual machine took {stolen:.0%} of its processors' time"
        if threads > cores:
            yield f"{threads} threads on {cores} cores wait for each other"
