"""How long a model takes: what `infer --benchmark` found out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatencySummary:
    """Latencies in milliseconds; percentiles interpolate linearly between the sorted samples."""

    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    mean: float
    stdev: float


@dataclass(frozen=True)
class BenchmarkResult:
    """Timing of one shape."""

    batch_size: int
    sequence_length: int
    runs: int
    latency_ms: LatencySummary
    throughput_samples_per_s: float
    throughput_tokens_per_s: float


@dataclass(frozen=True)
class BenchmarkReport:
    """How fast a model runs here.

    Attributes:
        threads: intra-op threads of the session.
        load_ms: from the file to a session that can run.
        first_run_ms: the first run of the session, before any warm-up.
        peak_rss_bytes: the largest resident set of this process so far.
        warmup: runs of each shape that were not counted.
    """

    model: str
    provider: str
    threads: int
    load_ms: float
    first_run_ms: float
    peak_rss_bytes: int
    warmup: int
    results: tuple[BenchmarkResult, ...]
