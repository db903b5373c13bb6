"""Progress on stderr while a command works: one line that rewrites itself, or one log line per stage."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from onnxtool.cli.streams import say
from onnxtool.progress import OnProgress, Stage, ignore, listening

if TYPE_CHECKING:
    from rich.progress import Progress

_LOGGER = logging.getLogger(__name__)
LINE_EVERY_S = 10.0  # between log lines of a running stage


def is_interactive() -> bool:
    """Whether stderr is a terminal whose lines can be rewritten, with no log lines in between."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not _is_logged()


def _is_logged() -> bool:
    """Whether stages go to the log of -v. A level set elsewhere for all loggers does not count."""
    return bool(logging.getLogger("onnxtool").handlers) and _LOGGER.isEnabledFor(logging.INFO)


@contextmanager
def progress(*, quiet: bool) -> Iterator[None]:
    """Report the library's progress inside the block on stderr: a bar on a terminal, else one line per stage."""
    with ExitStack() as stack:
        if quiet:
            show: OnProgress = ignore
        elif _is_logged():
            show = Lines(say=_LOGGER.info)
        elif is_interactive():
            show = stack.enter_context(stage_bar())
        else:
            show = Lines()
        with listening(show):
            yield


@contextmanager
def stage_bar() -> Iterator[OnProgress]:
    """Provide a function that shows a stage on the terminal: its progress, elapsed time and remaining time."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with bar(*columns) as shown:
        task = shown.add_task("starting", total=None, left="")
        name = ""

        def show(stage: str) -> None:
            nonlocal name
            if _name(stage) != name:
                shown.reset(task)
                # `reset` would keep the old value if it is unknown now.
                shown.tasks[0].total = (stage.total or None) if isinstance(stage, Stage) else None
                name = _name(stage)
            done = stage.done if isinstance(stage, Stage) else 0
            shown.update(task, description=stage, completed=done, left=_left(shown.tasks[0].elapsed, stage))

        yield show


@contextmanager
def bar(*columns: object) -> Iterator[Progress]:
    """Show rich columns on stderr, and erase them at the end."""
    from rich.console import Console
    from rich.progress import Progress

    # Bound to the stream itself: the block may replace sys.stderr to silence libraries.
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as shown:  # type: ignore[arg-type]
        yield shown


class Lines:
    """Print a line for each new stage, and one now and then while it lasts."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], object] = say,
    ) -> None:
        """Start; `clock` returns seconds, and `say` prints a line."""
        self._clock = clock
        self._say = say
        self._name = ""
        self._start = self._last = 0.0

    def __call__(self, stage: str) -> None:
        """Print the stage if it is new or a line is due."""
        now = self._clock()
        is_new = _name(stage) != self._name
        if is_new:
            self._name, self._start = _name(stage), now
        if is_new or now - self._last >= LINE_EVERY_S:
            self._last = now
            left = _left(now - self._start, stage)
            self._say(f"{stage} …{left and f' {left}'}")


def clock(seconds: float) -> str:
    """Write a duration as hours, minutes and seconds."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}"


def _name(stage: str) -> str:
    return stage.name if isinstance(stage, Stage) else stage


def _left(elapsed_s: float | None, stage: str) -> str:
    """Return the remaining time of a stage as text, once some of it is done."""
    left_s = stage.time_left_s(elapsed_s or 0.0) if isinstance(stage, Stage) else None
    return "" if left_s is None else f"{clock(left_s)} left"
