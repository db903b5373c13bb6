"""Read a corpus once, by several processes, and cut it into shards.

The pieces and what is found in them do not depend on how many processes there are, nor on which reads what.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from onnxtool.encoding.files import scratch_folder
from onnxtool.encoding.options import CorpusProgress
from onnxtool.encoding.pieces import (
    BLOCK_TEXTS,
    TEXT,
    OnRead,
    Piece,
    Scanned,
    count_piece,
    cut_pieces,
    ids_file,
    scan_piece,
    texts_file,
)
from onnxtool.encoding.planned_shards import MOST_SHARDS, PlannedShard, ShardCutter
from onnxtool.encoding.processes import Died, WorkerProcess, share_out
from onnxtool.encoding.repeated_ids import RepeatedIds, Run, read_ends
from onnxtool.encoding.sources import Source, no_texts
from onnxtool.encoding.windows import REPEATED_ID
from onnxtool.errors import InputError, OnnxtoolError
from onnxtool.interruption import check_interrupted
from onnxtool.progress import listener

Result = TypeVar("Result")


def scan_corpus(
    sources: Sequence[Source], shard_size: int, workers: int
) -> tuple[tuple[PlannedShard, ...], Counter[str]]:
    """Read a corpus; return its shards, and how many lines give no text, by their kinds.

    Args:
        sources: its files.
        shard_size: texts of a shard; the last one has fewer.
        workers: processes that read; where they would be one, it is this process.

    Raises:
        InputError: a file cannot be read or is damaged, the first of them in order; no line gives a text; or there
            are more shards than a plan may have.
        OutputWriteError: the folder for temporary files is full.
    """
    pieces = cut_pieces(sources)
    reasons: Counter[str] = Counter()
    with scratch_folder("plan") as folder:
        with _Readers(folder, min(workers, len(pieces)), _Meter(pieces)) as readers:
            pieces = readers.with_lines(pieces)
            found = readers.scan(pieces)
        for one in found:
            reasons.update(one.reasons)
        num_texts = sum(one.num_texts for one in found)
        if not num_texts:
            raise no_texts(sources, reasons, _first_reject(pieces, found))
        repeated = RepeatedIds(_runs(pieces, found, folder), num_texts)
        cut = _cut(pieces, found, folder, repeated, ShardCutter(shard_size))
        shards = tuple(itertools.islice(cut, MOST_SHARDS + 1))
    if len(shards) > MOST_SHARDS:
        raise InputError(
            f"the collection has {num_texts} texts, and so more than {MOST_SHARDS} shards",
            f"pass --shard_size {-(-num_texts // MOST_SHARDS)} or more",
        )
    if num_repeated := num_texts - sum(shard.texts for shard in shards):
        reasons[REPEATED_ID] = num_repeated
    return shards, reasons


def _first_reject(pieces: Sequence[Piece], found: Sequence[Scanned]) -> str:
    for one, lines in zip(found, _lines_before(pieces, found), strict=True):
        if one.first_reject is not None:
            file, line, reason = one.first_reject
            return f"the first is {file}:{line + lines}, which {reason}"
    return ""


def _lines_before(pieces: Sequence[Piece], found: Sequence[Scanned]) -> list[int]:
    """Return what is to be added to numbers of lines of each piece, which are counted where they are not known."""
    before: Counter[int] = Counter()
    added = []
    for piece, one in zip(pieces, found, strict=True):
        added.append(before[piece.first] - piece.line if piece.end is not None else 0)
        before[piece.first] += one.num_lines
    return added


def _runs(pieces: Sequence[Piece], found: Sequence[Scanned], folder: Path) -> list[Run]:
    runs = []
    place = 0
    for piece, one in zip(pieces, found, strict=True):
        row = 0
        for number, ends in enumerate(read_ends(ids_file(folder, piece.number))):
            runs.append(Run(ids_file(folder, piece.number), row, place + number * BLOCK_TEXTS, ends))
            row += int(ends[-1])
        place += one.num_texts
    return runs


def _cut(
    pieces: Sequence[Piece],
    found: Sequence[Scanned],
    folder: Path,
    repeated: RepeatedIds,
    cutter: ShardCutter,
) -> Iterator[PlannedShard]:
    place = 0
    for piece, one, lines in zip(pieces, found, _lines_before(pieces, found), strict=True):
        with texts_file(folder, piece.number).open("rb") as file:
            while len(texts := np.fromfile(file, TEXT, BLOCK_TEXTS)):
                check_interrupted()
                texts["line"] += np.uint64(lines)
                yield from cutter.add(texts, texts["is_repeated"] | repeated.between(place, place + len(texts)))
                place += len(texts)
        cutter.reject(one.num_trailing)
    yield from cutter.finish()


class _Here:
    """Reads pieces in this process."""

    def __init__(self) -> None:
        self._is_stopped = False

    def count(self, piece: Piece) -> int:
        return count_piece(piece)

    def scan(self, piece: Piece, folder: Path, on_read: OnRead) -> Scanned:
        def read(texts: int, size: int) -> None:
            if self._is_stopped:
                raise OnnxtoolError("the reader was stopped")
            on_read(texts, size)

        return scan_piece(piece, folder, read)

    def stop(self) -> None:
        self._is_stopped = True

    close = stop


class _Process:
    """Reads pieces in another process."""

    def __init__(self) -> None:
        self._process = WorkerProcess("onnxtool.encoding.plan_worker")
        self.stop, self.close = self._process.stop, self._process.close

    def count(self, piece: Piece) -> int:
        try:
            (answer,) = self._process.ask({"count": piece.to_json()})
        except Died as died:
            raise _dead(died, str(piece.sources[0].path)) from None
        return int(answer["lines"])

    def scan(self, piece: Piece, folder: Path, on_read: OnRead) -> Scanned:
        try:
            return self._scan(piece, folder, on_read)
        except Died as died:
            raise self._dead(piece, folder, died) from None

    def _dead(self, piece: Piece, folder: Path, died: Died) -> InputError:
        """Name the file at fault, which ends the process also by itself."""
        name = str(piece.sources[0].path)
        if len(piece.sources) > 1:
            name = f"{name} or one of the {len(piece.sources) - 1} files behind it"
            for source in piece.sources:
                try:
                    self._scan(Piece(piece.number, piece.first, (source,), 0), folder, lambda *_: None)
                except Died:
                    name = str(source.path)
                    break
        return _dead(died, name)

    def _scan(self, piece: Piece, folder: Path, on_read: OnRead) -> Scanned:
        found = None
        for answer in self._process.ask({"scan": piece.to_json(), "folder": str(folder)}):
            if "found" in answer:
                found = Scanned(**answer["found"])
            else:
                on_read(answer["texts"], answer["bytes"])
        assert found is not None  # noqa: S101  it is the last answer
        return found


def _dead(died: Died, name: str) -> InputError:
    return InputError(
        f"cannot read {name}: the process that reads it ended ({died})",
        "check the file, or leave more memory to each process: fewer --workers",
    )


class _Meter:
    """Adds up what is read, in whichever thread it is told."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._tell = listener()  # of the thread that scans: readers tell it from their own
        self._total = max(1, sum(piece.size_bytes for piece in pieces))
        self._start = time.perf_counter()
        self._texts: Counter[int] = Counter()  # by pieces
        self._bytes: Counter[int] = Counter()
        self._lock = threading.Lock()

    def tell(self, piece: Piece, texts: int, size: int) -> None:
        """Say how many texts and bytes of a piece are read so far."""
        with self._lock:
            self._texts[piece.number] = texts
            self._bytes[piece.number] = min(piece.size_bytes, size)
            seconds, share = time.perf_counter() - self._start, self._bytes.total() / self._total
            left = seconds * (1 - share) / share if share else None
            num_texts = self._texts.total()
            self._tell(CorpusProgress(num_texts, share, num_texts / seconds, left))


