"""Which gates there are, what they refer to, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from onnxtool.benchmarking.baseline import Baseline, Conditions
from onnxtool.benchmarking.gating import (
    STATISTICS,
    THROUGHPUTS,
    Question,
    Side,
    ask,
    ask_run,
    parse_gates,
    result_figures,
    split_gate,
)
from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult, GateOutcome
from onnxtool.benchmarking.samples import Block
from onnxtool.errors import GateError
from onnxtool.reports import Json
from onnxtool.summary.gates import Gate

# Figures of the whole run; whatever else a gate names is one of a shape.
_OF_RUN = {field.name for field in fields(BenchmarkReport)} - {"results", "gates", "trusted", "warnings"}
_OF_SHAPE = {field.name for field in fields(BenchmarkResult)} | set(STATISTICS)


@dataclass(frozen=True)
class Judge:
    """The gates of a benchmark.

    Attributes:
        baseline: what relative gates refer to; None where there is none, or where it is the model that is compared.
        in_turns: whether relative gates refer to what is timed in turns.
    """

    gates: tuple[Gate, ...]
    baseline: Baseline | None
    in_turns: bool

    @classmethod
    def open(cls, options: BenchmarkOptions) -> Judge:
        """Parse the gates and read the baseline, before anything is timed.

        Raises:
            GateError: a gate is malformed, or names no figure, or there is nothing it could refer to.
        """
        has_base = options.baseline is not None or options.compare is not None
        gates = parse_gates(options.fail_if, has_base=has_base)
        shapes = shape_names(options)
        for gate in gates:
            if options.compare is not None and "peak_" in gate.figure:
                raise GateError(
                    f"with --compare, two models are in memory: {gate.expression!r} would judge both",
                    "check memory in a run without --compare",
                )
            _check_figure(gate, shapes, samples_only=options.baseline is None)
        baseline = None if options.baseline is None else Baseline.read(options.baseline)
        return cls(gates, baseline, baseline is None and options.compare is not None)

    def check(self, conditions: Conditions, shapes: Sequence[str]) -> None:
        """Refuse a baseline that does not compare.

        Raises:
            GateError: it was measured under other conditions, or lacks a shape.
        """
        if self.baseline is not None:
            self.baseline.check(conditions)
            for shape in shapes:
                self.baseline.shape(shape)

    def model_again(self, conditions: Conditions) -> Path | None:
        """Return the model of the baseline where gates are better judged by timing it again; see Baseline.model_again.

        Not for gates on memory, in which both models would be at once.
        """
        relative = [gate for gate in self.gates if gate.sign]
        if self.baseline is None or not relative or any("peak" in gate.figure for gate in self.gates):
            return None
        return self.baseline.model_again(conditions)

    def outcomes(self, result: BenchmarkResult, sides: tuple[Side, Side | None]) -> list[GateOutcome]:
        """Answer every gate on a shape; the second side is the other model's, where one is timed in turns."""
        side, other = sides
        base = other if self.in_turns else self._base(result.name, side.threads)
        outcomes = []
        for gate in self.gates:
            name, inner = split_gate(gate, [result.name])
            if _is_of_run(inner) or name not in ("", result.name):
                continue
            outcomes.append(ask(Question(gate.expression, result.name, inner, side, base, self.in_turns)))
        return outcomes

    def run_outcomes(self, report: BenchmarkReport) -> Iterator[GateOutcome]:
        """Answer every gate on the whole run."""
        base: Json = None
        if self.baseline is not None:
            base = dict(self.baseline.figures)
        elif report.comparison is not None:
            base = {"load_ms": report.comparison.load_ms}
        for gate in self.gates:
            if _is_of_run(gate):
                yield ask_run(gate, report, base)

    def _base(self, shape: str, threads: int) -> Side | None:
        if self.baseline is None:
            return None
        found = self.baseline.shape(shape)
        return Side(found.figures, found.blocks, found.waited_share, threads)


def side_of(result: BenchmarkResult, blocks: Sequence[Block], *, threads: int) -> Side:
    """Make a side of a gate from what was just timed."""
    return Side(result_figures(result), blocks, result.waited_share, threads)


def shape_names(options: BenchmarkOptions) -> list[str]:
    """Return what gates call the shapes that will be timed."""
    if options.texts:
        return [f"{batch_size}xtexts" for batch_size in options.batch_sizes]
    return [f"{batch_size}x{length}" for batch_size in options.batch_sizes for length in options.sequence_lengths]


def _is_of_run(gate: Gate) -> bool:
    return gate.figure.removeprefix("count(").partition(".")[0].rstrip(")") in _OF_RUN


def _check_figure(gate: Gate, shapes: Sequence[str], *, samples_only: bool) -> None:
    """Refuse a figure that no report will have, while that costs nothing.

    Raises:
        GateError: it is none; or it is relative to a model of which only latencies are known.
    """
    _, inner = split_gate(gate, shapes)
    first = inner.figure.partition(".")[0]
    if not _is_of_run(inner) and first not in _OF_SHAPE:
        raise GateError(
            f"a benchmark has no figure {inner.figure!r} (gate {gate.expression!r})",
            f"there are {', '.join([*STATISTICS, *THROUGHPUTS])}, load_ms, first_run_ms, peak_rss_bytes and others;"
            " see --format json",
        )
    figure = inner.figure.removeprefix("latency_ms.")
    known = {*STATISTICS, *THROUGHPUTS, "load_ms"}
    if gate.sign and samples_only and figure not in known:
        raise GateError(
            f"the gate {gate.expression!r} is relative to the model of --compare, of which {figure} is not known",
            f"name one of {', '.join(sorted(known))}, or pass --baseline",
        )
