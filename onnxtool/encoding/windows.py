"""Split a corpus into shards, and shards into windows that are sorted and run together.

Both depend on the texts alone, so that a resumed run forms the same batches: what a
model computes in float32 or int8 may depend on what else is in the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from onnxtool.encoding.digests import shard_digest, text_digest
from onnxtool.encoding.known_ids import KnownIds
from onnxtool.encoding.sources import Document, Position, Reject, SourceReader
from onnxtool.errors import InputError
from onnxtool.interruption import check_interrupted

# More would pad less and keep more in memory. Of paragraphs of uneven length, four thousand are padded by two percent.
WINDOW_TEXTS = 4096
WINDOW_CHARACTERS = 1 << 22
_LINES_AT_A_TIME = 512
REPEATED_ID = "has an id that an earlier line has"
Placed = tuple[Document, Position]


@dataclass(frozen=True)
class Window:
    """Texts that are in memory at once.

    Attributes:
        shard: the number of the shard that it is a part of, from 0.
        digest: of ids and texts of the whole shard, where this is its last window; else empty.
        position_bytes: how far into the input it ends.
        refused: texts of it that are not encoded, and why.
    """

    documents: tuple[Document, ...]
    shard: int
    digest: str
    position_bytes: int
    refused: tuple[Reject, ...] = ()


def accepted(reader: SourceReader, on_reject: Callable[[Reject], None]) -> Iterator[Placed]:
    """Yield the documents whose ids are new, and how far the reader is; pass all other lines to `on_reject`."""
    lines = ((line, reader.position) for line in reader)
    with closing(KnownIds()) as known:
        while part := list(itertools.islice(lines, _LINES_AT_A_TIME)):
            check_interrupted()  # where an earlier run did much, this passes over it for a while
            repeated = iter(known.add([line.id for line, _ in part if isinstance(line, Document)]))
            for line, position in part:
                if isinstance(line, Reject):
                    on_reject(line)
                elif next(repeated):
                    on_reject(repeated_id(line))
                else:
                    yield line, position


def repeated_id(document: Document) -> Reject:
    """Reject a document whose id an earlier one has."""
    return Reject(document.file, document.line, REPEATED_ID, document.id)


def split_corpus(
    documents: Iterator[Placed],
    shard_size: int,
    done: tuple[str, ...],
    *,
    most_characters: int | None = None,
    most_texts: int | None = None,
) -> Iterator[Window]:
    """Yield the windows of all shards but the first ones, which are `done`.

    Args:
        documents: those to encode, and how far into the input each ends.
        shard_size: texts of a shard; the last one has fewer.
        done: the digest of each shard that an earlier run has written.
        most_characters: of a window, which ends with the text that reaches them; None for WINDOW_CHARACTERS.
        most_texts: of a window; None for WINDOW_TEXTS.

    Raises:
        InputError: the input is not what these shards were made from.
    """
    for number in itertools.count():
        shard = itertools.islice(documents, shard_size)
        if number < len(done):
            _require_same(shard, number, done[number])
            continue
        found = False
        for window in shard_windows(shard, number, shard_size, most_characters=most_characters, most_texts=most_texts):
            found = True
            yield window
        if not found:
            return


def _require_same(shard: Iterator[Placed], number: int, digest: str) -> None:
    running = shard_digest()
    for document, _ in shard:
        running.update(text_digest(document))
    if running.hexdigest() != digest:
        raise InputError(
            f"the input has changed: shard {number} was made from other texts",
            "pass --force to encode all of it again, or another --output",
        )


def shard_windows(
    shard: Iterator[Placed],
    number: int,
    shard_size: int,
    *,
    most_characters: int | None = None,
    most_texts: int | None = None,
) -> Iterator[Window]:
    """Yield the windows of one shard, whose documents are read to their end before the last one; see `split_corpus`."""
    most_characters = most_characters or WINDOW_CHARACTERS
    most_texts = most_texts or WINDOW_TEXTS
    running = shard_digest()
    together: list[Document] = []
    num_characters = num_texts = 0
    position = Position()
    for document, position in shard:
        running.update(text_digest(document))
        together.append(document)
        num_texts += 1
        num_characters += len(document.contents)
        is_full = len(together) == most_texts or num_characters >= most_characters
        if is_full and num_texts < shard_size:
            yield Window(tuple(together), number, "", position.read_bytes)
            together, num_characters = [], 0
    # The last window says so by its digest; it is empty where the corpus ended with the window before.
    if num_texts:
        yield Window(tuple(together), number, running.hexdigest(), position.read_bytes)
