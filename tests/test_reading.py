"""Bounded readers: too large, too deep, too long or endless input is an error, and nothing is filled or waited for."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onnxtool import reading
from onnxtool.benchmarking.baseline import Baseline
from onnxtool.checkpoint.text_files import iterate_texts
from onnxtool.encoding.manifest import read_manifest
from onnxtool.errors import OnnxtoolError
from onnxtool.evaluation.collection import read_lines
from onnxtool.export.target import read_object
from onnxtool.release.config import read_config


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)


CONTENTS: dict[str, Callable[[Path], object]] = {
    "sparse": sparse,
    "deep": lambda path: path.write_text("[" * 200 + "]" * 200),
    "deeper": lambda path: path.write_text("[" * 100_000),
    "digits": lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"),
    "pipe": os.mkfifo,
}
READERS: dict[str, Callable[[Path], object]] = {"baseline": Baseline.read, "manifest": read_manifest}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("reader", READERS)
def test_json_from_outside_is_one_error(tmp_path: Path, reader: str, content: str) -> None:
    """The file is named, and neither read whole nor waited for."""
    path = tmp_path / "file.json"
    CONTENTS[content](path)
    with pytest.raises(OnnxtoolError, match="file.json"):
        READERS[reader](path)


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 100_000])
def test_toml_from_outside_is_one_error(tmp_path: Path, text: str) -> None:
    """Python's own error for too many digits is no error of the parser."""
    path = tmp_path / "release.toml"
    path.write_text(text)
    with pytest.raises(OnnxtoolError, match="release.toml is not valid TOML"):
        read_config(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
@pytest.mark.parametrize("reader", [iterate_texts, read_lines])
def test_a_line_without_an_end_is_one_error(
    tmp_path: Path, name: str, reader: Callable[[Path], Iterator[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never held whole."""
    monkeypatch.setattr(reading, "MOST_LINE_BYTES", 1000)
    (tmp_path / name).write_bytes(gzip.compress(b"x" * 5000) if name.endswith(".gz") else b"x" * 5000)
    with pytest.raises(OnnxtoolError, match="a.*:1 .*more than|a.*:1 is longer than"):
        list(reader(tmp_path / name))


def test_a_long_line_is_left_out_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size counts, so that places in the file stay right."""
    monkeypatch.setattr(reading, "MOST_LINE_BYTES", 4)
    file = io.BufferedReader(io.BytesIO(b"ab\n123456\ncd"))
    assert list(reading.lines_of(file)) == [(b"ab\n", 3), (None, 7), (b"cd", 2)]


def test_a_device_is_no_file() -> None:
    """It has no end."""
    with pytest.raises(OSError, match="no regular file"):
        reading.read_bytes(Path("/dev/zero"))


def test_json_within_the_limits_is_read() -> None:
    """Many brackets beside each other are not deep."""
    assert reading.parse_json("[" + ",".join(["[]"] * 1000) + "]") == [[]] * 1000


def test_an_object_of_a_checkpoint_has_a_bound(tmp_path: Path) -> None:
    """A sparse config.json is refused before it is read."""
    sparse(tmp_path / "config.json")
    with pytest.raises(OnnxtoolError, match="config.json .*more than"):
        read_object(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[" * 129 + "]" * 129, "nested"), ("[" * 100_000, "nested"), ('{"a": -' + "9" * 5000 + "}", "digits")],
)
def test_json_beyond_a_limit_says_which_one(text: str, reason: str) -> None:
    """As text and as bytes."""
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=reason):
            reading.parse_json(content)


def test_a_file_beyond_its_limit_is_not_read(tmp_path: Path) -> None:
    """One of exactly that size is."""
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert reading.read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        reading.read_bytes(path, 4)
