"""A corpus is cut by the sizes of its files: each line is in one split, whatever their size, and nothing is read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from onnxtool.encoding import parquet, sources
from onnxtool.encoding.options import PartOptions
from onnxtool.encoding.sources import CorpusFile, Document, LineCounts, Reject, SourceReader, find_sources
from onnxtool.encoding.splits import (
    Split,
    SplitWindows,
    TextWindow,
    WindowLimits,
    format_ranges,
    parse_part,
    parse_ranges,
    split_corpus,
    wanted_splits,
)
from onnxtool.errors import InputError
from tests.encoding.corpora import collection, make_texts, write_corpus

LIMITS = WindowLimits(8, 4, 1 << 20)


def read(split: Split, before: int = 0) -> tuple[list[Document | Reject], SourceReader]:
    """Return the lines of a split, and what has read them."""
    reader = SourceReader(split.sources, split.begin, split.end, before)
    return list(reader), reader


@pytest.mark.parametrize("kind", ["jsonl", "txt", "tsv", "parquet", "jsonl.gz", "folder"])
@pytest.mark.parametrize("size", [1, 7, 100, 999, 4000, 1 << 20])
def test_each_line_is_in_one_split(tmp_path: Path, kind: str, size: int) -> None:
    """In the order of the corpus, with its name, and with its number where the lines of the splits before are added."""
    if (kind == "folder" and size < 100) or (kind == "parquet" and size < 50):
        pytest.skip("takes long, and is what others are")
    found = find_sources(collection(tmp_path, kind))[0]
    expected = list(SourceReader(found))
    lines: list[Document | Reject] = []
    counts, before = LineCounts(), 0
    cut = split_corpus(found, size)
    for split in cut:
        before = before if split.begin else 0
        named = counts.before(split.sources[0], split.begin) if split.sources[0].suffix == ".txt" else 0
        part, reader = read(split, named)
        lines += [replace(line, line=line.line + before) for line in part]
        before += reader.num_lines
        if split.sources[0].is_cut:
            assert counts.before(split.sources[0], split.begin) == before - reader.num_lines
        assert reader.read_bytes == split.size_bytes
    assert lines == expected
    assert [split.number for split in cut] == list(range(len(cut)))
    assert sum(split.size_bytes for split in cut) == sum(source.size_bytes for source in found)


@pytest.mark.parametrize("content", [b"one\r\ntwo\r\n", b"one\n\n\ntwo", b"\n\n", b"x" * 60 + b"\ny\n" + b"z" * 60])
def test_lines_of_all_lengths_are_in_one_split(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank ones, the last one without an end, and those that are longer than a line may be, or than several splits."""
    monkeypatch.setattr("onnxtool.reading.MOST_LINE_BYTES", 50)
    monkeypatch.setattr(sources, "_READ_BYTES", 8)
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    found = find_sources(path)[0]
    expected = list(SourceReader(found))
    for size in range(1, len(content) + 2):
        counts = LineCounts()
        parts = [read(split, counts.before(found[0], split.begin)) for split in split_corpus(found, size)]
        lines = [line for part, _ in parts for line in part]
        assert [(line.id, getattr(line, "contents", "")) for line in lines] == [
            (line.id, getattr(line, "contents", "")) for line in expected
        ]
        assert sum(reader.num_lines for _, reader in parts) == content.count(b"\n") + (not content.endswith(b"\n"))


