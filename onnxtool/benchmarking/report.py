"""The report of `infer --benchmark`: timings, the machine, and their reliability.

Every duration is in milliseconds of wall time unless its name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnxtool.reports import short_repr
from onnxtool.runtime.timing import LatencySummary, summarize_latencies


@dataclass(frozen=True)
class TokenLengths:
    """Lengths of a benchmark's texts in tokens, including special ones.

    Attributes:
        num_texts: number of distinct texts in the batches.
        num_truncated: number of these texts that were truncated to the model's limit.
        padding_share: fraction of padding among all computed tokens, 0 to 1.
    """

    num_texts: int
    num_truncated: int
    min: int
    median: float
    p95: float
    max: int
    mean: float
    padding_share: float


@dataclass(frozen=True)
class StageTimes:
    """Time of a batch of texts by stage, in addition to the model's run in `latency_ms`.

    Attributes:
        tokenize: from texts to the model's input arrays.
        pool: from the model's outputs to one vector per text; None if the model does not produce vectors.
        total: from texts to vectors, including the model's run; to the model's outputs if it does not produce vectors.
    """

    tokenize: LatencySummary
    pool: LatencySummary | None
    total: LatencySummary

    @classmethod
    def of(cls, batches: Sequence[Mapping[str, float]]) -> StageTimes:
        """Summarize the milliseconds of each batch by stage: tokenize, run, and pool if the model produces vectors."""
        is_pooled = all("pool" in batch for batch in batches)
        return cls(
            tokenize=summarize_latencies([batch["tokenize"] for batch in batches]),
            pool=summarize_latencies([batch["pool"] for batch in batches]) if is_pooled else None,
            total=summarize_latencies([sum(batch.values()) for batch in batches]),
        )


@short_repr
@dataclass(frozen=True)
class BenchmarkResult:
    """Timing of one shape.

    Attributes:
        sequence_length: S; for texts, the length of the longest batch; 1 if no input has a sequence.
        runs: number of counted runs.
        throughput_tokens_per_s: tokens including padding, but for texts only real tokens; None if there are no tokens.
        latencies_ms: the latency of each run, in order.
        p50_interval_ms: 95 % confidence interval of the median.
        spread: 1.4826 * median absolute deviation / median, an estimate of the relative standard deviation that is
            robust to outliers.
        drift: the median of the last third of the runs divided by the median of the first third, minus 1.
        peak_rss_bytes: the largest resident set during these runs; None if the system does not report it, or two models
            were in memory.
        tokens: None for generated inputs.
        stages_ms: None for generated inputs.
        trusted: whether there are no warnings.
        warnings: reasons why the figures are unreliable.
    """

    batch_size: int
    sequence_length: int
    runs: int
    latency_ms: LatencySummary
    throughput_samples_per_s: float
    throughput_tokens_per_s: float | None
    latencies_ms: tuple[float, ...] = ()
    p50_interval_ms: tuple[float, float] = (0.0, 0.0)
    spread: float = 0.0
    drift: float = 0.0
    peak_rss_bytes: int | None = None
    tokens: TokenLengths | None = None
    stages_ms: StageTimes | None = None
    trusted: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of this shape in gates and warnings, e.g. `8x128`, or `8xtexts`."""
        return f"{self.batch_size}x{'texts' if self.tokens else self.sequence_length}"


@short_repr
@dataclass(frozen=True)
class BenchmarkEnvironment:
    """The environment of a benchmark.

    Attributes:
        cpu: the processor's name from the system.
        num_cores: number of cores that this process may use.
        gpu: the device's name; empty if nothing ran on one.
        load_average_before: load average over the last minute; None if unavailable.
        versions: versions by package.
        intra_threads: intra-op threads requested from onnxruntime, 0 for its own choice.
        inter_threads: inter-op threads, likewise; more than 1 makes the session run operators in parallel.
        disabled_optimizers: onnxruntime optimizers that were disabled as the file requests.
    """

    cpu: str
    num_cores: int
    gpu: str
    platform: str
    python: str
    versions: dict[str, str]
    load_average_before: float | None
    load_average_after: float | None
    intra_threads: int
    inter_threads: int
    io_binding: bool
    disabled_optimizers: tuple[str, ...]


