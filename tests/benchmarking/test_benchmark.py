"""A benchmark measures what it says, on the shapes that were asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import onnxtool.benchmarking.options as options_module
from onnxtool import BenchmarkOptions, benchmark
from onnxtool.errors import InputError, OptionError, ProviderError
from onnxtool.progress import listening
from onnxtool.runtime.machine import available_cores
from onnxtool.runtime.providers import cuda_problem
from onnxtool.runtime.running import Session
from tests.infer.tiny_models import TinyModel, table, write_checkpoint

SMALL = BenchmarkOptions(batch_sizes=(2,), sequence_lengths=(5,), runs=3, warmup=0, provider="cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return TinyModel(table(15, 4), "logits", positions=32).write(tmp_path / "model.onnx")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shape of the ids of every run."""
    shapes: list[tuple[int, ...]] = []
    run = Session.run_unchecked

    def watched(session: Session, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        shapes.append(feeds["input_ids"].shape)
        return run(session, feeds)

    monkeypatch.setattr(Session, "run_unchecked", watched)
    return shapes


def _slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    run = Session.run_unchecked

    def delayed(session: Session, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        time.sleep(seconds)
        return run(session, feeds)

    monkeypatch.setattr(Session, "run_unchecked", delayed)


def test_every_shape_of_the_grid_runs_as_often_as_asked(path: Path, calls: list[tuple[int, ...]]) -> None:
    """Once first of all, then warm-up and the runs that count, shape by shape."""
    options = BenchmarkOptions(batch_sizes=(1, 3), sequence_lengths=(4, 7), runs=2, warmup=1, provider="cpu")
    stages: list[str] = []
    with listening(stages.append):
        report = benchmark(path, options)
    assert calls == [(1, 4)] * 4 + [(1, 7)] * 3 + [(3, 4)] * 3 + [(3, 7)] * 3
    assert [(r.batch_size, r.sequence_length, r.runs) for r in report.results] == [
        (1, 4, 2),
        (1, 7, 2),
        (3, 4, 2),
        (3, 7, 2),
    ]
    assert stages[1:] == [
        f"timing shape {number} of 4: {shape}" for number, shape in enumerate(("1 x 4", "1 x 7", "3 x 4", "3 x 7"), 1)
    ]


def test_the_report_says_what_ran(path: Path) -> None:
    """Provider, threads, load, first run and memory are figures of this process."""
    report = benchmark(path, SMALL)
    assert (report.model, report.provider, report.warmup) == (str(path), "cpu", 0)
    assert report.threads >= 1
    assert 0 < report.first_run_ms < 1e4
    assert 0 < report.load_ms < 1e4
    assert 1e7 < report.peak_rss_bytes < 1e11


def test_latencies_are_wall_time_and_throughput_follows_from_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that takes 20 ms is measured as that, and gives 2 samples of 5 tokens in it."""
    _slow(monkeypatch, 0.02)
    (result,) = benchmark(path, SMALL).results
    # A sleep never ends early; how late it ends is up to the machine.
    assert 20 <= result.latency_ms.min <= result.latency_ms.mean < 2000
    assert result.throughput_samples_per_s == pytest.approx(2 * 1000 / result.latency_ms.mean)
    assert result.throughput_tokens_per_s == pytest.approx(5 * result.throughput_samples_per_s)


@pytest.mark.parametrize(
    ("runs", "duration_s", "counted"),
    [(None, 0.05, range(1, 6)), (2, 60.0, range(2, 3)), (10**6, 0.05, range(1, 6)), (1, None, range(1, 2))],
)
def test_the_first_limit_that_is_met_stops_a_shape(
    path: Path, monkeypatch: pytest.MonkeyPatch, runs: int | None, duration_s: float | None, counted: range
) -> None:
    """Runs of 20 ms end after as many as were asked for, or in the run in which the time is up."""
    _slow(monkeypatch, 0.02)
    options = BenchmarkOptions((1,), (4,), runs=runs, duration_s=duration_s, warmup=0, provider="cpu")
    (result,) = benchmark(path, options).results
    assert result.runs in counted


def test_without_limits_the_defaults_stop_a_shape(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred runs or five seconds; here they are made smaller."""
    assert BenchmarkOptions().stop_after == (100, 5.0)
    monkeypatch.setattr(options_module, "DEFAULT_RUNS", 4)
    (result,) = benchmark(path, BenchmarkOptions((1,), (4,), provider="cpu")).results
    assert result.runs == 4


def test_a_length_beyond_the_position_table_is_refused(path: Path, calls: list[tuple[int, ...]]) -> None:
    """Before anything is timed, with the limit and where it comes from."""
    options = BenchmarkOptions(sequence_lengths=(16, 33), runs=1)
    reason = r"at most 32 tokens \(the rows of position_embeddings\.weight\); 33 were"
    with pytest.raises(InputError, match=reason) as refusal:
        benchmark(path, options)
    assert refusal.value.hint == "leave that length out of --sequence_length"
    assert calls == []


def test_a_length_at_the_limit_runs(path: Path) -> None:
    """The limit is the last length that works."""
    benchmark(path, BenchmarkOptions((1,), (32,), runs=1, warmup=0, provider="cpu"))


def test_the_limit_knows_rows_that_no_token_uses(path: Path) -> None:
    """RoBERTa's table has two rows more than a text may have tokens; its config.json says that it is one."""
    write_checkpoint(path.with_suffix(""), config={"model_type": "roberta", "pad_token_id": 1})
    with pytest.raises(InputError, match="at most 30 tokens"):
        benchmark(path, BenchmarkOptions(sequence_lengths=(31,), runs=1))


@pytest.mark.parametrize(("batch_size", "length"), [(3, 5), (2, 6)])
def test_a_fixed_graph_is_not_timed_as_another_shape(tmp_path: Path, batch_size: int, length: int) -> None:
    """Its own shape would run, and its throughput would be reported for the one that was asked for."""
    path = TinyModel(table(15, 4), "logits", fixed=(2, 5), inputs=("input_ids",)).write(tmp_path / "model.onnx")
    assert benchmark(path, SMALL).results[0].runs == 3
    with pytest.raises(InputError, match="fixed to|at most 5 tokens"):
        benchmark(path, BenchmarkOptions((batch_size,), (length,), runs=1))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (1, 0)}, "batch_sizes"),
        ({"sequence_lengths": (-1,)}, "sequence_lengths"),
        ({"runs": 0}, "runs"),
        ({"duration_s": 0.0}, "duration_s"),
        ({"warmup": -1}, "warmup"),
        ({"threads": 100_000}, "threads"),
        ({"batch_sizes": (10**6,)}, "batch_sizes"),
        ({"sequence_lengths": (10**9,)}, "sequence_lengths"),
        ({"batch_sizes": (65_536,), "sequence_lengths": (65_536,)}, "batches of 4294967296 tokens"),
        ({"batch_sizes": (1, 4, 1)}, "batch_sizes has 1 more than once"),
        ({"runs": 10**9}, "runs"),
        ({"duration_s": float("inf")}, "duration_s"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], name: str) -> None:
    """By name, with their value."""
    with pytest.raises(OptionError, match=name):
        BenchmarkOptions(**options)


