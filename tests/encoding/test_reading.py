"""A corpus is read line by line: what is a text, what is none, and how little memory it takes."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from onnxtool.checkpoint.text_files import read_texts
from onnxtool.encoding.sources import Document, Reject, SourceReader, find_sources, left_out_notes
from onnxtool.errors import InputError
from tests.encoding.corpora import make_texts, write_corpus


def _read(path: Path) -> tuple[list[tuple[str, str]], list[tuple[int, str]]]:
    lines = list(SourceReader(find_sources(path)[0]))
    texts = [(line.id, line.contents) for line in lines if isinstance(line, Document)]
    return texts, [(line.line, line.reason) for line in lines if isinstance(line, Reject)]


def test_json_lines_of_anserini_and_of_beir_are_read(tmp_path: Path) -> None:
    """BEIR's title stands before its text, and an empty one leaves no space."""
    path = tmp_path / "corpus.jsonl"
    lines = [
        {"id": "1", "contents": "a cat"},
        {"_id": "2", "title": "The mat", "text": "a cat sat on it"},
        {"_id": "3", "title": "", "text": "a dog"},
        {"id": 4, "contents": "red", "title": "no part of it"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _read(path) == ([("1", "a cat"), ("2", "The mat a cat sat on it"), ("3", "a dog"), ("4", "red")], [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"contents": "a cat"}', "has no id"),
        (b'{"id": 1.5, "contents": "a cat"}', "has no id"),
        (b'{"id": "x"}', "has no contents that is a string"),
        (b'{"id": "x", "contents": ["a"]}', "has no contents that is a string"),
        (b'{"id": "x", "contents": " \\n"}', "has contents without any text"),
        (b'{"id": "x", "contents": "\\ud83d"}', "contains an unpaired surrogate"),
        (b'{"id": "x", "contents": "caf\xe9"}', "is not UTF-8"),
    ],
)
def test_a_line_without_a_text_is_rejected_by_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    """What stands around it is read; blank lines are counted and give nothing."""
    path = write_corpus(tmp_path / "corpus.jsonl", ["a cat"])
    path.write_bytes(path.read_bytes() + b"\n" + line + b'\n{"id": "d1", "contents": "a dog"}\n')
    texts, rejects = _read(path)
    assert texts == [("d0", "a cat"), ("d1", "a dog")]
    assert [number for number, _ in rejects] == [3]
    assert rejects[0][1].startswith(reason)


def test_names_of_columns_are_no_text(tmp_path: Path) -> None:
    """The first line of a table that another tool wrote."""
    path = tmp_path / "corpus.tsv"
    path.write_text("_id\ttitle\ttext\nid\tabout a cat\n")
    assert _read(path) == ([("id", "about a cat")], [(1, "names columns, and is no text")])


def test_a_file_that_grows_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Its last line may be half a one."""
    path = write_corpus(tmp_path / "corpus.jsonl", ["a cat", "a dog"])
    lines = iter(SourceReader(find_sources(path)[0]))
    next(lines)
    with path.open("a") as file:
        file.write('{"id": "d2"')
    with pytest.raises(InputError, match=r"corpus\.jsonl has changed while it was read"):
        list(lines)
    lines = iter(SourceReader(find_sources(path)[0]))
    next(lines)
    path.write_bytes(path.read_bytes().replace(b"cat", b"cow"))
    with pytest.raises(InputError, match="has changed while it was read"):
        list(lines)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one, which has no end."""
    monkeypatch.setattr("onnxtool.reading.MOST_LINE_BYTES", 20)
    path = tmp_path / "corpus.txt"
    path.write_text("twenty letters long.\nshort\n" + "x" * 2_000_000 + "\nafter\n" + "y" * 50)
    texts, rejects = _read(path)
    assert texts == [("2", "short"), ("4", "after")]
    assert [number for number, _ in rejects] == [1, 3, 5]


def test_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Packed or not; lines of plain text are called by file and number, and what is no corpus is left out."""
    write_corpus(tmp_path / "b.jsonl.gz", ["packed"])
    (tmp_path / "a.txt").write_text("first\n\nthird\n")
    (tmp_path / "README.md").write_text("about it")
    (tmp_path / ".hidden.jsonl").write_text("{")
    assert _read(tmp_path) == ([("a.txt:1", "first"), ("a.txt:3", "third"), ("d0", "packed")], [])
    assert find_sources(tmp_path)[1] == ("README.md",)


@pytest.mark.parametrize(
    ("names", "documents", "left_out"),
    [
        (("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"), "corpus.jsonl", ("queries.jsonl", "qrels/")),
        (("corpus.jsonl.gz", "queries.jsonl.gz"), "corpus.jsonl.gz", ("queries.jsonl.gz",)),
        (("corpus.jsonl", "qrels/test.tsv"), "corpus.jsonl", ("qrels/",)),
        (("collection.tsv", "topics.xml", "qrels.txt"), "collection.tsv", ("qrels.txt", "topics.xml")),
        (("corpus/a.txt", "topics.txt", "qrels.txt"), "a.txt", ("qrels.txt", "topics.txt")),
        (("collection.tsv", "queries.dev.small.tsv", "qrels.dev.small.tsv"), "collection.tsv", ()),
        (("corpus/corpus-0-of-1.jsonl", "queries/queries-0-of-1.jsonl"), "corpus-0-of-1.jsonl", ("queries/",)),
    ],
)  # fmt: skip
def test_the_folder_of_a_test_collection_means_its_documents(
    tmp_path: Path, names: tuple[str, ...], documents: str, left_out: tuple[str, ...]
) -> None:
    """Queries and judgements beside them are no documents, in the layouts of BEIR, TREC, MS MARCO and of the hub."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_corpus(tmp_path / name, ["a cat"])
    sources, others = find_sources(tmp_path)
    assert [(source.name, source.names_ids) for source in sources] == [(documents, False)]
    if left_out:
        assert others == left_out
    (note,) = left_out_notes(others)
    assert note.endswith("it is a test collection, of which only the documents are read")


def test_folders_that_are_no_test_collection_are_read_whole(tmp_path: Path) -> None:
    """A file that is called corpus says nothing by itself, nor one that is called queries."""
    for names in (("corpus.jsonl", "more.jsonl"), ("answers.jsonl", "queries.jsonl"), ("queries.jsonl",)):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            write_corpus(folder / name, ["a cat"])
        assert [source.name for source in find_sources(folder)[0]] == list(names)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (
            ("queries.jsonl", "qrels/test.tsv"),
            r"is a test collection, with qrels, queries\.jsonl, and has no documents",
        ),
        (("docs.jsonl", "qrels.tsv"), "is a test collection, with qrels.tsv, and has no documents"),
        (("corpus.jsonl", "corpus.tsv", "queries.jsonl"), r"has its documents twice: corpus\.jsonl, corpus\.tsv"),
    ],
)
def test_a_test_collection_that_does_not_name_its_documents_is_an_error(
    tmp_path: Path, names: tuple[str, ...], reason: str
) -> None:
    """Its queries or its judgements would be encoded."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_corpus(tmp_path / name, ["a cat"])
    with pytest.raises(InputError, match=reason):
        find_sources(tmp_path)
    with pytest.raises(InputError, match=reason):
        read_texts(tmp_path)


def test_rows_of_parquet_are_read(tmp_path: Path) -> None:
    """A missing id is a row without a text, named by its number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"id": ["a", None, "c"], "contents": ["one", "two", "three"], "other": [1, 2, 3]})
    pq.write_table(table, tmp_path / "corpus.parquet")
    texts, rejects = _read(tmp_path / "corpus.parquet")
    assert texts == [("a", "one"), ("c", "three")]
    assert [number for number, _ in rejects] == [2]


