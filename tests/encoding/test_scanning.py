"""A collection is read in pieces, by any number of processes: its shards are those of one reader from first to last."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnxtool.encoding import pieces, repeated_ids, scanning
from onnxtool.encoding.pieces import cut_pieces
from onnxtool.encoding.planned_shards import PlannedShard
from onnxtool.encoding.scanning import scan_corpus
from onnxtool.encoding.sources import Document, Position, SourceReader, find_sources
from onnxtool.encoding.windows import REPEATED_ID
from onnxtool.errors import InputError, OutputWriteError

_IDS = st.sampled_from(["a", "b", "c", "d1", "d2", "d3", "1", "2", "x:3", "é"])
_WORDS = st.sampled_from(["one", "two words", "  ", "ü", "three\u2028lines", "long " * 30])
_ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r\n\n\n"])
_BROKEN = st.sampled_from([b"{", b"\xff\xfea\x00", b"[1]", b'{"id": 1.5}', b'{"id": "a"}', b"\xef\xbb\xbf", b"\0", b"\t"])
_SUFFIXES = st.sampled_from([".jsonl", ".tsv", ".txt", ".jsonl.gz", ".txt.gz", ".parquet"])


@st.composite
def _files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of a collection: its suffix, and its bytes."""
    suffix = draw(_SUFFIXES)
    rows = draw(st.lists(st.tuples(_IDS, _WORDS), max_size=12))
    if suffix == ".parquet":
        return suffix, _parquet(rows, draw(st.integers(1, 5)))
    lines = [_line(suffix, *row) if draw(st.integers(0, 4)) else draw(_BROKEN) for row in rows]
    content = b"".join(line + draw(_ENDS) for line in lines)
    content = draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\n"])) + content
    content = content if draw(st.booleans()) else content.rstrip(b"\r\n")
    return suffix, gzip.compress(content, mtime=0) if suffix.endswith(".gz") else content


def _line(suffix: str, name: str, words: str) -> bytes:
    if suffix.startswith(".jsonl"):
        return json.dumps({"id": name, "contents": words}).encode()
    return (f"{name}\t{words}" if suffix == ".tsv" else words).encode()


def _parquet(rows: list[tuple[str, str]], group: int) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    schema = pa.schema([("id", pa.string()), ("contents", pa.string())])
    table = pa.Table.from_pylist([{"id": name, "contents": words} for name, words in rows], schema)
    pq.write_table(table, sink, row_group_size=group)
    return bytes(sink.getvalue().to_pybytes())


def _one_after_the_other(folder: Path, shard_size: int) -> tuple[list[PlannedShard], dict[str, int]]:
    """Read all lines in order, with a set of all ids: what a plan has to say."""
    reader = SourceReader(find_sources(folder)[0])
    seen: set[str] = set()
    reasons: Counter[str] = Counter()
    begin, last = Position(), Position()
    found: list[tuple[Position, list[str], int, list[int], int]] = []
    texts: list[str] = []
    repeated: list[int] = []
    rejects = read = 0
    for line in reader:
        if isinstance(line, Document) and line.id not in seen:
            if not texts and not found:
                pass
            seen.add(line.id)
            name, contents = line.id.encode(), (line.sha256 or line.contents).encode()
            texts.append(blake2b(f"{len(name)}:".encode() + name + contents, digest_size=16).hexdigest())
            read += 1
            last = reader.position
            if len(texts) == shard_size:
                found.append((begin, texts, rejects, repeated, read))
                begin, texts, repeated, rejects, read = last, [], [], 0, 0
            continue
        rejects += 1
        reasons[REPEATED_ID if isinstance(line, Document) else line.kind] += 1
        if isinstance(line, Document):
            repeated.append(read)
            read += 1
    if texts:
        found.append((begin, texts, rejects, repeated, read))
    elif found:  # what follows the last text belongs to its shard
        place, names, before, earlier, count = found.pop()
        found.append((place, names, before + rejects, earlier + [count + number for number in repeated], 0))
    shards = []
    for place, names, count, numbers, _ in found:
        digest = blake2b(bytes.fromhex("".join(names)), digest_size=16).hexdigest()
        shards.append(PlannedShard(*place[1:], len(names), digest, count, _ranges(numbers)))
    return shards, dict(reasons)


def _ranges(numbers: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return tuple(found)


def _write(folder: Path, files: list[tuple[str, bytes]]) -> Path:
    for number, (suffix, content) in enumerate(files):
        (folder / f"f{number}{suffix}").write_bytes(content)
    return folder


def _scan(folder: Path, shard_size: int, workers: int = 1) -> tuple[list[PlannedShard], dict[str, int]]:
    shards, reasons = scan_corpus(find_sources(folder)[0], shard_size, workers, lambda _progress: None)
    return list(shards), dict(reasons)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Blocks of three texts, and five digests at once: what only large collections have."""
    for module in (pieces, scanning):
        monkeypatch.setattr(module, "BLOCK_TEXTS", 3)
    monkeypatch.setattr(repeated_ids, "_MOST_AT_ONCE", 5)
    return monkeypatch


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(_files(), min_size=1, max_size=4), size=st.integers(1, 6), piece=st.integers(1, 200))
def test_shards_are_those_of_one_reader(
    files: list[tuple[str, bytes]], size: int, piece: int, small: pytest.MonkeyPatch
) -> None:
    """Wherever pieces begin, and whatever lines are: blank, broken, repeated, behind the last text, or without end."""
    small.setattr(pieces, "PIECE_BYTES", piece)
    with tempfile.TemporaryDirectory() as name:
        folder = _write(Path(name), files)
        expected = _one_after_the_other(folder, size)
        if expected[0]:
            assert _scan(folder, size) == expected
        else:
            with pytest.raises(InputError, match=r"has no texts|gave a text"):
                _scan(folder, size)