def test_the_same_seed_gives_the_same_inputs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two models, or two versions of one, are timed on the same."""
    seen: list[list[int]] = []

    def record(session: Session, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        seen.append(feeds["input_ids"].ravel().tolist())
        return []

    monkeypatch.setattr(Session, "run_unchecked", record)
    for seed in (1, 1, 2):
        benchmark(path, BenchmarkOptions((4,), (9,), runs=1, warmup=0, provider="cpu", seed=seed))
    first, again, other = seen[::2]
    assert first == again != other
    assert set(first) <= set(range(15))


@pytest.mark.skipif(not cuda_problem(), reason="CUDA runs here")
def test_a_benchmark_on_cuda_never_runs_elsewhere(path: Path) -> None:
    """A figure of the CPU must not be read as one of the GPU."""
    with pytest.raises(ProviderError, match="cuda cannot run here: "):
        benchmark(path, BenchmarkOptions((1,), (4,), runs=1, provider="cuda"))
    assert benchmark(path, BenchmarkOptions((1,), (4,), runs=1)).provider == "cpu"


def test_raw_values_and_their_circumstances_are_in_the_report(path: Path) -> None:
    """Every run; too few runs, and too many threads, are not to be trusted."""
    report = benchmark(path, BenchmarkOptions((1,), (4,), runs=33, provider="cpu", threads=available_cores() + 1))
    (result,) = report.results
    assert (result.runs, len(result.latencies_ms)) == (33, 33)
    assert np.percentile(result.latencies_ms, 90) == pytest.approx(result.latency_ms.p90)
    low, high = result.p50_interval_ms
    assert low <= result.latency_ms.p50 <= high
    assert report.environment.cpu
    assert report.environment.versions["numpy"] == np.__version__
    assert (report.trusted, result.trusted) == (False, False)
    assert "33 runs are few: a p99 needs 100" in result.warnings
    assert f"threads on {available_cores()} cores wait for each other" in report.warnings[0]
