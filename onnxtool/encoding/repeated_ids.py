"""Which ids of a corpus an earlier text has, found by sorting digests of all ids on the disk.

Whoever reads texts writes their digests a block at a time, each block sorted: a run. All runs are then read side by
side, a range of digests at a time, so that of each id all occurrences are seen together. In memory are one block, one
range, and a bit for each text. Whoever streams, and has to know at once, asks `KnownIds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("place", "<u4")])
# Of all digests, by their highest bits; digests are spread evenly, and an id is at most once in a run.
_RANGES = 1024
_EDGES = np.arange(1, _RANGES, dtype=np.uint64) << np.uint64(64 - 10)
_MOST_AT_ONCE = 1 << 21  # digests: 100 MB while they are sorted


class Run(NamedTuple):
    """Digests of a block of texts, sorted, in a file.

    Attributes:
        path: of the file.
        row: its first row there.
        place: the number of its first text, in the whole corpus.
        ends: how many of its rows lie in the first ranges of digests: int32 [R + 1], from 0 to all.
    """

    path: Path
    row: int
    place: int
    ends: NDArray[np.int32]


class RunWriter:
    """Writes runs into a file, and where their ranges end into another one beside it."""

    def __init__(self, path: Path) -> None:
        self._files = path.open("wb"), _ends_file(path).open("wb")

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def write(self, ids: bytes | bytearray) -> NDArray[np.int64]:
        """Write the digests of a block of N texts, in their order, and return the places where one is repeated."""
        digests = np.frombuffer(ids, "<u8").reshape(-1, 2)
        places = np.arange(len(digests))
        rows = np.empty(len(digests), _ROW)
        rows["high"], rows["low"], rows["place"] = digests[:, 0], digests[:, 1], places
        repeated = _repeated(rows["high"], rows["low"], places)
        rows = np.delete(rows, repeated)
        rows = rows[np.argsort(rows["high"])]
        rows.tofile(self._files[0])
        np.array([0, *np.searchsorted(rows["high"], _EDGES), len(rows)], "<i4").tofile(self._files[1])
        return repeated


def read_ends(path: Path) -> NDArray[np.int32]:
    """Read where the ranges of all runs of a file end: int32 [runs, R + 1], from 0 to all."""
    return np.fromfile(_ends_file(path), "<i4").reshape(-1, _RANGES + 1)


def _ends_file(path: Path) -> Path:
    return path.with_name(f"{path.name}-ends")


def _repeated(high: NDArray[np.uint64], low: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of digests of which there is one at an earlier place.

    Nearly always no two are the same, which sorting by one half of them shows.
    """
    order = np.argsort(high)
    same = high[order[1:]] == high[order[:-1]]
    if not same.any():
        return np.empty(0, np.int64)
    some = order[np.append(same, False) | np.append(False, same)]
    some = some[np.lexsort((places[some], low[some], high[some]))]
    again = (high[some[1:]] == high[some[:-1]]) & (low[some[1:]] == low[some[:-1]])
    found: NDArray[np.int64] = places[some[1:][again]]
    return found


class RepeatedIds:
    """A bit for each text: whether an earlier one, of another run, has its id."""

    def __init__(self, runs: Sequence[Run], num_texts: int) -> None:
        self._bits = np.zeros(num_texts // 8 + 1, np.uint8)
        if len(runs) > 1:
            for first, last in _ranges(runs):
                rows, places = _rows_between(runs, first, last)
                found = _repeated(rows["high"], rows["low"], places)
                np.bitwise_or.at(self._bits, found >> 3, (1 << (found & 7)).astype(np.uint8))

    def between(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return the bits of texts from the number `begin` to before `end`."""
        first = begin // 8 * 8
        bits = np.unpackbits(self._bits[first // 8 : end // 8 + 1], bitorder="little")
        return bits[begin - first : end - first].astype(bool)


def _ranges(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """Yield ranges of digests, each as large as can be sorted at once."""
    ends = np.stack([run.ends for run in runs]).sum(axis=0, dtype=np.int64)
    first = 0
    while first < _RANGES:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _MOST_AT_ONCE, "right")) - 1)
        yield first, last
        first = last


def _rows_between(runs: Sequence[Run], first: int, last: int) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Read the rows of a range, and the numbers of their texts in the whole corpus."""
    parts, places = [], []
    for path, of_file in itertools.groupby(runs, lambda run: run.path):
        with path.open("rb") as file:
            for run in of_file:
                begin, end = int(run.ends[first]), int(run.ends[last])
                file.seek((run.row + begin) * _ROW.itemsize)
                rows = np.fromfile(file, _ROW, end - begin)
                parts.append(rows)
                places.append(rows["place"] + np.int64(run.place))
    return np.concatenate(parts), np.concatenate(places)