def test_row_groups_of_a_file_that_lies_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are said to begin before the file, or behind it, are of its first split, or of its last."""
    (source,) = find_sources(collection(tmp_path, "parquet"))[0]
    groups = parquet._groups
    lies = lambda file: [group._replace(begin=-1 if group.num_rows == 7 else 1 << 40) for group in groups(file)]  # noqa: E731
    monkeypatch.setattr(parquet, "_groups", lies)
    cut = split_corpus([source], source.size_bytes // 3)
    found = [read(split)[0] for split in cut]
    assert sum(map(len, found)) == len(list(SourceReader([source])))
    assert [bool(lines) for lines in found] == [True, *[False] * (len(cut) - 2), True]


def test_ten_million_lines_are_split_in_a_second(tmp_path: Path) -> None:
    """By the size of their file, of which no block is on the disk."""
    path = tmp_path / "corpus.jsonl"
    with path.open("wb") as file:
        file.truncate(400 * 10_000_000)
    start = time.perf_counter()
    cut = split_corpus(find_sources(path)[0], 1 << 24)
    assert time.perf_counter() - start < 1
    assert len(cut) == 239
    with pytest.raises(InputError, match=r"has 4000000000 splits, of at most 1000000"):
        split_corpus(find_sources(path)[0], 1)


def test_small_files_are_put_together() -> None:
    """In a row, up to the size of a split; packed ones are never cut."""
    sizes = {"a.jsonl": 3, "b.jsonl": 4, "c.jsonl": 4, "d.jsonl.gz": 30, "e.jsonl": 25, "f.jsonl": 0}
    found = [CorpusFile(Path(name), name, size, names_ids=True) for name, size in sizes.items()]
    cut = [("".join(source.name[0] for source in split.sources), *split[2:]) for split in split_corpus(found, 10)]
    whole = [(names, 0, None) for names in ("ab", "c", "d")]
    assert cut == [*whole, ("e", 0, 10), ("e", 10, 20), ("e", 20, None), ("f", 0, None)]


def windows_of(
    texts: Sequence[str], tmp_path: Path, done: Sequence[str] = (), limits: WindowLimits = LIMITS
) -> list[TextWindow]:
    """Return the windows of a corpus that is one split, but for the last, which says how it ended."""
    (source,) = find_sources(write_corpus(tmp_path / "corpus.jsonl", texts))[0]
    *found, last = SplitWindows(0, SourceReader([source]), limits, done)
    assert last.end is not None
    assert (last.documents, last.end.num_lines) == ((), len(texts))
    return found


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 20])
def test_every_document_is_in_one_window_of_its_shard(tmp_path: Path, count: int) -> None:
    """Shards of 8 in windows of 4, in the order of the corpus; the last window of a shard says so by a digest."""
    found = windows_of(["a cat"] * count, tmp_path)
    assert [document.id for window in found for document in window.documents] == [f"d{place}" for place in range(count)]
    assert all(len(window.documents) <= 4 for window in found)
    for shard in range((count + 7) // 8):
        of_shard = [window for window in found if window.shard.number == shard]
        assert sum(len(window.documents) for window in of_shard) == min(8, count - 8 * shard)
        assert [bool(window.digest) for window in of_shard] == [False] * (len(of_shard) - 1) + [True]


def test_a_window_of_long_texts_closes_early(tmp_path: Path) -> None:
    """Ten characters are two texts of five."""
    found = windows_of(["a cat"] * 5, tmp_path, limits=WindowLimits(100, 100, 10))
    assert [len(window.documents) for window in found] == [2, 2, 1]


def test_shards_that_are_done_are_passed_over_and_compared(tmp_path: Path) -> None:
    """What follows is parted as if nothing had been done; other texts, or too few of them, are an error."""
    texts = make_texts(20)
    found = windows_of(texts, tmp_path)
    digests = tuple(window.digest for window in found if window.digest)
    rest = windows_of(texts, tmp_path, digests[:2])
    assert rest == [replace(window, size_bytes=later.size_bytes) for window, later in zip(found[4:], rest, strict=True)]
    assert windows_of(texts, tmp_path, digests) == []
    for done, count in (((digests[1],), 20), (digests, 19), (digests, 16)):
        with pytest.raises(InputError, match="the input has changed"):
            windows_of(texts[:count], tmp_path, done)


def test_an_id_is_a_part_of_what_identifies_a_text() -> None:
    """Another id is another text, and letters cannot move from the id to the text."""
    texts = (("a", "bc"), ("ab", "c"), ("b", "bc"))
    assert len({Document(name, text, "c.jsonl", 1).digest for name, text in texts}) == 3


def test_a_part_is_its_number_and_how_many_there_are() -> None:
    """Numbers begin at 1; whatever else is written is refused."""
    assert parse_part("2/7") == (1, 7)
    for wrong in ("0/3", "4/3", "1", "a/b", "1/0", "", "1/2/3", "-1/3"):
        with pytest.raises(InputError, match="is not a part"):
            parse_part(wrong)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
def test_parts_have_each_split_once(parts: int) -> None:
    """Neighbours, and about as many of them."""
    found = [wanted_splits(PartOptions(part=f"{part + 1}/{parts}"), 10) for part in range(parts)]
    assert [number for numbers in found for number in numbers] == list(range(10))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    with pytest.raises(InputError, match="both a part and splits"):
        wanted_splits(PartOptions(part="1/2", splits="0"), 10)


def test_ranges_of_splits_are_read_as_they_are_written() -> None:
    """Numbers that are none, or that no split has, are refused."""
    numbers = (0, 3, 4, 5, 9)
    assert format_ranges(numbers) == "0, 3-5, 9"
    assert parse_ranges("0, 3-5, 9", 10) == numbers
    for wrong, reason in (("5-3", "names no splits"), ("", "names no"), ("a", "names no"), ("10", "no split 10")):
        with pytest.raises(InputError, match=reason):
            parse_ranges(wrong, 10)
