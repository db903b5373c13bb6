"""Gates on a benchmark: `p50>20` on the figure as printed, `p95>+10%` against a baseline or another model.

A relative gate on latencies is a question about two samples, and a machine is never as quiet as it was. Three things
keep its answer about the model.

1. What others took is left out. On one thread, a run in which this process had to leave its core counts with the time
   that its thread spent on one. Caches are cold when it returns, which shows in the tail: where threads waited for more
   than 3 % of the time, gates on a percentile above the median, the mean or throughput are judged by the median. On
   several threads nobody can say what a run would have taken; there the runs that nothing interrupted count, and where
   too few are left nothing is decided, and the gate is not met.
2. The change has an interval of 95 %, from blocks of runs drawn anew. While that contains the threshold, more runs are
   taken, for half a minute a shape at most; then the best estimate decides, and the outcome says so.
3. Where the baseline's own model is still there, it is timed again, in turns with the model (`Judge.model_again`); so
   nothing that happened to the machine since is in the change. Else the kernel of fixed arithmetic that both reports
   timed tells how much slower the machine is. How far a model follows it depends on the model: MiniLM did by a half in
   the logarithm, with a correlation of 0.9, while neighbours came and went. So the best estimate scales the base by
   half of it, and the gate is decided only where it is with nothing of it, and with all.

A gate whose figure is no latency (`load_ms`, `peak_rss_bytes`) is a plain comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.benchmarking.report import BenchmarkReport, BenchmarkResult, GateOutcome
from onnxtool.benchmarking.samples import MAX_WAITED, Block, Floats, Statistic, interval, own_latencies, replicates
from onnxtool.errors import GateError
from onnxtool.reports import Json, to_json
from onnxtool.summary.gates import Gate, GateResult, check_gates, parse_gate

_FEWEST_UNDISTURBED = 20
_SHARE_DECIDED = 0.975
_DISTURBED = "other processes took the cores: nothing is decided; --threads 1, or a quiet machine, can be judged"
_BY_MEDIAN = "judged by the median, as other processes made the tail"
_RAW = ("latencies_ms", "core_ms", "preemptions", "block_sizes", "kernel_ms")


def _percentile(percent: float) -> Statistic:
    return lambda samples: float(np.percentile(samples, percent))


STATISTICS: dict[str, Statistic] = {
    "min": lambda samples: float(samples.min()),
    **{f"p{percent}": _percentile(percent) for percent in (50, 90, 95, 99)},
    "max": lambda samples: float(samples.max()),
    "mean": lambda samples: float(samples.mean()),
    "stdev": lambda samples: float(samples.std()),
}
_Values = TypeVar("_Values", float, Floats)
_COMPARISONS: dict[str, Callable[[Floats, Floats], NDArray[np.bool_]]] = {
    ">": np.greater,
    ">=": np.greater_equal,
    "<": np.less,
    "<=": np.less_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
THROUGHPUTS = ("throughput_samples_per_s", "throughput_tokens_per_s")


@dataclass(frozen=True)
class Side:
    """Runs of one side of a relative gate.

    Attributes:
        figures: the result they belong to, in JSON.
        threads: that computed on the host; 0 for a device.
    """

    figures: dict[str, Json]
    blocks: Sequence[Block]
    waited_share: float | None
    threads: int


@dataclass(frozen=True)
class Question:
    """A gate on one shape, against a base where it is relative.

    Attributes:
        gate: with the name of the shape taken off its figure.
        in_turns: whether both sides were taken in turns, so that blocks are drawn in pairs and no kernel is needed.
    """

    expression: str
    shape: str
    gate: Gate
    side: Side
    base: Side | None
    in_turns: bool


def parse_gates(expressions: Sequence[str], *, has_base: bool) -> tuple[Gate, ...]:
    """Parse gates, and see to it that relative ones have what they refer to.

    Raises:
        GateError: an expression is malformed, or relative without a base.
    """
    gates = tuple(parse_gate(expression) for expression in expressions)
    for gate in gates:
        if gate.sign and not has_base:
            raise GateError(
                f"the gate {gate.expression!r} is relative, and there is no base",
                "pass --baseline with an earlier report, or --compare with another model",
            )
    return gates


def split_gate(gate: Gate, shapes: Sequence[str]) -> tuple[str, Gate]:
    """Split `8x128.p95>+10%` into the shape and the gate on it; the shape is empty where the gate names none."""
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


def ask(question: Question) -> GateOutcome:
    """Answer a gate on one shape.

    Raises:
        GateError: it names no figure.
    """
    figure = question.gate.figure.removeprefix("latency_ms.")
    if question.gate.sign and question.base is not None and (figure in STATISTICS or figure in THROUGHPUTS):
        return _ask_samples(question, question.base, figure)
    base = None if question.base is None else _view(question.base.figures)
    (result,) = check_gates([question.gate], _view(question.side.figures), base)
    return _plain_outcome(result, question.expression, question.shape)


def ask_run(gate: Gate, report: BenchmarkReport, base: Json) -> GateOutcome:
    """Answer a gate on a figure of the whole run, such as `load_ms`.

    Raises:
        GateError: it names no figure.
    """
    (result,) = check_gates([gate], run_figures(report), base)
    return _plain_outcome(result, gate.expression, "")


def run_figures(report: BenchmarkReport) -> dict[str, Json]:
    """Return the figures of the whole run."""
    figures = to_json(replace(report, results=(), gates=()))
    return figures if isinstance(figures, dict) else {}


def result_figures(result: BenchmarkResult) -> dict[str, Json]:
    """Return the figures of a shape."""
    figures = to_json(result)
    return figures if isinstance(figures, dict) else {}


def _view(figures: dict[str, Json]) -> Json:
    """Let `p95` stand for `latency_ms.p95`, and leave out lists of raw values."""
    summary = figures.get("latency_ms")
    plain = {name: value for name, value in figures.items() if name not in _RAW}
    return {**plain, **summary} if isinstance(summary, dict) else plain


def _plain_outcome(result: GateResult, expression: str, shape: str) -> GateOutcome:
    base = result.base_value
    return GateOutcome(
        expression,
        shape,
        result.gate.figure,
        met=result.met,
        value=float(result.value),
        threshold=float(result.threshold),
        base_value=None if base is None else float(base),
        change=float(result.value / base) - 1.0 if base else None,
    )


def _ask_samples(question: Question, base: Side, figure: str) -> GateOutcome:
    gate, side = question.gate, question.side
    ours, is_ours_clean = undisturbed(side, in_turns=question.in_turns)
    theirs, is_theirs_clean = undisturbed(base, in_turns=question.in_turns)
    is_crowded = any((one.waited_share or 0.0) > MAX_WAITED for one in (side, base))
    by_median = is_crowded and side.threads == 1 and figure not in ("min", "p50")
    statistic = _statistic(figure, side, by_median=by_median)
    scale = 1.0 if question.in_turns else kernel_change(side.blocks, base.blocks)
    values = np.array([statistic(np.concatenate(ours))])
    base_values = np.array([_scaled(statistic(np.concatenate(theirs)), scale**0.5, figure)])
    # Sides that were taken in turns are drawn in pairs.
    drawn = replicates(ours, statistic, seed=0)
    drawn_base = replicates(theirs, statistic, seed=0 if question.in_turns else 1)
    shares = [float(np.mean(_holds(gate, drawn, _scaled(drawn_base, part, figure)))) for part in (1.0, scale)]
    is_clean = is_ours_clean and is_theirs_clean
    is_decided = min(shares) >= _SHARE_DECIDED or max(shares) <= 1.0 - _SHARE_DECIDED
    value, base_value = float(values[0]), float(base_values[0])
    return GateOutcome(
        question.expression,
        question.shape,
        figure,
        met=bool(_holds(gate, values, base_values)[0]) and is_clean,
        value=value,
        threshold=float(_threshold(gate, base_values)[0]),
        base_value=base_value,
        change=value / base_value - 1.0,
        change_interval=interval(drawn / _scaled(drawn_base, scale**0.5, figure) - 1.0),
        decided=is_clean and is_decided,
        undecidable=not is_clean,
        note=(_BY_MEDIAN if by_median else "") if is_clean else _DISTURBED,
    )


def _holds(gate: Gate, values: Floats, base_values: Floats) -> NDArray[np.bool_]:
    return _COMPARISONS[gate.operator](values, _threshold(gate, base_values))


def _threshold(gate: Gate, base_values: Floats) -> Floats:
    growth = float(gate.amount) * np.abs(base_values) if gate.is_percentage else float(gate.amount)
    return base_values + gate.sign * growth


def _statistic(figure: str, side: Side, *, by_median: bool) -> Statistic:
    if figure in STATISTICS:
        return STATISTICS["p50" if by_median else figure]
    rate, summary = side.figures[figure], side.figures["latency_ms"]
    mean = summary["mean"] if isinstance(summary, dict) else None
    # Throughput is what the mean latency gives: so many samples or tokens a run.
    per_run = rate * mean if isinstance(rate, int | float) and isinstance(mean, int | float) else float("nan")
    middle = STATISTICS["p50" if by_median else "mean"]
    return lambda samples: per_run / middle(samples)


def undisturbed(side: Side, *, in_turns: bool) -> tuple[list[Floats], bool]:
    """Return the latencies of each block without what other processes took, and whether that could be told.

    Of two that were taken in turns, other processes took about as much from the one as from the other.
    """
    blocks = [block for block in side.blocks if block.latencies_ms]
    walls = [np.asarray(block.latencies_ms) for block in blocks]
    leaves = [np.asarray(block.preemptions) for block in blocks]
    if side.threads == 1:
        return own_latencies(blocks), True
    if in_turns or side.waited_share is None or side.waited_share <= MAX_WAITED:
        return walls, True
    alone = [wall[left == 0] for wall, left in zip(walls, leaves, strict=True)]
    if sum(len(samples) for samples in alone) >= _FEWEST_UNDISTURBED:
        return [samples for samples in alone if len(samples)], True
    return walls, False


def kernel_change(blocks: Sequence[Block], base: Sequence[Block]) -> float:
    """Return how many times as long the reference kernel takes as it took in the base."""
    return float(np.median([block.kernel_ms for block in blocks]) / np.median([block.kernel_ms for block in base]))


def _scaled(values: _Values, times_as_long: float, figure: str) -> _Values:
    """Return what figures of the base would be on a machine that takes so many times as long."""
    return values / times_as_long if figure in THROUGHPUTS else values * times_as_long
