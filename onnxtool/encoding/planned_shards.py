"""The shards of a plan, as they follow from what was kept of its texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding.digests import shard_digest
from onnxtool.encoding.sources import Position

MOST_SHARDS = 1_000_000  # every machine holds all of them: half a gigabyte
Texts = NDArray[np.void]
"""Of N texts, what `onnxtool.encoding.pieces.TEXT` has."""


class PlannedShard(NamedTuple):
    """A shard, and where in the corpus the lines begin that are its own.

    Attributes:
        source: the number of the file.
        line: lines of it that come before; rows of a table.
        offset: bytes of it that come before, unpacked; rows of a table.
        texts: that it has.
        digest: of their ids and contents.
        rejects: lines among them that give no text, or an id that an earlier line has.
        repeated: of the texts that are read, counted from 0, those with such an id: ranges, without their ends.
    """

    source: int
    line: int
    offset: int
    texts: int
    digest: str
    rejects: int
    repeated: tuple[tuple[int, int], ...]

    @property
    def begin(self) -> Position:
        """Where its lines begin."""
        return Position(0, self.source, self.line, self.offset)


class ShardCutter:
    """Cuts texts, which come in the order of the corpus, into shards.

    What follows the last text belongs to the last shard, so that each shard is given when the next one has a text.
    """

    def __init__(self, shard_size: int) -> None:
        self._size = shard_size
        self._begin = Position()
        self._last: tuple[PlannedShard, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._digest = shard_digest()
        self._num_texts = self._num_read = self._num_rejects = 0
        self._repeated: list[tuple[int, int]] = []

    def reject(self, count: int) -> None:
        """Pass over lines that give no text."""
        self._num_rejects += count

    def add(self, texts: Texts, repeated: NDArray[np.bool_]) -> Iterator[PlannedShard]:
        """Add N texts, and yield the shards that are closed.

        Args:
            texts: that are read; `rejects` here are of the lines before each, behind the text before it.
            repeated: bool [N], those whose id an earlier one has.
        """
        kept = np.flatnonzero(~repeated)
        place = first = 0
        while place < len(texts):
            if first == len(kept):
                self._take(texts[place:], repeated[place:])
                return
            if not self._num_texts and self._last is not None:
                yield self._last[0]
                self._last = None
            last = min(first + self._size - self._num_texts, len(kept))
            end = int(kept[last - 1]) + 1
            self._take(texts[place:end], repeated[place:end])
            place, first = end, last
            if self._num_texts == self._size:
                self._close(texts[end - 1])

    def _take(self, texts: Texts, repeated: NDArray[np.bool_]) -> None:
        self._digest.update(texts["digest"][~repeated].tobytes())
        changes = np.flatnonzero(np.diff(repeated, prepend=False, append=False)).reshape(-1, 2) + self._num_read
        for begin, end in changes.tolist():
            if self._repeated and self._repeated[-1][1] == begin:
                begin = self._repeated.pop()[0]
            self._repeated.append((begin, end))
        num_repeated = int(repeated.sum())
        self._num_rejects += int(texts["rejects"].sum()) + num_repeated
        self._num_read += len(texts)
        self._num_texts += len(texts) - num_repeated

    def _close(self, text: np.void) -> None:
        shard = PlannedShard(
            *self._begin[1:], self._num_texts, self._digest.hexdigest(), self._num_rejects, tuple(self._repeated)
        )
        self._last = shard, self._num_read
        self._begin = Position(0, *(int(text[name]) for name in ("source", "line", "offset")))
        self._clear()

    def finish(self) -> Iterator[PlannedShard]:
        """Yield the last shard; none where there is no text."""
        if self._num_texts:
            yield PlannedShard(
                *self._begin[1:], self._num_texts, self._digest.hexdigest(), self._num_rejects, tuple(self._repeated)
            )
        elif self._last is not None:
            shard, num_read = self._last
            trailing = tuple((num_read + begin, num_read + end) for begin, end in self._repeated)
            yield shard._replace(rejects=shard.rejects + self._num_rejects, repeated=shard.repeated + trailing)
