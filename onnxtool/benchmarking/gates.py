"""Gates on a benchmark: `p50>20` on a figure as printed, `ratio<0.95` on the comparison with another model.

A gate that names a shape, as in `8x128.p95>20`, applies to that shape; any other to all shapes, or to the whole run.
The ratio has a 95 % interval. If that includes the threshold, the best estimate decides, and the outcome says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult, ComparedShape, GateOutcome
from onnxtool.errors import GateError
from onnxtool.reports import to_json
from onnxtool.runtime.timing import LatencySummary
from onnxtool.summary.gates import Gate, GateResult, check_gates, parse_gate


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
        for own in (replace(result, latencies_ms=()), result.latency_ms):
            figures |= to_json(own)
        for gate in gates:
            name, inner = split_gate(gate, shapes)
            if not _is_of_run(inner) and name in ("", result.name):
                (found,) = check_gates([inner], figures)
                yield _outcome(found, result.name, other.ratio_interval if other and inner.figure == _RATIO else None)
    for gate in filter(_is_of_run, gates):
        (found,) = check_gates([gate], to_json(replace(report, results=())))
        yield _outcome(found, "", None)


def _outcome(found: GateResult, shape: str, interval: tuple[float, float] | None) -> GateOutcome:
    threshold = float(found.threshold)
    return GateOutcome(
        found.gate.expression,
        shape,
        found.gate.figure,
        met=found.met,
        value=float(found.value),
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
        return bool(path) and path[0].isdecimal() and any(_leads(path[1:], one) for one in of)
    if get_origin(kind) is dict:
        return bool(path)
    return any(_leads(path, one) for one in of) if of else kind in (int, float) and not path


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
