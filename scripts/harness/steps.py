"""Run steps in processes of their own, one after the other, and print their results as tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.isolation import Isolation

_LINES = 6  # of what a failed step said


@dataclass
class Result:
    """The rows of a table, what is wrong in them, and the seconds that they took."""

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

    def run(self) -> dict[str, Any]:
        """Return the result as JSON can hold it."""
        start = time.perf_counter()
        result = self.function()
        return asdict(result) | {"seconds": time.perf_counter() - start}


@dataclass(frozen=True)
class Outcome:
    """What became of a step: `ok`, `wrong`, or why it has no result."""

    step: Step
    state: str
    result: Result | None = None


def run_steps(steps: Sequence[Step], logs: Path, minutes: float) -> list[Outcome]:
    """Run steps, except those that need one without a result.

    Args:
        steps: in an order in which each comes after those it needs; files of one that is not among them are there.
        logs: the folder for what each prints.
        minutes: when to stop; a step that is still running then is killed.
    """
    isolation, deadline = Isolation(), time.monotonic() + 60 * minutes
    outcomes: dict[str, Outcome] = {}
    for step in steps:
        missing = [name for name in step.needs if name in outcomes and outcomes[name].result is None]
        if missing:
            outcome = Outcome(step, f"not run: it needs {', '.join(missing)}")
        else:
            outcome = _start(isolation, step, logs, deadline - time.monotonic())
        print(f"{step.name}: {outcome.state}", file=sys.stderr, flush=True)
        outcomes[step.name] = outcome
    return list(outcomes.values())


def _start(isolation: Isolation, step: Step, logs: Path, seconds: float) -> Outcome:
    if seconds <= 0:
        return Outcome(step, "not run: the time is over")
    ended = isolation.run(step.run, logs / step.name, seconds)
    if ended.exit_code is None:
        return Outcome(step, f"cut off after {seconds:.0f} s: the time is over")
    if ended.value is None:
        lines = [line for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
        return Outcome(step, "\n    ".join([f"failed with exit code {ended.exit_code}", *lines[-_LINES:]]))
    result = Result(**ended.value)
    return Outcome(step, "wrong" if result.wrong else "ok", result)


def problems_of(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield each wrong number and each step without a result, by the name of the step."""
    for one in outcomes:
        yield from (f"{one.step.name}: {problem}" for problem in (one.result.wrong if one.result else [one.state]))


def print_tables(outcomes: Sequence[Outcome]) -> None:
    """Print the rows of all steps as Markdown, a table for each kind, and the time of each step."""
    for table in dict.fromkeys(one.step.table for one in outcomes):
        rows = [row for one in outcomes if one.step.table == table and one.result for row in one.result.rows]
        _print_table(table, rows)
    seconds = {one.step.name: one.result.seconds if one.result else "" for one in outcomes}
    states = {one.step.name: one.state.split("\n")[0] for one in outcomes}
    _print_table("Steps", [{"step": name, "seconds": seconds[name], "result": states[name]} for name in states])


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print(f"| {' | '.join(f'{one:.3g}' if isinstance(one, float) else str(one) for one in cells)} |", flush=True)
