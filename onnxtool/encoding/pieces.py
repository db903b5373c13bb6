"""A corpus in pieces that are read at the same time, and what is kept of each: digests and places of its texts.

A piece is some files in a row, or a part of one that is large: a range of bytes of one that is not packed, or row
groups of Parquet. How a corpus is cut depends on its files alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from onnxtool.encoding.digests import id_digest, text_digest
from onnxtool.encoding.locations import Uri
from onnxtool.encoding.parquet import group_ends
from onnxtool.encoding.repeated_ids import RunWriter
from onnxtool.encoding.sources import Document, Position, Reject, Source, SourceReader, count_lines
from onnxtool.errors import OutputWriteError

PIECE_BYTES = 1 << 25  # a large collection has some thousand pieces, and a small one some for each core
BLOCK_TEXTS = 1 << 18  # 16 MB for what is kept of them
_FILES_AT_ONCE = 16  # whose row groups are asked for, in a store that takes a while to answer
_TO_THE_END = 1 << 62
_TOLD_EVERY, _TOLD_BYTES = 4096, 1 << 22  # lines, or bytes of lines that are long

# What is kept of a text, but for its id: where it ends, and how many lines of its piece, behind the
# text before it, give none.
TEXT = np.dtype(
    [
        ("digest", "V16"),
        ("source", "<u4"),
        ("line", "<u8"),
        ("offset", "<u8"),
        ("rejects", "<u8"),
        ("is_repeated", "?"),
    ]
)

OnRead = Callable[[int, int], None]


@dataclass(frozen=True)
class Piece:
    """A piece of a corpus.

    Attributes:
        number: of the piece, from 0.
        first: the number of its first file.
        sources: its files.
        size_bytes: of it.
        begin: of a part of a file, the bytes or rows before it.
        end: likewise up to its end; None for whole files.
        line: lines or rows of the file before it; 0 where that is found out when all is read.
    """

    number: int
    first: int
    sources: tuple[Source, ...]
    size_bytes: int
    begin: int = 0
    end: int | None = None
    line: int = 0

    @property
    def is_counted_first(self) -> bool:
        """Whether texts are called by the numbers of their lines, and these are not known yet."""
        return self.end is not None and self.sources[0].suffix == ".txt"

    def to_json(self) -> dict[str, Any]:
        """Write it for another process; a key of a store may have what an address may not, such as a question mark."""
        sources = [
            asdict(one) | ({"path": str(one.path)} if isinstance(one.path, Path) else {}) for one in self.sources
        ]
        return {**vars(self), "sources": sources}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Piece:
        """Return what `to_json` has written."""
        places = [one["path"] for one in content["sources"]]
        paths = [Path(place) if isinstance(place, str) else Uri(**place) for place in places]
        sources = tuple(Source(**{**one, "path": path}) for one, path in zip(content["sources"], paths, strict=True))
        return cls(**{**content, "sources": sources})


def cut_pieces(sources: Sequence[Source]) -> list[Piece]:
    """Cut a corpus."""
    pieces: list[Piece] = []
    together: list[Source] = []
    size = 0

    def close(number: int) -> None:
        nonlocal size
        if together:
            pieces.append(Piece(len(pieces), number - len(together), tuple(together), size))
        together.clear()
        size = 0

    large = [number for number, source in enumerate(sources) if source.size_bytes > PIECE_BYTES]
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        parts_of = dict(zip(large, threads.map(lambda number: list(_parts(sources[number])), large), strict=True))
    for number, source in enumerate(sources):
        parts = parts_of.get(number, [])
        if len(parts) < 2 and size + source.size_bytes <= PIECE_BYTES:
            together.append(source)
            size += source.size_bytes
            continue
        close(number)
        if len(parts) < 2:
            together, size = [source], source.size_bytes
            continue
        pieces += [Piece(len(pieces) + place, number, (source,), *part) for place, part in enumerate(parts)]
    close(len(sources))
    return pieces


def _parts(source: Source) -> Iterator[tuple[int, int, int, int]]:
    """Yield size, begin, end and rows before, of the parts of a large file; nothing of one that cannot be cut."""
    if source.suffix == ".parquet":
        ends = group_ends(source.path)
        rows = max(1, ends[-1] * PIECE_BYTES // source.size_bytes) if ends else 0
        begin = 0
        while ends and begin < ends[-1]:
            end = ends[min(len(ends) - 1, bisect_left(ends, begin + rows))]
            yield source.size_bytes * (end - begin) // ends[-1], begin, end, begin
            begin = end
    elif not source.is_packed and not source.is_picture:
        for begin in range(0, source.size_bytes, PIECE_BYTES):
            end = begin + PIECE_BYTES
            is_last = end >= source.size_bytes
            yield min(end, source.size_bytes) - begin, begin, _TO_THE_END if is_last else end, 0


def count_piece(piece: Piece) -> int:
    """Count the lines of a part of a file.

    Raises:
        InputError: it cannot be read.
    """
    (source,) = piece.sources
    return count_lines(source, piece.begin, min(piece.end or 0, source.size_bytes))


class Scanned(NamedTuple):
    """What a piece has; the files of the folder that it was read into hold the rest.

    Attributes:
        num_texts: that have an id and contents.
        num_lines: of a part of a file.
        reasons: how many lines give no text, by their kinds.
        num_trailing: of these, behind the last text.
        first_reject: file, line and reason of the first of them; of a part of a file, the line is counted from its
            beginning where `Piece.line` is not known.
    """

    num_texts: int
    num_lines: int
    reasons: dict[str, int]
    num_trailing: int
    first_reject: tuple[str, int, str] | None


def texts_file(folder: Path, piece: int) -> Path:
    """Return where the records of the texts of a piece are."""
    return folder / f"texts-{piece}"


def ids_file(folder: Path, piece: int) -> Path:
    """Return where the runs of its ids are."""
    return folder / f"ids-{piece}"


def scan_piece(piece: Piece, folder: Path, on_read: OnRead) -> Scanned:
    """Read a piece, and write what is kept of its texts into a folder.

    Args:
        piece: what is read.
        folder: for temporary files.
        on_read: called now and then with the texts and the bytes of the files that are read so far.

    Raises:
        InputError: a file cannot be read, or is damaged.
        OutputWriteError: the folder is full.
    """
    try:
        with texts_file(folder, piece.number).open("wb") as texts, RunWriter(ids_file(folder, piece.number)) as ids:
            return _scan(piece, texts, ids, on_read)
    except OSError as error:
        raise OutputWriteError(
            f"cannot keep digests of texts in the temporary folder {folder}: {error.strerror or error}",
            "make room, or set TMPDIR to a folder that has some",
        ) from error


def _scan(piece: Piece, texts: IO[bytes], ids: RunWriter, on_read: OnRead) -> Scanned:
    reasons: Counter[str] = Counter()
    first: Reject | None = None
    block = _Block()
    num_texts = 0
    before: int | None = None
    due = 0
    reader = SourceReader(piece.sources, Position(0, 0, piece.line, piece.begin), piece.end)
    for number, line in enumerate(reader, start=1):
        position = reader.position
        if isinstance(line, Reject):
            first = first or line
            reasons[line.kind] += 1
            block.num_rejects += 1
        else:
            block.add(line, position)
            num_texts += 1
            if len(block.lines) == BLOCK_TEXTS:
                block.write(piece.first, texts, ids)
        if number % _TOLD_EVERY == 0 or position.read_bytes >= due:
            before = position.read_bytes if before is None else before
            due = position.read_bytes + _TOLD_BYTES
            on_read(num_texts, position.read_bytes - before)
    if block.lines:
        block.write(piece.first, texts, ids)
    return Scanned(
        num_texts=num_texts,
        num_lines=reader.position.line - piece.line,
        reasons=dict(reasons),
        num_trailing=block.num_rejects,
        first_reject=None if first is None else (first.file, first.line, first.reason),
    )


class _Block:
    """Texts of a piece until there are so many that they are written.

    Attributes:
        num_rejects: lines since the last text that give none.
    """

    def __init__(self) -> None:
        self.num_rejects = 0
        self._clear()

    def _clear(self) -> None:
        self._ids, self._digests = bytearray(), bytearray()
        self._sources, self.lines, self._offsets, self._rejects = array("L"), array("Q"), array("Q"), array("Q")

    def add(self, document: Document, position: Position) -> None:
        self._ids += id_digest(document.id)
        self._digests += text_digest(document)
        self._sources.append(position.source)
        self.lines.append(position.line)
        self._offsets.append(position.offset)
        self._rejects.append(self.num_rejects)
        self.num_rejects = 0

    def write(self, first_source: int, texts: IO[bytes], ids: RunWriter) -> None:
        repeated = ids.write(self._ids)
        rows = np.zeros(len(self.lines), TEXT)
        rows["digest"] = np.frombuffer(self._digests, "V16")
        rows["source"] = np.asarray(self._sources) + first_source
        rows["line"], rows["offset"], rows["rejects"] = self.lines, self._offsets, self._rejects
        rows["is_repeated"][repeated] = True
        rows.tofile(texts)
        self._clear()
