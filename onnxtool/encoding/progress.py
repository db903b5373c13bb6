"""Encoding progress: the reports of workers during a run, and their sum."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import add
from typing import NamedTuple

from onnxtool.encoding.options import CorpusProgress
from onnxtool.progress import listener


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


class RunningTexts(NamedTuple):
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


OnRunning = Callable[[RunningTexts], None]


def ignore(_running: RunningTexts) -> None:
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
        seconds_left = None
        if self._first is None:
            self._first = (now, share)
        elif share > self._first[1]:
            seconds_left = (now - self._first[0]) * (1 - share) / (share - self._first[1])
        seconds = max(1e-9, now - self._start_s)
        self._tell(
            CorpusProgress(
                num_texts=self._num_before + self.total.texts,
                share=share,
                texts_per_s=self.total.texts / seconds,
                seconds_left=seconds_left,
                tokens_per_s=self.total.tokens / seconds,
                num_rejects=self.total.rejects,
            )
        )
