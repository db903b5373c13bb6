"""Find the files of a corpus, and read their texts sequentially.

A line without a text is yielded as a reject rather than raised: the caller decides.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from onnxtool.checkpoint.picture_files import find_pictures
from onnxtool.checkpoint.text_files import (
    LineError,
    TextInput,
    are_queries,
    decode_line,
    documents_of_collection,
    is_beside_documents,
    named_text,
    parse_object,
    parse_tabbed,
)
from onnxtool.encoding.files import START_AGAIN, Entry, entries, entry, open_file
from onnxtool.encoding.locations import Location, Uri
from onnxtool.encoding.parquet import read_rows, rows_before
from onnxtool.errors import InputError
from onnxtool.reading import GZIP_ERRORS, Lines, lines_of

DIGEST_BYTES = 16
# Part of the identity of vectors: digests of shards made in another way are not compared.
DIGEST_VERSION = "2"
REPEATED_ID = "repeats the id of an earlier line"
_READ_BYTES = 1 << 20
_TEXT_SUFFIXES = (".jsonl", ".txt", ".tsv")
SUFFIXES = (*_TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in _TEXT_SUFFIXES), ".parquet")


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus.

    Attributes:
        name: name relative to the corpus, used for rejected lines and ids of plain text.
        names_ids: whether ids of plain text start with the name, because there are several files.
        is_picture: whether the file itself is one document, named after it.
        seen: its size and time when it was found; None if not known.
    """

    path: Location
    name: str
    size_bytes: int
    names_ids: bool
    is_picture: bool = False
    seen: Entry | None = None

    @property
    def is_packed(self) -> bool:
        """Whether it has to be decompressed from the start."""
        return self.name.lower().endswith(".gz")

    @property
    def is_cut(self) -> bool:
        """Whether byte ranges can be read separately."""
        return not self.is_packed and not self.is_picture

    @cached_property
    def suffix(self) -> str:
        """The format of its lines, by its name without `.gz`."""
        return Path(self.name.lower().removesuffix(".gz")).suffix

    @cached_property
    def is_queries(self) -> bool:
        """Whether its texts are queries, which have no titles."""
        return are_queries(self.path)


@dataclass(frozen=True, slots=True)
class Document:
    """A text or image of the corpus.

    Attributes:
        contents: the text; the path of an image.
        line: its line number in the file, from 1; the row of a table.
        sha256: digest of an image file; empty for a text.
        span: for a passage, its start and end (exclusive) in the text, in characters.
    """

    id: str
    contents: str
    file: str
    line: int
    sha256: str = ""
    span: tuple[int, int] | None = None

    @property
    def digest(self) -> bytes:
        """A digest of the text or image and its id, which identifies it without storing it."""
        name, contents = self.id.encode(), (self.sha256 or self.contents).encode()
        return hashlib.blake2b(b"%d:%b%b" % (len(name), name, contents), digest_size=DIGEST_BYTES).digest()


def id_digest(name: str) -> bytes:
    """Return a digest of an id: two of ten billion ids collide with a probability of 10^-18."""
    return hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Reject:
    """A line without a text, and the reason."""

    file: str
    line: int
    reason: str
    id: str | None

    @property
    def kind(self) -> str:
        """The reason without the part after a colon, which is specific to that line."""
        return self.reason.partition(":")[0]

    def to_json(self) -> str:
        """Return the line for the file of rejects."""
        return json.dumps(asdict(self)) + "\n"


# A line, or a row; None for a line that is too long, and an error for a row that cannot be read.
_Line = bytes | dict[str, object] | LineError | None


