"""What is said of latencies follows from them as the textbooks say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxtool.benchmarking.rounds import (
    drift,
    median_interval,
    robust_spread,
    shape_warnings,
)
from onnxtool.runtime.timing import interval_of_median


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


def test_an_interval_covers_the_true_median_in_spite_of_bursts() -> None:
    """Blocks are 10 % apart, as on a busy machine: an interval of single runs would be four times too narrow."""
    covered = 0
    for seed in range(60):
        generator = np.random.default_rng(seed)
        blocks = [10.0 * generator.lognormal(0, 0.10) * generator.lognormal(0, 0.02, 10) for _ in range(20)]
        low, high = median_interval(blocks)
        covered += low <= 10.0 <= high
    assert covered >= 53  # 57 of 60 at 95 %


QUIET = 10.0 * np.random.default_rng(0).lognormal(0, 0.02, 200)


@pytest.mark.parametrize(
    ("samples", "half", "is_repeated", "messages"),
    [
        (QUIET, 0.01, True, []),
        (QUIET[:10], 0.01, True, ["10 runs are few: a p95 needs 20 and a p99 needs 100"]),
        (QUIET[:50], 0.01, True, ["50 runs are few: a p99 needs 100"]),
        (QUIET**8, 0.01, True, ["the runs spread by 16% around their median"]),
        (QUIET * np.repeat([1.0, 1.2], 100), 0.01, True, ["took +20% of the time of the first third"]),
        (QUIET, 0.08, True, ["the median is known to ±8% only (95 %: 9."]),
        # batches of texts that differ take different times on the quietest machine
        (np.tile([1.0, 5.0, 20.0, 90.0], 50), 0.01, False, []),
    ],
)
def test_what_speaks_against_a_measurement_is_said(
    samples: NDArray[np.float64], half: float, is_repeated: bool, messages: list[str]
) -> None:
    """With the figure."""
    middle = float(np.median(samples))
    warnings = list(shape_warnings(samples, (middle * (1 - half), middle * (1 + half)), is_repeated=is_repeated))
    assert all(any(message in warning for warning in warnings) for message in messages), warnings
    assert bool(warnings) == bool(messages)
