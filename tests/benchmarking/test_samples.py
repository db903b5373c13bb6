"""What is said of latencies follows from them as the textbooks say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from onnxtool.benchmarking.samples import (
    Block,
    drift,
    interval,
    median_interval,
    own_latencies,
    replicates,
    robust_spread,
    waited_share,
)
from onnxtool.runtime.timing import interval_of_median


def _block(*latencies_ms: float, waited_ms: float | None = 0.0) -> Block:
    return Block(latencies_ms, latencies_ms, (0,) * len(latencies_ms), waited_ms, 1.0)


def test_the_spread_of_normal_samples_is_their_coefficient_of_variation() -> None:
    """Outliers do not move it: a hundred times the median in every tenth run."""
    samples = np.random.default_rng(0).normal(100.0, 3.0, 20_000)
    assert robust_spread(samples) == pytest.approx(0.03, rel=0.03)  # the error of a MAD of 20,000 samples is 1 %
    samples[::10] = 10_000.0
    assert robust_spread(samples) < 0.04


def test_the_drift_compares_the_last_third_with_the_first() -> None:
    """By medians; fewer than three runs have no thirds."""
    assert drift([10.0, 10.0, 99.0, 50.0, 50.0, 50.0, 12.0, 12.0, 1.0]) == pytest.approx(0.2)
    assert drift([10.0, 20.0]) == 0.0


@pytest.mark.parametrize("count", [6, 7, 10, 25, 60])
def test_the_interval_of_a_median_has_the_coverage_of_the_binomial(count: int) -> None:
    """At least 95 % lie between the two order statistics, and one place further in, less would."""
    low, high = interval_of_median([float(value) for value in range(count)])
    below = int(low)

    def coverage(k: int) -> float:
        return float(1 - 2 * sum(math.comb(count, i) for i in range(k + 1)) / 2**count)

    assert high == count - 1 - below
    assert coverage(below) >= 0.95 > coverage(below + 1)


def test_too_few_values_give_their_extremes() -> None:
    """Five pairs cannot have an interval of 95 %."""
    assert interval_of_median([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_whole_blocks_are_drawn() -> None:
    """Blocks that differ from each other and not inside give means of blocks, and no others."""
    groups = [np.full(50, float(value)) for value in range(6)]
    drawn = replicates(groups, lambda samples: np.array([float(len(set(row))) for row in samples.tolist()]))
    assert drawn.max() <= 6
    assert {*drawn} <= {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    means = replicates(groups, lambda samples: samples.mean(axis=-1))
    possible = {sum(values) / 6 for values in itertools.combinations_with_replacement(range(6), 6)}
    assert all(any(mean == pytest.approx(value) for value in possible) for mean in means[:50])


def test_an_interval_covers_the_true_median_in_spite_of_bursts() -> None:
    """Blocks are 10 % apart, as on a busy machine: an interval of single runs would be four times too narrow."""
    covered = 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        blocks = [
            _block(*(10.0 * generator.lognormal(0, 0.10) * generator.lognormal(0, 0.02, 10)).tolist())
            for _ in range(20)
        ]
        low, high = median_interval(blocks)
        covered += low <= 10.0 <= high
    assert covered >= 50  # 57 of 60 at 95 %; a percentile bootstrap of 20 blocks covers a little less


def test_the_same_seed_draws_the_same() -> None:
    """Two that were taken in turns are drawn in pairs, so what moves both moves no ratio."""
    groups = [np.array([float(value)]) for value in (1, 5, 9, 2, 8, 4, 7)]
    twice = replicates([2 * group for group in groups], lambda samples: samples.mean(axis=-1), seed=3)
    ratios = twice / replicates(groups, lambda samples: samples.mean(axis=-1), seed=3)
    assert interval(ratios) == pytest.approx((2.0, 2.0))


def test_on_one_thread_what_others_took_is_left_out() -> None:
    """A run that had to leave its core counts with its time on it; one that slept by itself counts whole."""
    block = Block((30.0, 10.0, 25.0), (9.0, 9.5, 5.0), (2, 0, 0), 20.0, 1.0)
    (own,) = own_latencies([block])
    assert own.tolist() == [9.0, 10.0, 25.0]


def test_the_share_of_waiting_is_an_average_over_threads() -> None:
    """Two threads that wait half of the time together wait a quarter each; where it is not known, it is not made up."""
    blocks = [_block(10.0, 10.0, waited_ms=10.0), _block(20.0, waited_ms=10.0)]
    assert waited_share(blocks, threads=2) == pytest.approx(0.25)
    assert waited_share([*blocks, _block(1.0, waited_ms=None)], threads=2) is None
    # A thread also waits between two runs, so the time from the first to the last is what its waiting is a part of.
    assert waited_share([Block((5.0, 5.0), (1.0, 1.0), (0, 0), 30.0, 1.0, wall_ms=40.0)], threads=1) == 0.75