def find_sources(corpus: Location) -> tuple[tuple[CorpusFile, ...], tuple[str, ...]]:
    """Return the files of `corpus`, a file or a folder, sorted by name, and the names of skipped files.

    Links are followed, because caches of collections consist of them. Subfolders are skipped. In a test collection,
    which has queries and judgements next to its documents, only the documents are the corpus.

    Raises:
        InputError: there is none, its suffix is unknown, or an entry with a corpus suffix is no regular file; or a test
            collection does not say which its documents are.
    """
    try:
        alone = entry(corpus)
        if isinstance(corpus, Path) and corpus.is_dir():
            alone = None
        elif alone and isinstance(corpus, Path) and not corpus.is_file():
            raise InputError(
                f"{corpus} is not a regular file, but has to be read more than once", "write it into a file"
            )
        files = {corpus.name: alone} if alone else _in_folder(corpus)
        folders = [] if alone else _folders_in(corpus, files)
        inside = [*files, *(name.rstrip("/") for name in folders)]
        if not alone and (documents := documents_of_collection(corpus, inside)) is not None:
            sources, left_out = find_sources(corpus / documents)
            skipped = (name for name in (*files, *folders) if name.rstrip("/") != documents)
            return sources, (*skipped, *(f"{documents}/{name}" for name in left_out))
        names = [name for name in files if alone or name.lower().endswith(SUFFIXES)]
        several = len(names) > 1
        sources = tuple(
            CorpusFile(
                corpus if alone else corpus / name, name, files[name].size_bytes, names_ids=several, seen=files[name]
            )
            for name in names
        )
    except FileNotFoundError:
        raise InputError(f"no such input file: {corpus}", "check --input") from None
    except OSError as error:
        raise InputError(f"cannot read {error.filename or corpus}: {error.strerror}", "check --input") from error
    if not sources or not all(source.name.lower().endswith(SUFFIXES) for source in sources):
        raise InputError(
            f"{corpus} is not a corpus" if sources else f"{corpus} has no corpus files",
            f"use files that end in {', '.join(SUFFIXES)}, or a folder of them",
        )
    return sources, (*(name for name in files if name not in names), *folders)


def left_out_notes(left_out: Sequence[str]) -> Iterator[str]:
    """Report the files and folders of a corpus that `find_sources` skipped, and why."""
    if left_out:
        reason = f"a collection consists of files that end in {', '.join(SUFFIXES)}"
        if any(map(is_beside_documents, left_out)):
            reason = "it is a test collection, of which only the documents are read"
        num = len(left_out)
        yield f"{num} files or folders in the collection's folder are not read, such as {left_out[0]}: {reason}"


def _in_folder(corpus: Location) -> dict[str, Entry]:
    files = entries(corpus)
    if not files and not (isinstance(corpus, Path) and corpus.is_dir()):
        raise FileNotFoundError
    return {name: files[name] for name in sorted(files) if not name.startswith(".")}


def _folders_in(corpus: Location, files: Collection[str]) -> list[str]:
    """Return the folders in a folder; refuse entries with a corpus suffix that are no file, instead of skipping them.

    Stores list only files, so the folder of documents of a test collection is looked up explicitly.
    """
    if isinstance(corpus, Uri):
        return ["corpus/"] if any(map(is_beside_documents, files)) and entries(corpus / "corpus") else []
    paths = sorted(path for path in corpus.iterdir() if not path.name.startswith(".") and not path.is_file())
    for path in paths:
        if path.name.lower().endswith(SUFFIXES) and not path.is_dir():
            kind = "a link to nothing" if path.is_symlink() else "no regular file"
            raise InputError(f"{path} is {kind}", "put the file there, or remove it")
    return [f"{path.name}/" for path in paths if path.is_dir()]


def find_picture_sources(corpus: Location) -> tuple[CorpusFile, ...]:
    """Return the images of `corpus`, a folder or a list, each as a separate file.

    Raises:
        InputError: there are none, or the list names a missing one.
    """
    if isinstance(corpus, Uri):
        raise InputError(f"{corpus} is in an object store, and images are read only from a disk", "pass a folder")
    pictures = find_pictures(corpus)
    try:
        return tuple(
            CorpusFile(
                picture.path, picture.id or picture.path.name, picture.path.stat().st_size, False, is_picture=True
            )
            for picture in pictures
        )
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}", "check --input") from error


class SourceReader:
    """Read the documents of files, or of a byte range of one file, once.

    Args:
        sources: the files.
        begin: start of the range; a line or row group belongs to the range in which it begins.
        end: end of the range; None for the end of the file.
        lines_before: number of lines in the file before the range, if known.

    Attributes:
        read_bytes: bytes read of all files, by their sizes on disk, or of the range.
        num_lines: lines, or rows, read of the last file.
        tag: tells the last file from another version, in a store; otherwise empty.
    """

    def __init__(
        self, sources: Sequence[CorpusFile], begin: int = 0, end: int | None = None, lines_before: int = 0
    ) -> None:
        self._sources = sources
        self._begin, self._end, self._lines_before = begin, end, lines_before
        self.read_bytes = self.num_lines = 0
        self.tag = ""

    def __iter__(self) -> Iterator[Document | Reject]:
        """Yield the result of each line, in order, skipping blank lines.

        Lines of a range are counted from its beginning, except in the names of texts without ids, which use line
        numbers of the file.

        Raises:
            InputError: a file cannot be read, or is damaged.
        """
        before = 0
        for source in self._sources:
            self.num_lines = 0
            if source.is_picture:
                yield _picture(source)
            else:
                # A store's listing may round times, and tag files differently from the answer for one.
                first = source.seen if isinstance(source.path, Path) and source.seen else entry(source.path)
                for number, line, read_bytes in _lines(source, self._begin, self._end):
                    self.read_bytes, self.num_lines = before + read_bytes - self._begin, number
                    document = _document(source, number, self._lines_before, line)
                    if document is not None:
                        yield document
                now = entry(source.path)
                if now is None or now != first or now.size_bytes != source.size_bytes:
                    raise InputError(
                        f"{source.path} has changed while it was read",
                        f"let nothing write into the collection while it is read, and {START_AGAIN}",
                    )
                self.tag = now.tag
            before += source.size_bytes
            self.read_bytes = (before if self._end is None else self._end) - self._begin


