"""A benchmark says when it is not to be trusted, with the figure that speaks against it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxtool.benchmarking.reliability as reliability
from onnxtool.benchmarking import BenchmarkOptions, benchmark
from onnxtool.benchmarking.reliability import MachineWatch, shape_warnings
from onnxtool.benchmarking.samples import Block
from tests.infer.tiny_models import TinyModel, table


def _blocks(samples: np.ndarray, *, waited_share: float = 0.0, kernel_ms: np.ndarray | None = None) -> list[Block]:
    kernels = np.ones(len(samples) // 10) if kernel_ms is None else kernel_ms
    return [
        Block(tuple(part), tuple(0.5 * part), (1,) * 10, waited_share * part.sum(), float(kernel))
        for part, kernel in zip(samples.reshape(-1, 10), kernels, strict=True)
    ]


def _warnings(blocks: list[Block], *, threads: int = 1, repeats: bool = True, half: float = 0.01) -> list[str]:
    middle = float(np.median([latency for block in blocks for latency in block.latencies_ms]))
    interval = (middle * (1 - half), middle * (1 + half))
    return list(shape_warnings(blocks, threads, interval, is_repeated=repeats))


QUIET = 10.0 * np.random.default_rng(0).lognormal(0, 0.02, 200)


def test_a_quiet_measurement_is_trusted() -> None:
    """Two percent of spread, no drift, two hundred runs."""
    assert _warnings(_blocks(QUIET)) == []


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        (_blocks(QUIET[:10]), {}, "10 runs are few: a p95 needs 20 and a p99 needs 100"),
        (_blocks(QUIET[:50]), {}, "50 runs are few: a p99 needs 100"),
        (_blocks(QUIET**4), {"half": 0.01}, "the runs spread by 8%"),
        (_blocks(QUIET * np.repeat([1.0, 1.2], 100)), {}, "took +20% of the time of the first third"),
        (_blocks(QUIET), {"half": 0.08}, "the median is known to ±8% only (95 %: 9."),
        (_blocks(QUIET, waited_share=0.25), {}, "waited for a core 25% of the time"),
        (_blocks(QUIET, waited_share=0.25), {}, "without that the median is 5.0"),
        (
            _blocks(QUIET, kernel_ms=np.repeat([1.0, 1.3], 10)),
            {},
            "the machine itself changed its speed: a fixed piece of arithmetic took +30%",
        ),
    ],
)
def test_what_speaks_against_a_measurement_is_said(
    blocks: list[Block], options: dict[str, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the figure."""
    monkeypatch.setattr(reliability, "_MAX_SPREAD", 0.05)
    assert any(message in warning for warning in _warnings(blocks, **options)), _warnings(blocks, **options)  # type: ignore[arg-type]


def test_texts_of_different_lengths_are_no_spread() -> None:
    """Batches that differ take different times on the quietest machine."""
    samples = np.tile([1.0, 5.0, 20.0, 90.0], 50)
    assert _warnings(_blocks(samples), repeats=False) == []


def test_on_several_threads_nobody_knows_the_median_of_a_free_machine() -> None:
    """So none is given."""
    (warning,) = _warnings(_blocks(QUIET, waited_share=0.5), threads=2)
    assert "25% of the time" in warning
    assert "median" not in warning


def test_what_happens_to_the_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Throttling by heat and by a container's quota, a slow clock, a host that takes time, more threads than cores."""
    counts = iter([{"quota": 5, "heat": 1}, {"quota": 9, "heat": 1}])
    times = iter([(0, 1000), (50, 2000)])
    monkeypatch.setattr(reliability, "throttlings", lambda: next(counts))
    monkeypatch.setattr(reliability, "processor_times", lambda: next(times))
    monkeypatch.setattr(reliability, "clock_share", lambda: 0.6)
    assert list(MachineWatch().warnings(threads=8, cores=2)) == [
        "processors were slowed down 4 times meanwhile (quota)",
        "the processors run at 60% of their highest clock",
        "the host of this virtual machine took 5% of its processors' time",
        "8 threads on 2 cores wait for each other",
    ]


def test_a_report_is_trusted_where_all_of_it_is(tmp_path: Path) -> None:
    """Three runs are too few for percentiles, and the report and the shape say so."""
    path = TinyModel(table(15, 4), "logits").write(tmp_path / "model.onnx")
    report = benchmark(path, BenchmarkOptions((1,), (4,), runs=3, provider="cpu"))
    (result,) = report.results
    assert (report.trusted, result.trusted) == (False, False)
    assert "3 runs are few: a p95 needs 20 and a p99 needs 100" in result.warnings


def test_raw_values_and_their_circumstances_are_in_the_report(tmp_path: Path) -> None:
    """Every run with its place in a block, as a baseline needs them."""
    path = TinyModel(table(15, 4), "logits").write(tmp_path / "model.onnx")
    report = benchmark(path, BenchmarkOptions((1,), (4,), runs=33, provider="cpu", threads=1))
    (result,) = report.results
    assert result.runs == len(result.latencies_ms) == len(result.core_ms) == len(result.preemptions) == 33
    assert sum(result.block_sizes) == 33
    assert len(result.kernel_ms) == len(result.block_sizes) == 7  # of five runs, and three left
    assert np.percentile(result.latencies_ms, 90) == pytest.approx(result.latency_ms.p90)
    low, high = result.p50_interval_ms
    assert low <= result.latency_ms.p50 <= high
    assert report.environment.cpu
    assert report.environment.versions["numpy"] == np.__version__
    assert report.identity.inputs["input_ids"] == "int64 [?, ?]"
