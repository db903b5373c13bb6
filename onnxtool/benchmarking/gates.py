"""Gates on a benchmark: `p50>20` on the figure as printed, `p95>+10%` against a baseline or another model.

A relative gate on latencies compares two samples. The change has a 95 % interval from resampled blocks of runs. While
that contains the threshold, more runs are taken, for at most half a minute per shape; then the best estimate decides,
and the outcome says so.

If the baseline's own model still exists, it is timed again in turns with the model (`Gates.model_again`), so that
changes of the machine since then do not count. Otherwise the two sessions are compared as measured, and the outcome has
a note that says so.

A gate on a figure other than latency (`load_ms`, `peak_rss_bytes`) is a plain comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from onnxtool.benchmarking.baseline import Baseline
from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult, GateOutcome
from onnxtool.benchmarking.samples import (
    Floats,
    Statistic,
    TimedShape,
    interval,
    replicates,
)
from onnxtool.errors import GateError
from onnxtool.reports import Json, to_json
from onnxtool.summary.gates import OPERATORS, Gate, GateResult, check_gates, parse_gate

_SHARE_DECIDED = 0.975
_AS_MEASURED = "the baseline is of another session, and is compared as measured: a change of the machine is in it"
_RAW = ("latencies_ms", "block_sizes")


def _percentile(percent: float) -> Statistic:
    return lambda samples: np.percentile(samples, percent, axis=-1)


STATISTICS: dict[str, Statistic] = {
    "min": lambda samples: samples.min(axis=-1),
    **{f"p{percent}": _percentile(percent) for percent in (50, 90, 95, 99)},
    "max": lambda samples: samples.max(axis=-1),
    "mean": lambda samples: samples.mean(axis=-1),
    "stdev": lambda samples: samples.std(axis=-1),
}
_TOKENS_PER_S = "throughput_tokens_per_s"
THROUGHPUTS = ("throughput_samples_per_s", _TOKENS_PER_S)
# Figures of the whole run; all others belong to a shape.
_OF_RUN = {field.name for field in fields(BenchmarkReport)} - {"results", "gates", "trusted", "warnings"}
_NEEDED = {"tokens": ("texts",), "stages_ms": ("texts",), "comparison": ("compare", "baseline")}
_OF_SHAPE = {field.name for field in fields(BenchmarkResult)} | set(STATISTICS)


@dataclass(frozen=True)
class Gates:
    """The gates of a benchmark.

    Attributes:
        baseline: the reference of relative gates; None if there is none, or if it is the compared model.
        in_turns: whether relative gates refer to the model timed in turns.
    """

    gates: tuple[Gate, ...]
    baseline: Baseline | None
    in_turns: bool

    @classmethod
    def open(cls, options: BenchmarkOptions, shapes: Sequence[str]) -> Gates:
        """Parse the gates on `shapes` and read the baseline, before anything is timed.

        Raises:
            GateError: a gate is malformed, names an unknown figure, or has no reference.
        """
        has_base = options.baseline is not None or options.compare is not None
        gates = tuple(parse_gate(expression) for expression in options.fail_if)
        for gate in gates:
            if gate.sign and not has_base:
                raise GateError(
                    f"the gate {gate.expression!r} is relative, and there is no base",
                    "pass --baseline with an earlier report, or --compare with another model",
                )
            if options.compare is not None and "peak_" in gate.figure:
                raise GateError(
                    f"with --compare, two models are in memory: {gate.expression!r} would be about both",
                    "check memory in a run without --compare",
                )
            _check_figure(gate, shapes, samples_only=options.baseline is None)
            needs = _NEEDED.get(split_gate(gate, shapes)[1].figure.partition(".")[0])
            if needs is not None and not any(getattr(options, name) for name in needs):
                raise GateError(f"{gate.figure} is not measured (gate {gate.expression!r})", f"pass --{needs[0]}")
        baseline = None if options.baseline is None else Baseline.read(options.baseline)
        return cls(gates, baseline, baseline is None and options.compare is not None)

    def check(self, now: BenchmarkReport, shapes: Sequence[str]) -> None:
        """Refuse a baseline that is not comparable.

        Raises:
            GateError: it was measured under other conditions, or lacks a shape.
        """
        if self.baseline is not None:
            self.baseline.check(now)
            for shape in shapes:
                self.baseline.shape(shape)

    def check_tokens(self, *, has_tokens: bool) -> None:
        """Refuse gates on tokens per second if no tokens are fed.

        Raises:
            GateError: there is one.
        """
        for gate in self.gates:
            if not has_tokens and gate.figure.endswith(_TOKENS_PER_S):
                raise GateError(f"no tokens are fed (gate {gate.expression!r})", "use throughput_samples_per_s")

    def model_again(self, now: BenchmarkReport) -> Path | None:
        """Return the baseline's model if timing it again serves relative gates; see `Baseline.model_again`.

        Not for gates on memory, because both models would be loaded at once.
        """
        relative = [gate for gate in self.gates if gate.sign]
        if self.baseline is None or not relative or any("peak" in gate.figure for gate in self.gates):
            return None
        return self.baseline.model_again(now)

    def outcomes(self, shape: str, timed: TimedShape, other: TimedShape | None = None) -> list[GateOutcome]:
        """Check every gate on a shape.

        Args:
            shape: its name, e.g. `8x128`.
            timed: the model's runs.
            other: the runs of the model timed in turns.
        """
        base = other
        if not self.in_turns:
            base = None if self.baseline is None else self.baseline.shape(shape)
        outcomes = []
        for gate in self.gates:
            name, inner = split_gate(gate, [shape])
            if not _is_of_run(inner) and name in ("", shape):
                outcome = check_shape(inner, timed, base, in_turns=self.in_turns)
                outcomes.append(replace(outcome, shape=shape))
        return outcomes

    def run_outcomes(self, report: BenchmarkReport) -> Iterator[GateOutcome]:
        """Check every gate on the whole run."""
        base: Json = None
        if self.baseline is not None:
            base = dict(self.baseline.figures)
        elif report.comparison is not None:
            base = {"load_ms": report.comparison.load_ms}
        for gate in self.gates:
            if _is_of_run(gate):
                (result,) = check_gates([gate], to_json(replace(report, results=(), gates=())), base)
                yield _plain_outcome(result)


def shape_names(options: BenchmarkOptions) -> list[str]:
    """Return the gate names of the shapes to be timed."""
    if options.texts:
        return [f"{batch_size}xtexts" for batch_size in options.batch_sizes]
    return [f"{batch_size}x{length}" for batch_size in options.batch_sizes for length in options.sequence_lengths]


def _is_of_run(gate: Gate) -> bool:
    return gate.figure.removeprefix("count(").partition(".")[0].rstrip(")") in _OF_RUN


def _check_figure(gate: Gate, shapes: Sequence[str], *, samples_only: bool) -> None:
    """Refuse an unknown figure early, before any timing.

    Raises:
        GateError: it is unknown, or relative to a model with only known latencies.
    """
    _, inner = split_gate(gate, shapes)
    figure = inner.figure.removeprefix("latency_ms.")
    first, path = inner.figure.partition(".")[0], inner.figure.split(".")
    is_count = first.startswith("count(") and (_is_of_run(inner) or first[6:].rstrip(")") in _OF_SHAPE.difference(_RAW))
    is_figure = _leads(path, BenchmarkReport if _is_of_run(inner) else BenchmarkResult) and first not in _RAW
    if not is_count and not is_figure and figure not in STATISTICS:
        raise GateError(
            f"a benchmark has no figure {inner.figure!r} (gate {gate.expression!r})",
            f"there are {', '.join([*STATISTICS, *THROUGHPUTS])}, load_ms, first_run_ms, peak_rss_bytes and others;"
            " see --format json",
        )
    known = {*STATISTICS, *THROUGHPUTS, "load_ms"}
    if gate.sign and samples_only and figure not in known:
        raise GateError(
            f"the gate {gate.expression!r} is relative to the model of --compare, of which {figure} is not known",
            f"name one of {', '.join(sorted(known))}, or pass --baseline",
        )


def _leads(path: Sequence[str], kind: Any) -> bool:
    """Return whether a path may lead to a number in a value of a type; keys of a dict are unknown before the run."""
    if is_dataclass(kind):
        return bool(path) and _leads(path[1:], get_type_hints(kind).get(path[0]))
    of = get_args(kind)
    if get_origin(kind) in (list, tuple):
        return bool(path) and path[0].isdecimal() and any(_leads(path[1:], one) for one in of)
    if get_origin(kind) is dict:
        return bool(path)
    return any(_leads(path, one) for one in of) if of else kind in (int, float) and not path


def split_gate(gate: Gate, shapes: Sequence[str]) -> tuple[str, Gate]:
    """Split `8x128.p95>+10%` into the shape and the gate on it; the shape is empty if the gate names none."""
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


def check_shape(gate: Gate, timed: TimedShape, base: TimedShape | None, *, in_turns: bool) -> GateOutcome:
    """Check a gate on one shape.

    Args:
        gate: the gate, without the shape's name in its figure.
        timed: the model's runs.
        base: the reference of a relative gate.
        in_turns: whether both were timed in turns, so that blocks are drawn in pairs.

    Raises:
        GateError: it names no figure.
    """
    figure = gate.figure.removeprefix("latency_ms.")
    if gate.sign and base is not None and (figure in STATISTICS or figure in THROUGHPUTS):
        return _check_samples(gate._replace(figure=figure), timed, base, in_turns=in_turns)
    (result,) = check_gates([gate], _view(timed.figures), None if base is None else _view(base.figures))
    return _plain_outcome(result)


def _view(figures: Json) -> Json:
    """Expand `p95` to `latency_ms.p95`, and exclude lists of raw values."""
    if not isinstance(figures, dict):
        return figures
    summary = figures.get("latency_ms")
    plain = {name: value for name, value in figures.items() if name not in _RAW}
    return {**plain, **summary} if isinstance(summary, dict) else plain


def _plain_outcome(result: GateResult) -> GateOutcome:
    base = result.base_value
    return GateOutcome(
        result.gate.expression,
        "",
        result.gate.figure,
        met=result.met,
        value=float(result.value),
        threshold=float(result.threshold),
        base_value=None if base is None else float(base),
        change=float(result.value / base) - 1.0 if base else None,
    )


def _check_samples(gate: Gate, timed: TimedShape, base: TimedShape, *, in_turns: bool) -> GateOutcome:
    statistic = _statistic(gate.figure, timed.figures)
    value, base_value = (float(statistic(np.concatenate(one.blocks)[np.newaxis])[0]) for one in (timed, base))
    # Blocks that were taken in turns are drawn in pairs.
    drawn = replicates(timed.blocks, statistic, seed=0)
    drawn_base = replicates(base.blocks, statistic, seed=0 if in_turns else 1)
    share = float(np.mean(_holds(gate, drawn, drawn_base)))
    values, base_values = np.array([value]), np.array([base_value])
    return GateOutcome(
        gate.expression,
        "",
        gate.figure,
        met=bool(_holds(gate, values, base_values)[0]),
        value=value,
        threshold=float(_threshold(gate, base_values)[0]),
        base_value=base_value,
        change=value / base_value - 1.0,
        change_interval=interval(drawn / drawn_base - 1.0),
        decided=share >= _SHARE_DECIDED or share <= 1.0 - _SHARE_DECIDED,
        note="" if in_turns else _AS_MEASURED,
    )


def _holds(gate: Gate, values: Floats, base_values: Floats) -> NDArray[np.bool_]:
    holds: NDArray[np.bool_] = OPERATORS[gate.operator](values, _threshold(gate, base_values))
    return holds


def _threshold(gate: Gate, base_values: Floats) -> Floats:
    growth = float(gate.amount) * np.abs(base_values) if gate.is_percentage else float(gate.amount)
    return base_values + gate.sign * growth


def _statistic(figure: str, figures: Json) -> Statistic:
    if figure in STATISTICS:
        return STATISTICS[figure]
    rate, summary = (figures[name] if isinstance(figures, dict) else None for name in (figure, "latency_ms"))
    mean = summary["mean"] if isinstance(summary, dict) else None
    # Throughput follows from the mean latency: samples or tokens per run.
    per_run = rate * mean if isinstance(rate, int | float) and isinstance(mean, int | float) else float("nan")
    return lambda samples: per_run / samples.mean(axis=-1)
