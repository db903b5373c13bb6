"""Encoding progress: reports during a run, and files for programs, as JSON and for Prometheus."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import add
from typing import Annotated, NamedTuple

from onnxtool.encoding.options import CorpusProgress
from onnxtool.errors import NO_SPACE, OutputWriteError
from onnxtool.model_file import check_not_input, write_text
from onnxtool.options import UNSET, Option, OptionalPath, Options
from onnxtool.progress import listener, listening

EVERY_S = 10.0


class Event(NamedTuple):
    """A worker's progress report; its figures are increments.

    Attributes:
        texts: number of texts run.
        encoded: number of texts in written shards.
    """

    texts: int = 0
    encoded: int = 0
    size_bytes: float = 0.0
    tokens: int = 0
    rejects: int = 0
    splits: int = 0

    def plus(self, other: Event) -> Event:
        """Add the figures of another event."""
        return Event(*map(add, self, other))


class Running(NamedTuple):
    """Texts that a worker begins to tokenize or run, or is done with.

    Attributes:
        shard: the shard that they are part of.
        first: the id of the first of them.
        last: the id of the last.
        change: 1 at the beginning, -1 at the end.
    """

    shard: str
    first: str
    last: str
    change: int = 1


OnRunning = Callable[[Running], None]


def ignore(_running: Running) -> None:
    """Do nothing: this process would end with the texts."""


OnEvent = Callable[[Event], None]


class Tally:
    """Sum the workers' reports, and report their total progress.

    Attributes:
        total: the sum of all events.
    """

    def __init__(self) -> None:
        self.total = Event()
        self._tell = listener()
        self.begin(0)

    def begin(self, total_bytes: int, done_bytes: int = 0, num_texts: int = 0) -> None:
        """Start from the texts and bytes that earlier runs have encoded."""
        self._total_bytes, self._done_bytes, self._num_before = max(1, total_bytes), done_bytes, num_texts
        self._start_s = time.perf_counter()
        # Time and share at the first batch: earlier work, such as loading the model, says nothing about the rest.
        self._first: tuple[float, float] | None = None

    def add(self, event: Event) -> None:
        """Add a worker's report."""
        self.total = self.total.plus(event)
        now = time.perf_counter()
        share = min(1.0, (self._done_bytes + self.total.size_bytes) / self._total_bytes)
        left = None
        if self._first is None:
            self._first = (now, share)
        elif share > self._first[1]:
            left = (now - self._first[0]) * (1 - share) / (share - self._first[1])
        seconds = max(1e-9, now - self._start_s)
        self._tell(
            CorpusProgress(
                num_texts=self._num_before + self.total.texts,
                share=share,
                texts_per_s=self.total.texts / seconds,
                seconds_left=left,
                tokens_per_s=self.total.tokens / seconds,
                num_rejects=self.total.rejects,
            )
        )


class ProgressOptions(Options):
    """Destinations of progress besides the terminal.

    Attributes:
        progress_log: a file to which JSON lines are appended.
        metrics: a file for Prometheus, replaced on each update.
    """

    progress_log: Annotated[
        OptionalPath,
        Option(
            f"Append the progress to this file every {EVERY_S:.0f} s, as a line of JSON.", metavar="FILE", writes="file"
        ),
    ] = UNSET
    metrics: Annotated[
        OptionalPath,
        Option(
            "Keep this file up to date with the same figures in Prometheus format.", metavar="NAME.prom", writes="file"
        ),
    ] = UNSET


_METRICS = {
    "num_texts": ("texts", "Texts that are encoded."),
    "share": ("share_ratio", "Share of the work that is done, from 0 to 1."),
    "texts_per_s": ("texts_per_second", "Texts encoded per second by this run."),
    "tokens_per_s": ("tokens_per_second", "Tokens read per second by this run."),
    "seconds_left": ("left_seconds", "Seconds until all is done, at this rate."),
    "num_rejects": ("rejects", "Lines that gave no vector."),
}


class ProgressFiles:
    """Write a run's progress to files, periodically and at its end.

    Raises:
        OutputWriteError: one of them cannot be written.
    """

    def __init__(self, options: ProgressOptions) -> None:
        self._log, self._metrics = options.progress_log, options.metrics
        for path in filter(None, (self._log, self._metrics)):
            check_not_input(path)
        self._next = 0.0
        self._last = CorpusProgress(0, 0.0, 0.0, None)
        self._write("started")

    def add(self, progress: CorpusProgress) -> None:
        """Record the progress of the run."""
        self._last = progress
        if time.monotonic() >= self._next:
            self._write("running")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the progress of the run in the block, and whether it succeeds; the outer listener is told as well."""
        show, state = listener(), "failed"

        def note(stage: str) -> None:
            show(stage)
            if isinstance(stage, CorpusProgress):
                self.add(stage)

        try:
            with listening(note):
                yield
            state = "done"
        finally:
            self._write(state)

    def _write(self, state: str) -> None:
        self._next = time.monotonic() + EVERY_S
        try:
            if self._log is not None:
                line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "state": state, **self._last.figures()}
                with self._log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            if self._metrics is not None:
                write_text(self._metrics, _metrics(self._last, state), force=True)  # readers find a complete file
        except OSError as error:
            raise OutputWriteError(
                f"cannot write {error.filename or self._log}: {error.strerror}",
                f"pass another file, or {'make room' if error.errno in NO_SPACE else 'check its permissions'}",
            ) from error


def _metrics(progress: CorpusProgress, state: str) -> str:
    lines = []
    for name, value in progress.figures().items():
        metric, meaning = _METRICS[name]
        if value is not None:
            lines += _gauge(metric, meaning, value)
    lines += _gauge("done", "1 when the run has ended as it should, else 0.", int(state == "done"))
    lines += _gauge("updated_timestamp_seconds", "When this was written, in seconds since 1970.", round(time.time(), 3))
    return "\n".join(lines) + "\n"


def _gauge(metric: str, meaning: str, value: float) -> list[str]:
    name = f"onnxtool_encode_{metric}"
    return [f"# HELP {name} {meaning}", f"# TYPE {name} gauge", f"{name} {value}"]
