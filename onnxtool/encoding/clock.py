"""The progress of a run over a corpus, and the time it still takes."""

from __future__ import annotations

import time

from onnxtool.encoding.options import CorpusProgress
from onnxtool.encoding.windows import Window


class Clock:
    """Counts texts, and the share of the input that they are.

    Where in the input a batch ends is not known, as texts are sorted; it is taken for so much of its window as it has
    of the window's tokens, which is what takes time.
    """

    def __init__(self, start_s: float, total_bytes: int, num_texts: int) -> None:
        """Begin at `start_s` of time.perf_counter, with the texts that earlier runs encoded."""
        self._start_s = start_s
        self._total_bytes = max(1, total_bytes)
        self._num_before = self._num_texts = num_texts
        self._window: Window | None = None
        self._share = self._share_before = self._share_in_window = 0.0
        # Time and share at the first batch: what an earlier run did took this one no time.
        self._first: tuple[float, float] | None = None

    def after(self, window: Window, num_texts: int, share_of_tokens: float) -> CorpusProgress:
        """Return the state of the run after a batch of `num_texts`, with this share of the window's tokens."""
        now = time.perf_counter()
        if window is not self._window:
            # Where the first window begins, only an earlier run could tell; with a new one it is the beginning.
            is_resumed = self._window is None and self._num_before > 0
            self._window, self._share_in_window = window, 0.0
            self._share_before = self._end_of(window) if is_resumed else self._share
        self._num_texts += num_texts
        self._share_in_window += share_of_tokens
        self._share = self._share_before + self._share_in_window * (self._end_of(window) - self._share_before)
        left = None
        if self._first is None:
            self._first = (now, self._share)
        elif self._share > self._first[1]:
            left = (now - self._first[0]) * (1 - self._share) / (self._share - self._first[1])
        rate = (self._num_texts - self._num_before) / (now - self._start_s)
        return CorpusProgress(self._num_texts, self._share, rate, left)

    def _end_of(self, window: Window) -> float:
        return window.position_bytes / self._total_bytes
