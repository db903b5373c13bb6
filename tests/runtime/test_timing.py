"""Latencies are summed up as the field does it, and memory is that of this process."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxtool.runtime.timing import summarize_latencies


def _percentile(samples: list[float], percent: float) -> float:
    """Interpolate linearly between the two nearest of the sorted samples (Hyndman and Fan, 1996, definition 7)."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@pytest.mark.parametrize("count", [1, 2, 3, 100, 999])
def test_figures_are_those_of_their_definitions(count: int) -> None:
    """By Python's own statistics, whatever the order of the samples."""
    samples = [random.Random(count + index).expovariate(0.1) for index in range(count)]  # noqa: S311 - no secret
    summary = summarize_latencies(samples)
    for percent in (50, 90, 95, 99):
        assert getattr(summary, f"p{percent}") == pytest.approx(_percentile(samples, percent))
    assert (summary.min, summary.max) == (min(samples), max(samples))
    assert summary.mean == pytest.approx(statistics.fmean(samples))
    assert summary.stdev == pytest.approx(statistics.pstdev(samples))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not say")
def test_the_peak_of_memory_is_that_of_this_process() -> None:
    """In bytes, a block that was touched and freed included; a large parent's memory is not in it."""
    parent = np.ones(40_000_000)  # 320 MB, which a child's getrusage begins with on Linux
    script = """
import numpy as np
from onnxtool.runtime.machine import peak_rss_bytes
before = peak_rss_bytes()
np.ones(12_500_000)
print(before, peak_rss_bytes())
"""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    before, after = (int(figure) for figure in run.stdout.split())
    assert after - before > 80e6  # 100 MB, less what was free in the heap
    assert after < parent.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can forget a peak")
def test_the_peak_of_memory_starts_anew() -> None:
    """So that loading and running have a peak each."""
    script = """
import numpy as np
from onnxtool.runtime.machine import peak_rss_bytes, reset_peak_rss
np.ones(12_500_000)
high = peak_rss_bytes()
print(reset_peak_rss(), high - peak_rss_bytes())
"""
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    done, difference = run.stdout.split()
    assert done == "True"
    assert int(difference) > 80e6  # of 100 MB, less what the heap keeps
