"""Divide a corpus into splits by file sizes, and a split into shards and windows by its texts.

Dividing a corpus reads nothing, so that every machine finds the same splits. Shards and windows depend only on the
texts, so that a resumed run forms the same batches: results in float32 or int8 may depend on the rest of the batch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from onnxtool.encoding.files import START_AGAIN
from onnxtool.encoding.options import PartOptions
from onnxtool.encoding.sources import DIGEST_BYTES, CorpusFile, Document, Reject, SourceReader
from onnxtool.errors import InputError, OptionError
from onnxtool.interruption import check_interrupted

# More would pad less and keep more in memory. Of paragraphs of uneven length, four thousand are padded by two percent.
WINDOW_TEXTS = 4096
WINDOW_CHARACTERS = 1 << 22
MOST_SPLITS = 1_000_000  # a record is written for each
_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class Split(NamedTuple):
    """A piece of a corpus: files in a row, or a range of bytes of one file.

    Attributes:
        number: number of the split, from 0.
        sources: its files.
        begin: start offset of a range.
        end: end offset of a range; None for the end of the file.
    """

    number: int
    sources: tuple[CorpusFile, ...]
    begin: int = 0
    end: int | None = None

    @property
    def size_bytes(self) -> int:
        """Its part of the files."""
        size = sum(source.size_bytes for source in self.sources)
        return (size if self.end is None else self.end) - self.begin


def split_corpus(sources: Sequence[CorpusFile], split_bytes: int) -> list[Split]:
    """Divide a corpus: small files are combined, and large ones divided if their format allows it.

    Raises:
        InputError: there are too many splits.
    """
    count = sum(source.size_bytes // split_bytes for source in sources if source.is_cut)
    if count > MOST_SPLITS:
        raise InputError(f"the collection has {count} splits, of at most {MOST_SPLITS}", "pass a larger --split_bytes")
    splits: list[Split] = []
    together: list[CorpusFile] = []

    def close() -> None:
        if together:
            splits.append(Split(len(splits), tuple(together)))
            together.clear()

    size = 0
    for source in sources:
        if source.is_cut and source.size_bytes > split_bytes:
            close()
            for begin in range(0, source.size_bytes, split_bytes):
                end = begin + split_bytes
                splits.append(Split(len(splits), (source,), begin, None if end >= source.size_bytes else end))
            continue
        if not together or size + source.size_bytes > split_bytes:
            close()
            size = 0
        together.append(source)
        size += source.size_bytes
    close()
    return splits


class ShardName(NamedTuple):
    """A shard: its split, and its number in that, both from 0."""

    split: int
    number: int

    @property
    def stem(self) -> str:
        """The name of its files; sorted by name, shards are in corpus order."""
        return f"part-{self.split:05d}{f'_{self.number:05d}' if self.number else ''}"

    def __str__(self) -> str:
        return f"{self.number} of split {self.split}"


class SplitRecord(NamedTuple):
    """Summary of a split after reading.

    Attributes:
        num_shards: number of shards; 0 if no line had a text.
        num_lines: lines, or rows, of its last file that belong to this split.
        tag: as in SourceReader.
        rejects: lines without a text; in a range of a file, counted from its start.
        num_texts: number of texts with vectors, once they are written.
        begins_inside: whether it is a range that starts inside a file, so that its lines are counted from the end of
            the previous split.
    """

    num_shards: int
    num_lines: int
    tag: str
    rejects: tuple[Reject, ...]
    num_texts: int = 0
    begins_inside: bool = False


@dataclass(frozen=True)
class TextWindow:
    """Texts held in memory at once.

    Attributes:
        shard: the shard it is part of.
        digest: digest of the shard's ids and texts in its last window; otherwise empty.
        size_bytes: bytes of the corpus read for it.
        end: the end of the split, in a last window without texts.
    """

    documents: tuple[Document, ...]
    shard: ShardName
    digest: str
    size_bytes: int = 0
    end: SplitRecord | None = None


class WindowLimits(NamedTuple):
    """The number of texts in a shard, and the maximum numbers of texts and characters in a window."""

    shard_texts: int
    window_texts: int
    window_characters: int


class SplitWindows:
    """The windows of a split, without its leading shards that are `done`, and a final one with the summary.

    Args:
        split: its number.
        reader: the reader of its lines.
        limits: limits of shards and windows.
        done: the digest of each written shard.
        on_reject: called for each line without a text.
    """

    def __init__(
        self,
        split: int,
        reader: SourceReader,
        limits: WindowLimits,
        done: Sequence[str] = (),
        on_reject: Callable[[Reject], None] = lambda _reject: None,
    ) -> None:
        self._rejects: list[Reject] = []
        self._on_reject = on_reject
        self._split, self._reader, self._limits, self._done = split, reader, limits, done
        self._read_bytes = 0

    def __iter__(self) -> Iterator[TextWindow]:
        """Yield windows.

        Raises:
            InputError: a file cannot be read, or has changed since finished shards were made from it.
        """
        texts = self._texts()
        for number in itertools.count():
            name = ShardName(self._split, number)
            shard = itertools.islice(texts, self._limits.shard_texts)
            if number < len(self._done):
                _require_same(shard, name, self._done[number])
                continue
            has_texts = False
            for window in self._of_shard(shard, name):
                has_texts = True
                yield window
            if not has_texts:
                break
        end = SplitRecord(number, self._reader.num_lines, self._reader.tag, tuple(self._rejects))
        yield TextWindow((), name, "", self._newly_read(), end=end)

    def _texts(self) -> Iterator[Document]:
        for line in self._reader:
            check_interrupted()  # skipping the work of an earlier run may take a while
            if isinstance(line, Reject):
                self._on_reject(line)
                self._rejects.append(line)
            else:
                yield line

    def _of_shard(self, shard: Iterator[Document], name: ShardName) -> Iterator[TextWindow]:
        limits, running = self._limits, blake2b(digest_size=DIGEST_BYTES)
        together: list[Document] = []
        num_characters = num_texts = 0
        for document in shard:
            running.update(document.digest)
            together.append(document)
            num_texts += 1
            num_characters += len(document.contents)
            is_full = len(together) == limits.window_texts or num_characters >= limits.window_characters
            if is_full and num_texts < limits.shard_texts:
                yield TextWindow(tuple(together), name, "", self._newly_read())
                together, num_characters = [], 0
        # The last window says so by its digest; it is empty where the split ended with the window before.
        if num_texts:
            yield TextWindow(tuple(together), name, running.hexdigest(), self._newly_read())

    def _newly_read(self) -> int:
        before, self._read_bytes = self._read_bytes, self._reader.read_bytes
        return self._read_bytes - before


def _require_same(shard: Iterable[Document], name: ShardName, digest: str) -> None:
    running = blake2b(digest_size=DIGEST_BYTES)
    for document in shard:
        running.update(document.digest)
    if running.hexdigest() != digest:
        raise InputError(
            f"the input has changed: shard {name} was made from other texts",
            START_AGAIN,
        )


def wanted_splits(options: PartOptions, count: int) -> tuple[int, ...]:
    """Return the requested ones of `count` splits, ascending.

    Raises:
        InputError: they do not exist.
    """
    if options.splits is not None:
        if options.part is not None:
            raise InputError("both a part and splits were passed", "leave out --part or --splits")
        return parse_ranges(options.splits, count)
    if options.part is None:
        return tuple(range(count))
    index, parts = parse_part(options.part)
    return tuple(range(index * count // parts, (index + 1) * count // parts))


def parse_part(text: str) -> tuple[int, int]:
    """Return the number of a part, from 0, and how many there are.

    Raises:
        OptionError: `text` is not a part.
    """
    match = _PART.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise OptionError(f"{text!r} is not a part", "pass I/N with I from 1 to N, such as 2/7, as --part")
    return int(match[1]) - 1, int(match[2])


def parse_ranges(text: str, count: int) -> tuple[int, ...]:
    """Return the numbers in a list such as `3, 7-12`, ascending.

    Raises:
        InputError: it is malformed, or a number is not below `count`.
    """
    numbers: set[int] = set()
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise InputError(f"{item.strip()!r} names no splits", "pass numbers and ranges such as 3,7-12 as --splits")
        if last >= count:
            raise InputError(f"there is no split {last}: the collection has 0 to {count - 1}", "correct --splits")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers as `3, 7-12`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)
