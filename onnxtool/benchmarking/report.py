"""The report of `infer --benchmark`, with timings, the machine and their reliability, and gates on it.

Every duration is in milliseconds of wall time unless its name says otherwise. A gate that names a shape, as in
`8x128.p95>20`, applies to that shape; any other to all shapes, or to the whole run. The ratio to the compared model has
a 95 % interval. If that includes the threshold, the best estimate decides, and the outcome says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.errors import GateError
from onnxtool.reports import short_repr, to_json
from onnxtool.runtime.timing import LatencySummary, summarize_latencies
from onnxtool.summary.gates import Gate, GateResult, check_gates, parse_gate


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
        cosine_min: smallest cosine of an output with the other's; None if they have no output in common.
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
class LatencyComparison:
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
    comparison: LatencyComparison | None = None
    gates: tuple[GateOutcome, ...] = field(default=())


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


STATISTICS = tuple(field.name for field in fields(LatencySummary))
_RATIO, _TOKENS_PER_S = "ratio", "throughput_tokens_per_s"
_RAW = "latencies_ms"
# Figures of the whole run, of the comparison on a shape, and of the model on it.
_OF_RUN = _names(BenchmarkReport) - {"results", "gates", "trusted", "warnings"}
_OF_COMPARISON = _names(ComparedShape) - _names(BenchmarkResult)
_OF_SHAPE = _names(BenchmarkResult) - {_RAW}
_NEEDED = {
    "tokens": "texts",
    "stages_ms": "texts",
    "comparison": "compare",
    **dict.fromkeys(_OF_COMPARISON, "compare"),
}


def read_gates(options: BenchmarkOptions, shapes: Sequence[str]) -> tuple[Gate, ...]:
    """Parse the gates on `shapes`, before anything is timed.

    Raises:
        GateError: a gate is malformed, is relative, or names a shape or a figure that is not measured.
    """
    gates = tuple(parse_gate(expression) for expression in options.fail_if)
    for gate in gates:
        if gate.sign:
            raise GateError(
                f"the gate {gate.expression!r} is relative, and a benchmark has no base",
                "pass --compare with another model and gate the ratio of their latencies, as in 'ratio<0.9'",
            )
        if options.compare is not None and "peak_" in gate.figure:
            raise GateError(
                f"with --compare, two models are in memory: {gate.expression!r} would be about both",
                "check memory in a run without --compare",
            )
        _, inner = split_gate(gate, shapes)
        _check_figure(inner)
        needed = _NEEDED.get(inner.figure.partition(".")[0])
        if needed is not None and not getattr(options, needed):
            raise GateError(f"{inner.figure} is not measured (gate {gate.expression!r})", f"pass --{needed}")
    return gates


def require_tokens(gates: Sequence[Gate], *, has_tokens: bool) -> None:
    """Refuse gates on tokens per second if no tokens are fed.

    Raises:
        GateError: there is one.
    """
    for gate in gates:
        if not has_tokens and gate.figure.endswith(_TOKENS_PER_S):
            raise GateError(f"no tokens are fed (gate {gate.expression!r})", "use throughput_samples_per_s")


def check_report(gates: Sequence[Gate], report: BenchmarkReport) -> Iterator[GateOutcome]:
    """Yield the outcome of each gate on each shape that it applies to, then of those on the whole run.

    Raises:
        GateError: a figure is missing from the report.
    """
    compared = report.comparison.results if report.comparison else [None] * len(report.results)
    shapes = [result.name for result in report.results]
    for result, other in zip(report.results, compared, strict=True):
        figures: Any = {} if other is None else to_json(other)
        for part in (replace(result, latencies_ms=()), result.latency_ms):
            figures |= to_json(part)
        for gate in gates:
            name, inner = split_gate(gate, shapes)
            if not _is_of_run(inner) and name in ("", result.name):
                (outcome,) = check_gates([inner], figures)
                yield _outcome(outcome, result.name, other.ratio_interval if other and inner.figure == _RATIO else None)
    for gate in filter(_is_of_run, gates):
        (outcome,) = check_gates([gate], to_json(replace(report, results=())))
        yield _outcome(outcome, "", None)


def _outcome(result: GateResult, shape: str, interval: tuple[float, float] | None) -> GateOutcome:
    threshold = float(result.threshold)
    return GateOutcome(
        result.gate.expression,
        shape,
        result.gate.figure,
        met=result.met,
        value=float(result.value),
        threshold=threshold,
        interval=interval,
        decided=interval is None or not interval[0] <= threshold <= interval[1],
    )


def shape_names(options: BenchmarkOptions) -> list[str]:
    """Return the gate names of the shapes to be timed."""
    if options.texts:
        return [f"{batch_size}xtexts" for batch_size in options.batch_sizes]
    return [f"{batch_size}x{length}" for batch_size in options.batch_sizes for length in options.sequence_lengths]


def _is_of_run(gate: Gate) -> bool:
    return gate.figure.removeprefix("count(").partition(".")[0].rstrip(")") in _OF_RUN


def _check_figure(gate: Gate) -> None:
    """Refuse an unknown figure before any timing.

    Raises:
        GateError: it is unknown.
    """
    first, path = gate.figure.partition(".")[0], gate.figure.split(".")
    of = BenchmarkReport if _is_of_run(gate) else ComparedShape if first in _OF_COMPARISON else BenchmarkResult
    is_count = first.startswith("count(") and (_is_of_run(gate) or first[6:].rstrip(")") in _OF_SHAPE)
    if not is_count and gate.figure not in STATISTICS and (first == _RAW or not _leads(path, of)):
        raise GateError(
            f"a benchmark has no figure {gate.figure!r} (gate {gate.expression!r})",
            f"there are {', '.join(STATISTICS)}, throughput_samples_per_s, {_TOKENS_PER_S}, load_ms, first_run_ms, "
            "peak_rss_bytes, with --compare the ratio, and others; see --format json",
        )


def _leads(path: Sequence[str], kind: Any) -> bool:
    """Return whether a path may lead to a number in a value of a type; keys of a dict are unknown before the run."""
    if is_dataclass(kind):
        return bool(path) and _leads(path[1:], get_type_hints(kind).get(path[0]))
    of = get_args(kind)
    if get_origin(kind) in (list, tuple):
        return bool(path) and path[0].isdecimal() and any(_leads(path[1:], part) for part in of)
    if get_origin(kind) is dict:
        return bool(path)
    return any(_leads(path, part) for part in of) if of else kind in (int, float) and not path


def split_gate(gate: Gate, shapes: Sequence[str]) -> tuple[str, Gate]:
    """Split `8x128.p95>20` into the shape and the gate on it; the shape is empty if the gate names none."""
    name, _, figure = gate.figure.partition(".")
    if figure and name in shapes:
        return name, gate._replace(figure=figure)
    is_shape = name.partition("x")[0].isdecimal() and bool(figure)
    if is_shape:
        raise GateError(
            f"no shape {name} was timed (gate {gate.expression!r}); there are {', '.join(shapes)}",
            "name one of them, or none for all",
        )
    return "", gate
