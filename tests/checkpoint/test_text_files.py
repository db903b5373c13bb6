"""Texts come from files of two formats, and a bad line is named."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest

from onnxtool.checkpoint.text_files import TextInput, read_texts
from onnxtool.errors import InputError
from onnxtool.reading import STDIN


def test_a_plain_file_holds_a_text_a_line(tmp_path: Path) -> None:
    """Line ends of Windows, a byte order mark and blank lines are no part of a text; odd separators are."""
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufefffirst text\r\n\n  \nsecond\u2028text\nlast".encode())
    assert read_texts(path) == (TextInput("first text"), TextInput("second\u2028text"), TextInput("last"))


def test_a_jsonl_file_holds_id_and_contents_a_line(tmp_path: Path) -> None:
    """Further keys are ignored, and an integer id becomes a string."""
    path = tmp_path / "corpus.JSONL"
    path.write_text('{"id": "d1", "contents": "one\\ntwo", "title": "x"}\n\n{"id": 2, "contents": ""}\n')
    assert read_texts(path) == (TextInput("one\ntwo", "d1"), TextInput("", "2"))


def test_the_folder_of_a_test_collection_means_its_documents(tmp_path: Path) -> None:
    """Any other folder is an error that says what it is."""
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d1", "title": "A", "text": "cat"}\n')
    with pytest.raises(InputError, match="it is a folder, but not a test collection"):
        read_texts(tmp_path)
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "dog"}\n')
    assert read_texts(tmp_path) == (TextInput("A cat", "d1"),)


def test_a_packed_file_is_unpacked(tmp_path: Path) -> None:
    """Whatever its format is; one that ends early is refused, and its texts with it."""
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": 1, "contents": "one"}\n'))
    assert read_texts(path) == (TextInput("one", "1"),)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"corpus\.jsonl\.gz is not a complete gzip file"):
        read_texts(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(InputError, match=r"corpus\.jsonl\.gz is not a complete gzip file"):
        read_texts(path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"one\n{two}\n", (TextInput("one"), TextInput("{two}"))),
        (b'\n {"id": "a", "contents": "one"}\n', (TextInput("one", "a"),)),
    ],
)
def test_stdin_is_read_as_its_first_text_is_written(
    monkeypatch: pytest.MonkeyPatch, given: bytes, expected: tuple[TextInput, ...]
) -> None:
    """It has no suffix that tells."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert read_texts(STDIN) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id": "2", "contents": ', "is not JSON"),
        ('["2", "text"]', "is not a JSON object"),
        ('{"contents": "text"}', "has no id"),
        ('{"id": true, "contents": "text"}', "has no id"),
        ('{"id": "2"}', "has no contents"),
        ('{"id": "2", "contents": 7}', "has no contents"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, reason: str) -> None:
    """Blank lines count, as they do in an editor."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(f'{{"id": "1", "contents": "fine"}}\n\n{line}\n')
    with pytest.raises(InputError, match=f"corpus.jsonl:3 {reason}") as caught:
        read_texts(path)
    assert caught.value.hint


def test_bytes_that_are_not_utf_8_are_named_by_their_line(tmp_path: Path) -> None:
    """A file in Latin-1 fails where its first accent is."""
    path = tmp_path / "texts.txt"
    path.write_bytes("plain\ncafé\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"texts\.txt:2 is not UTF-8: .* at byte 3"):
        read_texts(path)


def test_standard_input_without_texts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` alone would say nothing."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(InputError, match="standard input has no texts"):
        read_texts(Path("-"))


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Missing, without a text, of another format, or a folder."""
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "texts.csv").write_text("a,b")
    for name, reason in (
        ("missing.txt", "no such input file"),
        ("missing", "no such input file"),
        ("missing.csv", "no such input file"),
        ("empty.txt", "has no texts"),
        ("folder.txt", "cannot read"),
        ("texts.csv", "cannot tell the format"),
    ):
        with pytest.raises(InputError, match=reason):
            read_texts(tmp_path / name)
