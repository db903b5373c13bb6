"""Run steps in processes of their own within a limit of time, and print the tables of their results.

For POSIX systems.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.isolation import Isolation
from harness.pages import print_head, print_row

_LINES = 6  # of a failed step's log


@dataclass
class Result:
    """The rows of a table, and what is wrong in them."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self, name: str, **figures: Any) -> None:
        """Begin a row."""
        self.rows.append({"": name, **figures})

    def check(self, figure: str, value: float, bound: float) -> None:
        """Add a figure to the last row. One above its bound is wrong, and so is NaN."""
        self.rows[-1][figure] = f"{value:.2g} (≤ {bound:.2g})"
        if not value <= bound:
            self.fail(f"{figure} is {value:.3g}, at most {bound:.3g} is allowed")

    def fail(self, problem: str) -> None:
        """Add a problem of the last row."""
        self.wrong.append(f"{self.rows[-1]['']}: {problem}")


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        table: the table that its rows are in.
        needs: names of steps whose files it reads.
    """

    name: str
    table: str
    function: Callable[[], Result]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a step, whose state is `ok` or `wrong`; or the reason why there is none."""

    step: Step
    state: str
    result: Result | None = None


def compute(function: Callable[[], Result]) -> dict[str, Any]:
    """Return the result of a step as what JSON can hold."""
    return asdict(function())


def run_steps(steps: Sequence[Step], logs: Path, *, minutes: float) -> list[Outcome]:
    """Run steps, each after those it needs. One that is still running when the time is over is killed.

    Args:
        steps: in an order in which each comes after those it needs.
        logs: the folder of each step's log.
        minutes: when to stop.
    """
    outcomes: dict[str, Outcome] = {}
    isolation, deadline = Isolation(), time.monotonic() + 60 * minutes
    for step in steps:
        missing = [name for name in step.needs if outcomes[name].result is None]
        if missing:
            outcome = Outcome(step, f"not run: it needs {', '.join(missing)}")
        else:
            outcome = _run(step, logs / step.name, isolation, deadline - time.monotonic())
        print(f"{step.name}: {outcome.state}", file=sys.stderr, flush=True)
        outcomes[step.name] = outcome
    return list(outcomes.values())


def _run(step: Step, log: Path, isolation: Isolation, seconds: float) -> Outcome:
    if seconds <= 0:
        return Outcome(step, "not run: the time is over")
    ended = isolation.run(compute, log, seconds, step.function)
    if ended.exit_code is None:
        return Outcome(step, f"cut off after {seconds:.0f} s: the time is over")
    if ended.value is None:
        lines = [line for line in f"{ended.stdout}\n{ended.stderr}".splitlines() if line.strip()]
        state = [f"failed with exit code {ended.exit_code}, see {log}.err", *lines[-_LINES:]]
        return Outcome(step, "\n    ".join(state))
    result = Result(**{**ended.value, "seconds": ended.seconds})
    return Outcome(step, "wrong" if result.wrong else "ok", result)


def problems_of(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield each wrong number and each step without a result, by the name of the step."""
    for outcome in outcomes:
        problems = outcome.result.wrong if outcome.result else [outcome.state]
        yield from (f"{outcome.step.name}: {problem}" for problem in problems)


def print_tables(outcomes: Sequence[Outcome]) -> None:
    """Print the rows of all steps as Markdown, a table for each kind, and the time of each step."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        tables.setdefault(outcome.step.table, []).extend(outcome.result.rows if outcome.result else ())
    for outcome in outcomes:
        seconds, state = outcome.result.seconds if outcome.result else "", outcome.state.partition("\n")[0]
        tables.setdefault("Steps", []).append({"step": outcome.step.name, "seconds": seconds, "result": state})
    for title, rows in tables.items():
        _print_table(title, rows)


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return
    print(f"\n### {title}\n")
    print_head(columns)
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print_row(*(f"{cell:.3g}" if isinstance(cell, float) else cell for cell in cells))
