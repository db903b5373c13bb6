"""Run steps in processes of their own and keep their results as files, so that the next run continues after the last.

A script makes the same steps in each of its processes: `run_steps` starts it again with `--step NAME`, and that process
calls `run_step`. For POSIX systems.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_LINES = 6  # of a failed step's log


@dataclass
class Result:
    """The rows of a table, what is wrong in them, and what was left out and why."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
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
    """What became of a step: `ok`, `wrong`, or why it has no result."""

    step: Step
    state: str
    result: Result | None = None
    kept: bool = False


def run_step(step: Step, folder: Path, stamp: Mapping[str, str]) -> None:
    """Run a step in this process, and write its result, complete or not at all."""
    start, path = time.perf_counter(), _path(step, folder)
    result = step.function()
    result.seconds = time.perf_counter() - start
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"stamp": stamp, "result": asdict(result)}, indent=1), encoding="utf-8")
    os.replace(partial, path)  # noqa: PTH105 - the name says that it replaces


def run_steps(
    steps: Sequence[Step],
    folder: Path,
    stamp: Mapping[str, str],
    command: Sequence[str],
    *,
    again: Collection[str] = (),
    minutes: float,
) -> list[Outcome]:
    """Run all steps that have no result from the same `stamp` yet.

    A step also runs again if a step that it needs does. A step that is still running when the time is over is killed.

    Args:
        steps: in an order in which each comes after those it needs.
        folder: the folder of results and of each step's log.
        stamp: what results depend on, such as versions.
        command: the command line of the script, to which `--step NAME` is added.
        again: names of steps or tables whose results are not kept.
        minutes: when to stop.
    """
    kept: dict[str, Result] = {}
    for step in steps:
        reusable = not {step.name, step.table} & set(again) and kept.keys() >= set(step.needs)
        if reusable and (result := _read(step, folder, stamp)):
            kept[step.name] = result
        else:  # deleted before anything runs: an interrupted run must not leave results from files that it replaced
            _path(step, folder).unlink(missing_ok=True)
    outcomes: dict[str, Outcome] = {}
    deadline = time.monotonic() + 60 * minutes
    for step in steps:
        missing = [name for name in step.needs if outcomes[name].result is None]
        if step.name in kept:
            outcome = Outcome(step, "wrong" if kept[step.name].wrong else "ok", kept[step.name], kept=True)
        elif missing:
            outcome = Outcome(step, f"not run: it needs {', '.join(missing)}")
        else:
            outcome = _start(step, folder, stamp, command, deadline - time.monotonic())
        print(f"{step.name}: {outcome.state}{', kept' if outcome.kept else ''}", file=sys.stderr, flush=True)
        outcomes[step.name] = outcome
    return list(outcomes.values())


def _start(step: Step, folder: Path, stamp: Mapping[str, str], command: Sequence[str], seconds: float) -> Outcome:
    if seconds <= 0:
        return Outcome(step, "not run: the time is over")
    log = folder / f"{step.name}.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, "--step", step.name],
            stdout=output,
            stderr=output,
            start_new_session=True,  # to end the commands that it started as well
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Outcome(step, f"cut off after {seconds:.0f} s: the time is over")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    result = _read(step, folder, stamp)
    if process.returncode or result is None:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        state = [f"failed with exit code {process.returncode}, see {log}", *lines[-_LINES:]]
        return Outcome(step, "\n    ".join(state))
    return Outcome(step, "wrong" if result.wrong else "ok", result)


def _path(step: Step, folder: Path) -> Path:
    return folder / f"{step.name}.json"


def _read(step: Step, folder: Path, stamp: Mapping[str, str]) -> Result | None:
    """Return the result of an earlier process; None if there is none, or its stamp differs."""
    try:
        record = json.loads(_path(step, folder).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Result(**record["result"]) if record["stamp"] == stamp else None


def problems_of(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield each wrong number and each step without a result, by the name of the step."""
    for one in outcomes:
        yield from (f"{one.step.name}: {problem}" for problem in (one.result.wrong if one.result else [one.state]))


def print_tables(outcomes: Sequence[Outcome]) -> None:
    """Print the rows of all steps as Markdown, a table for each kind, and the time of each step."""
    for table in dict.fromkeys(one.step.table for one in outcomes):
        rows = [row for one in outcomes if one.step.table == table and one.result for row in one.result.rows]
        _print_table(table, rows)
    times = [
        {
            "step": one.step.name,
            "seconds": one.result.seconds if one.result else "",
            "result": one.state.split("\n")[0] + (", kept" if one.kept else ""),
        }
        for one in outcomes
    ]
    _print_table("Steps", times)
    for note in (note for one in outcomes if one.result for note in one.result.notes):
        print(f"- {note}")


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        return
    print(f"\n### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print(f"| {' | '.join(f'{one:.3g}' if isinstance(one, float) else str(one) for one in cells)} |")
    print(end="", flush=True)