def test_a_row_that_python_cannot_hold_is_rejected_by_its_number(tmp_path: Path) -> None:
    """Text that is not UTF-8, which Parquet does not check, and a time before the first year; the others are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffc")]
    )
    pq.write_table(pa.table({"id": ["1", "2", "3"], "contents": texts}), tmp_path / "a.parquet")
    texts_read, rejects = _read(tmp_path / "a.parquet")
    assert texts_read == [("1", "a"), ("3", "c")]
    assert rejects == [(2, "is not UTF-8: invalid start byte at byte 0 of contents")]
    times = pa.array([1 << 62, 1], pa.timestamp("us"))
    pq.write_table(pa.table({"id": times, "contents": ["one", "two"]}), tmp_path / "b.parquet")
    reason = "has no id that is a string or an integer: its name is id or _id, and the line's fields are id, contents"
    assert _read(tmp_path / "b.parquet") == ([], [(n, reason) for n in (1, 2)])


def test_a_damaged_page_of_parquet_is_an_error_that_says_what_it_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "corpus.parquet"
    rows = [f"text {place}" for place in range(2000)]
    pq.write_table(pa.table({"id": rows, "contents": rows}), path, compression="snappy")
    content = path.read_bytes()
    path.write_bytes(content[:200] + bytes(byte ^ 0x5A for byte in content[200:1200]) + content[1200:])
    with pytest.raises(InputError, match=r"corpus\.parquet cannot be read after row 0: Corrupt"):
        _read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes, nor links")
def test_what_is_called_as_a_file_and_is_none_is_an_error(tmp_path: Path) -> None:
    """A link to nothing or to itself, or a pipe: it would be left out in silence. Of folders that is said."""
    write_corpus(tmp_path / "a.jsonl", ["a cat"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "b.jsonl").symlink_to(write_corpus(tmp_path / "elsewhere" / "x.jsonl", ["a dog"]))
    sources, left_out = find_sources(tmp_path)
    assert [source.name for source in sources] == ["a.jsonl", "b.jsonl"]
    assert left_out == ("elsewhere/",)
    for make, reason in (
        (lambda path: path.symlink_to("nowhere"), r"z\.jsonl is a link to nothing"),
        (lambda path: path.symlink_to(path.name), r"cannot read .*z\.jsonl: Too many levels of symbolic links"),
        (os.mkfifo, r"z\.jsonl is no regular file"),
    ):
        make(tmp_path / "z.jsonl")
        with pytest.raises(InputError, match=reason):
            find_sources(tmp_path)
        (tmp_path / "z.jsonl").unlink()


def test_a_file_that_is_damaged_or_no_corpus_is_an_error(tmp_path: Path) -> None:
    """It is named, as far as it could be read."""
    packed = gzip.compress(b'{"id": "1", "contents": "a cat"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-20])
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"id": "1", "contents": "a cat"}\n')
    (tmp_path / "wrong.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "corpus.csv").write_text("1,a cat")
    (tmp_path / "empty").mkdir()
    for name, reason in (
        ("cut.jsonl.gz", "is damaged after line"),
        ("plain.jsonl.gz", "is damaged after line 0"),
        ("wrong.parquet", "cannot be read"),
        ("corpus.csv", "is not a corpus"),
        ("empty", "has no corpus files"),
        ("missing.jsonl", "no such input file"),
    ):
        with pytest.raises(InputError, match=reason):
            _read(tmp_path / name)


def test_reading_takes_memory_for_no_text(tmp_path: Path) -> None:
    """Five times the lines take less than four bytes more for each."""
    peaks = []
    for count in (4_500, 22_500):
        path = write_corpus(tmp_path / f"{count}.jsonl", make_texts(count))
        tracemalloc.start()
        num_texts = sum(isinstance(line, Document) for line in SourceReader(find_sources(path)[0]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert num_texts == count
    assert peaks[1] - peaks[0] < 18_000 * 4