@short_repr
@dataclass(frozen=True)
class ComparedShape:
    """Timing of two models on the same inputs, in turns.

    Attributes:
        latency_ms: latency of the other model.
        pairs: number of times both were timed in succession.
        ratio: median over the pairs of the other's latency divided by the model's; above 1, the model is faster.
        ratio_interval: 95 % interval of that median (order statistics, which assume no distribution).
        max_abs_error: largest difference of an output; None if they have no output in common.
        cosine_min: smallest cosine of an output with the other's; None likewise.
    """

    batch_size: int
    sequence_length: int
    latency_ms: LatencySummary
    pairs: int
    ratio: float
    ratio_interval: tuple[float, float]
    max_abs_error: float | None
    cosine_min: float | None


@short_repr
@dataclass(frozen=True)
class Comparison:
    """The model that was timed against.

    Attributes:
        other: a file, a checkpoint, or the model itself on another provider.
        kind: `onnx`, `pytorch` or `provider`.
        outputs: the compared outputs, as `name` or `name in the model: name in the other`.
        notes: notes for interpreting the ratio.
    """

    other: str
    kind: str
    provider: str
    load_ms: float
    outputs: tuple[str, ...]
    results: tuple[ComparedShape, ...]
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class GateOutcome:
    """The outcome of a gate on one shape, or on the whole run.

    Attributes:
        shape: e.g. `8x128`; empty for a figure of the whole run.
        value: the figure.
        interval: 95 % interval of the ratio; None for other figures.
        decided: whether the interval excludes the threshold; if not, the best estimate decides.
    """

    expression: str
    shape: str
    figure: str
    met: bool
    value: float
    threshold: float
    interval: tuple[float, float] | None = None
    decided: bool = True

    def __str__(self) -> str:
        text = f"{self.figure} is {self.value:.6g}{f' at {self.shape}' if self.shape else ''}"
        if self.interval is not None:
            text += " (95 %: {:.6g} to {:.6g})".format(*self.interval)
        text += f", fails if {self.expression}"
        return text if self.decided else f"{text}; the interval includes the threshold, so the best estimate decides"


@short_repr
@dataclass(frozen=True)
class BenchmarkReport:
    """The speed of a model on this machine.

    Attributes:
        threads: intra-op threads of the session.
        load_ms: time from the file to a ready session.
        first_run_ms: duration of the first run of the session, before any warm-up.
        peak_rss_bytes: the largest resident set of this process so far; if two models are timed in turns, until the
            first was loaded.
        warmup: number of uncounted runs of each shape.
        peak_rss_load_bytes: the largest resident set until the model was loaded.
        peak_vram_bytes: device memory allocated from before the model was loaded until the runs ended, which is also
            the peak, because onnxruntime never frees any; None if nothing ran on a GPU.
        inputs: `random`, `texts` or `samples`.
        trusted: whether the timings of every shape are.
        warnings: reasons why figures of the whole run are unreliable.
        notes: other notes for the reader.
        comparison: None without `--compare`.
        gates: the outcome of each gate on each shape.
    """

    model: str
    provider: str
    threads: int
    load_ms: float
    first_run_ms: float
    peak_rss_bytes: int
    warmup: int
    results: tuple[BenchmarkResult, ...]
    environment: BenchmarkEnvironment
    inputs: str = "random"
    peak_rss_load_bytes: int | None = None
    peak_vram_bytes: int | None = None
    trusted: bool = True
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    comparison: Comparison | None = None
    gates: tuple[GateOutcome, ...] = field(default=())
