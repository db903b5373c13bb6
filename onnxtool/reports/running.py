"""What `infer` found out: answers for texts, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scored:
    """A term, label or candidate and its score."""

    label: str
    score: float


@dataclass(frozen=True)
class TextAnswer:
    """What the model says about one text.

    Attributes:
        num_tokens: tokens the model read, special ones included.
        truncated: whether the text was longer than the model takes.
        candidates: highest score first, but in the order of the text for labels of tokens; empty for embeddings.
        outputs: name to shape of what the model returned, where no other answer is known.
        id: what the input file calls the text; None where it has no name.
    """

    text: str
    num_tokens: int
    truncated: bool
    candidates: tuple[Scored, ...] = ()
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True)
class InferReport:
    """Answers for a list of texts.

    Attributes:
        kind: what the candidates are: `terms`, `labels`, `tokens`, `similarities` or `shapes`.
        similarities: cosine of every pair of texts, for embeddings with more than one text; else empty.
        notes: what a user should know about these answers.
    """

    model: str
    provider: str
    task: str
    kind: str
    answers: tuple[TextAnswer, ...]
    similarities: tuple[tuple[float, ...], ...] = ()
    notes: tuple[str, ...] = ()


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
