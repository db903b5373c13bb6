"""The files of a corpus: which there are, and the texts in them, read one after the other.

A line without a text is yielded as a reject, not raised: the caller decides.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from onnxtool.checkpoint.picture_files import find_pictures
from onnxtool.checkpoint.text_files import LineError, TextInput, decode_line, named_text, parse_object, parse_tabbed
from onnxtool.encoding.parquet import read_rows
from onnxtool.errors import InputError

# Longer lines are no texts; read whole, one could fill the memory.
MAX_LINE_BYTES = 1 << 24
_READ_BYTES = 1 << 20
_TEXT_SUFFIXES = (".jsonl", ".txt", ".tsv")
SUFFIXES = (*_TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in _TEXT_SUFFIXES), ".parquet")


@dataclass(frozen=True)
class Source:
    """A file of a corpus.

    Attributes:
        name: relative to the corpus; what rejected lines and ids of plain text are called by.
        names_ids: whether ids of plain text begin with the name, as there are several files.
        is_picture: whether the file is one document itself, called by the name.
    """

    path: Path
    name: str
    size_bytes: int
    names_ids: bool
    is_picture: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the corpus, or a picture.

    Attributes:
        contents: the text; the path of a picture.
        line: its number in the file, from 1; the row of a table.
        sha256: of the file of a picture; empty for a text.
    """

    id: str
    contents: str
    file: str
    line: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """A line that gave no text, and why."""

    file: str
    line: int
    reason: str
    id: str | None


def find_sources(corpus: Path) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """Return the files of `corpus`, a file or a folder of some, in order of their names, and names of those left out.

    Raises:
        InputError: there is none, or its suffix is unknown.
    """
    try:
        if corpus.is_dir():
            inside = sorted(path for path in corpus.iterdir() if path.is_file() and not path.name.startswith("."))
            files = [path for path in inside if path.name.lower().endswith(SUFFIXES)]
        else:
            inside = files = [corpus]
        sources = tuple(Source(path, path.name, path.stat().st_size, names_ids=len(files) > 1) for path in files)
    except FileNotFoundError:
        raise InputError(f"no such input file: {corpus}", "check --input") from None
    except OSError as error:
        raise InputError(f"cannot read {corpus}: {error.strerror}", "check --input") from error
    if not sources or not all(source.name.lower().endswith(SUFFIXES) for source in sources):
        raise InputError(
            f"{corpus} is not a corpus" if sources else f"{corpus} has no file of a corpus",
            f"use files that end in {', '.join(SUFFIXES)}, or a folder of them",
        )
    return sources, tuple(path.name for path in inside if path not in files)


def find_picture_sources(corpus: Path) -> tuple[Source, ...]:
    """Return the pictures of `corpus`, a folder of them or a list, each a file of its own.

    Raises:
        InputError: there are none, or the list names one that is not there.
    """
    pictures = find_pictures(corpus)
    try:
        return tuple(
            Source(picture.path, picture.id or picture.path.name, picture.path.stat().st_size, False, is_picture=True)
            for picture in pictures
        )
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}", "check --input") from error


class SourceReader:
    """Reads the documents of files, once.

    Attributes:
        position_bytes: how far it is in all files together, by their sizes on disk.
    """

    def __init__(self, sources: tuple[Source, ...]) -> None:
        self._sources = sources
        self.position_bytes = 0

    def __iter__(self) -> Iterator[Document | Reject]:
        """Yield what each line gives, in order; blank lines give nothing.

        Raises:
            InputError: a file cannot be read, or is damaged.
        """
        before = 0
        for source in self._sources:
            if source.is_picture:
                before += source.size_bytes
                self.position_bytes = before
                yield _picture(source)
                continue
            for number, line, position in _lines(source):
                self.position_bytes = before + position
                found = _document(source, number, line)
                if found is not None:
                    yield found
            before += source.size_bytes
            self.position_bytes = before


def _picture(source: Source) -> Document:
    try:
        with source.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {source.path}: {error.strerror}", "check --input") from error
    return Document(source.name, str(source.path), source.name, 1, digest)


def _document(source: Source, number: int, line: bytes | dict[str, object] | None) -> Document | Reject | None:
    try:
        text = _text(source, number, line)
    except LineError as error:
        return Reject(source.name, number, error.reason, error.id)
    if text is None:
        return None
    name = text.id if text.id is not None else _name_of_line(source, number)
    reason = _fault(name, text.contents)
    return Reject(source.name, number, reason, name) if reason else Document(name, text.contents, source.name, number)


def _text(source: Source, number: int, line: bytes | dict[str, object] | None) -> TextInput | None:
    if line is None:
        raise LineError(f"is longer than {MAX_LINE_BYTES} bytes", "split the text")
    if isinstance(line, dict):
        return named_text(line)  # type: ignore[arg-type]  # other types than text are refused
    decoded = decode_line(line)
    if not decoded.strip():
        return None
    name = source.name.lower().removesuffix(".gz")
    return _PARSERS[Path(name).suffix](decoded)


_PARSERS: dict[str, Callable[[str], TextInput]] = {".txt": TextInput, ".jsonl": parse_object, ".tsv": parse_tabbed}


def _name_of_line(source: Source, number: int) -> str:
    return f"{source.name}:{number}" if source.names_ids else str(number)


def _fault(name: str, contents: str) -> str:
    """Say why a text cannot be encoded, or return an empty string."""
    if not contents.strip():
        return "has contents without any text"
    try:
        (name + contents).encode()
    except UnicodeEncodeError:  # JSON can escape half of a pair of UTF-16
        return "holds half a character: a surrogate that stands alone"
    return ""


def _lines(source: Source) -> Iterator[tuple[int, bytes | dict[str, object] | None, int]]:
    """Yield number and content of each line, None for one that is too long, and how many bytes of the file are read."""
    number = 0
    try:
        if source.name.lower().endswith(".parquet"):
            for number, row, share in read_rows(source.path):
                yield number, row, int(share * source.size_bytes)
            return
        with ExitStack() as stack:
            raw = stack.enter_context(source.path.open("rb", buffering=_READ_BYTES))
            is_packed = source.name.lower().endswith(".gz")
            lines = _bounded_lines(stack.enter_context(gzip.GzipFile(fileobj=raw)) if is_packed else raw)
            for number, line in enumerate(lines, start=1):
                yield number, line, raw.tell()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{source.path} is damaged after line {number}: {error}", "fetch or pack it again") from error
    except OSError as error:
        raise InputError(f"cannot read {source.path}: {error.strerror}", "check --input") from error


def _bounded_lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes | None]:
    """Yield the lines of `file`, None for each that is longer than MAX_LINE_BYTES, without reading that one whole."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line
            continue
        while not line.endswith(b"\n") and (line := file.readline(_READ_BYTES)):
            pass
        yield None
