"""Time a model on random inputs over a grid of batch sizes and sequence lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.reports import BenchmarkReport, BenchmarkResult
from onnxtool.runtime.feeds import FeedShape, index_bounds, random_feeds
from onnxtool.runtime.session import Session, open_session
from onnxtool.runtime.timing import peak_rss_bytes, summarize_latencies
from onnxtool.texts.checkpoint_folder import CheckpointFolder, find_checkpoint_folder
from onnxtool.texts.limits import graph_limit

# What stops a shape where the caller names neither: enough runs for a p95, or as long as one likes to wait.
DEFAULT_RUNS, DEFAULT_DURATION_S = 100, 5.0


@dataclass(frozen=True)
class BenchmarkOptions:
    """What to time, and for how long.

    Attributes:
        runs: stop a shape after so many runs.
        duration_s: stop a shape after so many seconds. The first of the two that is met stops it; where both are
            None, DEFAULT_RUNS and DEFAULT_DURATION_S do.
        warmup: runs of each shape that are not counted.
        threads: intra-op threads; 0 for one a core.
        seed: of the random inputs.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    sequence_lengths: tuple[int, ...] = (16, 128)
    runs: int | None = None
    duration_s: float | None = None
    warmup: int = 3
    provider: str = "auto"
    threads: int = 0
    seed: int = 0

    @property
    def stop_after(self) -> tuple[float, float]:
        """Runs and seconds after which a shape is done."""
        if self.runs is None and self.duration_s is None:
            return DEFAULT_RUNS, DEFAULT_DURATION_S
        never = float("inf")
        return never if self.runs is None else self.runs, never if self.duration_s is None else self.duration_s


def benchmark(
    model_path: Path,
    options: BenchmarkOptions | None = None,
    *,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> BenchmarkReport:
    """Time the model at `model_path` on every shape of the grid, in one session.

    Throughput is what the mean latency gives. Latencies are those of onnxruntime's own call: tokenization, and
    anything done with the outputs, are not in them.

    Raises:
        InputError: an option makes no sense, or a shape is longer than the model takes.
        ModelFileError: the file or its external data cannot be used.
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load or run the model.
    """
    options = options or BenchmarkOptions()
    _check_options(options)
    model = ModelFile.open(model_path)
    _check_lengths(model, options)
    shapes = [FeedShape.full(size, length) for size in options.batch_sizes for length in options.sequence_lengths]
    bounds = index_bounds(model)
    on_progress(f"loading {model_path}")
    session = open_session(model_path, provider=options.provider, threads=options.threads)
    first_run_ms: float | None = None
    results = []
    for shape in shapes:
        on_progress(f"timing {shape.description}")
        feeds = random_feeds(model.structure.inputs, shape, bounds, seed=options.seed)
        if first_run_ms is None:
            first_run_ms = _time_runs(session, feeds, runs=1)[0]
        results.append(_time_shape(session, shape, feeds, options))
    return BenchmarkReport(
        model=str(model_path),
        provider=session.provider,
        threads=session.threads,
        load_ms=session.load_ms,
        first_run_ms=first_run_ms or 0.0,
        peak_rss_bytes=peak_rss_bytes(),
        warmup=options.warmup,
        results=tuple(results),
    )


def _check_options(options: BenchmarkOptions) -> None:
    runs, duration_s = options.stop_after
    figures = (
        ("batch_sizes", min(options.batch_sizes, default=0) > 0, options.batch_sizes),
        ("sequence_lengths", min(options.sequence_lengths, default=0) > 0, options.sequence_lengths),
        ("runs", runs > 0, options.runs),
        ("duration_s", duration_s > 0, options.duration_s),
        ("warmup", options.warmup >= 0, options.warmup),
    )
    for name, is_valid, value in figures:
        if not is_valid:
            raise InputError(f"cannot time with {name} {value}", "pass positive numbers; only warmup may be 0")


def _check_lengths(model: ModelFile, options: BenchmarkOptions) -> None:
    limit = graph_limit(model, _folder_of(model))
    longest = max(options.sequence_lengths)
    if limit is not None and longest > limit.tokens:
        raise InputError(
            f"{model.path} takes at most {limit.tokens} tokens ({limit.source}); {longest} were asked for",
            "leave that length out of --sequence_length",
        )


def _folder_of(model: ModelFile) -> CheckpointFolder | None:
    """Return the checkpoint's folder where it is there; random inputs need no tokenizer."""
    try:
        return find_checkpoint_folder(model)
    except InputError:
        return None


def _time_shape(
    session: Session, shape: FeedShape, feeds: Mapping[str, NDArray[Any]], options: BenchmarkOptions
) -> BenchmarkResult:
    for _ in range(options.warmup):
        session.run_unchecked(feeds)
    runs, duration_s = options.stop_after
    latencies_ms = _time_runs(session, feeds, runs=runs, duration_s=duration_s)
    summary = summarize_latencies(latencies_ms)
    samples_per_s = shape.batch_size / (summary.mean / 1e3)
    return BenchmarkResult(
        batch_size=shape.batch_size,
        sequence_length=shape.sequence_length,
        runs=len(latencies_ms),
        latency_ms=summary,
        throughput_samples_per_s=samples_per_s,
        throughput_tokens_per_s=samples_per_s * shape.sequence_length,
    )


def _time_runs(
    session: Session, feeds: Mapping[str, NDArray[Any]], *, runs: float, duration_s: float = float("inf")
) -> list[float]:
    """Run until either limit is met, at least once, and return the latency of each run in milliseconds."""
    run, clock = session.run_unchecked, time.perf_counter_ns
    latencies_ns: list[int] = []
    end = clock() + duration_s * 1e9
    while True:
        start = clock()
        outputs = run(feeds)
        latencies_ns.append(clock() - start)
        # Freed here, not when the next run assigns them: that would be inside its time.
        del outputs
        if len(latencies_ns) >= runs or clock() >= end:
            return [latency / 1e6 for latency in latencies_ns]