class _Readers:
    """Who reads pieces: some processes, or this one where they would be one."""

    def __init__(self, folder: Path, count: int, meter: _Meter) -> None:
        self._folder = folder
        self._readers: list[_Here | _Process] = [_Process() for _ in range(count)] if count > 1 else [_Here()]
        self._meter = meter

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.close()

    def with_lines(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Count the lines before parts of files whose texts are called by them."""
        counted = [piece for piece in pieces if piece.is_counted_first]
        counts = iter(self._all(counted, lambda reader, piece: reader.count(piece)))
        before: Counter[int] = Counter()
        found = []
        for piece in pieces:
            if piece.is_counted_first:
                found.append(replace(piece, line=before[piece.first]))
                before[piece.first] += next(counts)
            else:
                found.append(piece)
        return found

    def scan(self, pieces: Sequence[Piece]) -> list[Scanned]:
        """Read pieces into the folder, and return what they have."""

        def scan(reader: _Here | _Process, piece: Piece) -> Scanned:
            def tell(texts: int, size: int) -> None:
                self._meter.tell(piece, texts, size)

            found = reader.scan(piece, self._folder, tell)
            tell(found.num_texts, piece.size_bytes)
            return found

        return self._all(pieces, scan)

    def _all(self, pieces: Sequence[Piece], read: Callable[[_Here | _Process, Piece], Result]) -> list[Result]:
        """Read pieces at the same time; of several that fail, the first one in order is the error."""
        failed = len(pieces)

        def attempt(reader: _Here | _Process, task: tuple[int, Piece]) -> Result | OnnxtoolError | None:
            nonlocal failed
            number, piece = task
            if number > failed:
                return None
            try:
                return read(reader, piece)
            except OnnxtoolError as error:
                failed = min(failed, number)
                return error

        results = []
        for result in share_out(self._readers, list(enumerate(pieces)), attempt):
            if isinstance(result, OnnxtoolError):
                raise result
            if result is not None:
                results.append(result)
        return results