def _picture(source: CorpusFile) -> Document:
    try:
        with open_file(source.path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {source.path}: {error.strerror}", "check --input") from error
    return Document(source.name, str(source.path), source.name, 1, digest)


def _document(source: CorpusFile, number: int, before: int, line: _Line) -> Document | Reject | None:
    try:
        text = _text(line, source)
    except LineError as error:
        return Reject(source.name, number, error.reason, error.id)
    if text is None:
        return None
    name = text.id if text.id is not None else _name_of_line(source, before + number)
    if not text.contents.strip():
        return Reject(source.name, number, "has contents without any text", name)
    return Document(name, text.contents, source.name, number)


def _text(line: _Line, source: CorpusFile) -> TextInput | None:
    if isinstance(line, LineError):
        raise line
    if isinstance(line, dict):
        return named_text(line, is_query=source.is_queries)  # type: ignore[arg-type]  # other types than text are refused
    decoded = decode_line(line)
    if not decoded.strip():
        return None
    if source.suffix == ".jsonl":
        return parse_object(decoded, is_query=source.is_queries)
    return parse_tabbed(decoded) if source.suffix == ".tsv" else TextInput(decoded)


def _name_of_line(source: CorpusFile, number: int) -> str:
    return f"{source.name}:{number}" if source.names_ids else str(number)


def _lines(source: CorpusFile, begin: int, end: int | None) -> Iterator[tuple[int, _Line, int]]:
    """Yield the lines of a file that begin in a range: number, content, and end offset in the file on disk."""
    number = 0
    try:
        if source.suffix == ".parquet":
            for number, (row, share) in enumerate(read_rows(source.path, begin, end), start=1):
                yield number, row, begin + int(share * ((end or source.size_bytes) - begin))
            return
        with ExitStack() as stack:
            raw = stack.enter_context(open_file(source.path))
            file = stack.enter_context(gzip.GzipFile(fileobj=raw)) if source.is_packed else raw
            last = end or 1 << 62
            offset = _next_line(file, begin, last)
            if offset >= last:
                return
            file.seek(offset)
            for number, (line, size) in enumerate(lines_of(file, skips=True), start=1):
                offset += size
                yield number, line, raw.tell() if source.is_packed else offset
                if offset >= last:
                    return
    except GZIP_ERRORS as error:
        raise InputError(f"{source.path} is damaged after line {number}: {error}", "fetch or pack it again") from error
    except OSError as error:
        raise InputError(f"cannot read {source.path}: {error.strerror}", "check --input") from error


def _next_line(file: Lines, offset: int, end: int) -> int:
    """Return the start of the first line at or after `offset`; some offset after `end` if none begins before."""
    if offset:
        offset -= 1
        file.seek(offset)
        while offset < end and (part := file.readline(_READ_BYTES)):
            offset += len(part)
            if part.endswith(b"\n"):
                break
    return offset


class LineCounts:
    """Count the lines of files before given offsets, reading each file once if offsets ascend."""

    def __init__(self) -> None:
        self._counted: dict[Location, tuple[int, int]] = {}

    def before(self, source: CorpusFile, place: int) -> int:
        """Return the number of lines, or rows, of a file that begin before a byte offset.

        Raises:
            InputError: it cannot be read.
        """
        if source.suffix == ".parquet":
            return rows_before(source.path, place)
        begin, count = self._counted.get(source.path, (0, 0))
        if place < begin:
            begin = count = 0
        remaining = place - begin
        # A line begins after a line feed, and at the start of the file.
        count, begin, remaining = (count, begin - 1, remaining) if begin else (int(place > 0), 0, remaining - 1)
        try:
            with open_file(source.path) as file:
                file.seek(begin)
                while remaining > 0 and (part := file.read(min(remaining, _READ_BYTES))):
                    count += part.count(b"\n")
                    remaining -= len(part)
        except OSError as error:
            raise InputError(f"cannot read {source.path}: {error.strerror}", "check --input") from error
        self._counted[source.path] = place, count
        return count
