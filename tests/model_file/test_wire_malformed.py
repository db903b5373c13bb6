"""Whatever a file holds, reading its structure ends in a structure or in a ModelFileError with a hint."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from onnx import TensorProto

from onnxtool.errors import ModelFileError
from onnxtool.model_file.wire import read_structure
from tests.model_file.protobuf import everything, field

MODEL_BYTES: bytes = everything().SerializeToString()


def with_initializer(content: bytes) -> bytes:
    """Return the model with one more initializer, whose encoding is `content`."""
    return MODEL_BYTES + field(7, field(5, content))


def assert_refused(path: Path, reason: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(reason)) as caught:
        read_structure(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def refused(folder: Path, data: bytes, reason: str) -> None:
    path = folder / "model.onnx"
    path.write_bytes(data)
    assert_refused(path, reason)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """A model cut at any byte is refused, but for the few cuts between two whole fields after the opsets."""
    path = tmp_path / "model.onnx"
    read_at = []
    for length in range(len(MODEL_BYTES)):
        path.write_bytes(MODEL_BYTES[:length])
        try:
            read_structure(path)
            read_at.append(length)
        except ModelFileError:
            continue
    # Two opsets, metadata, training and functions come last, and any of them but the first opset may be left out.
    assert len(read_at) == 4


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"# A README\n" * 999, "is a text file, and no ONNX model"),
        ("Grüße, 世界\n".encode() * 999, "is a text file, and no ONNX model"),
        ("Grüße".encode("utf-16"), "is a text file in UTF-16, and no ONNX model"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "is an image, and no ONNX model"),
        (b"caf\xe9" * 9, "is not a complete ONNX model"),
        (b"PK\x03\x04" + bytes(100), "is a ZIP archive, and no ONNX model"),
        (b"\x08\x0a", "no graph"),
        (MODEL_BYTES + b"\x00\x01", "field number 0"),
        (MODEL_BYTES + b"\x0b\x0c", "wire type 3"),
        (MODEL_BYTES + b"\x80\x80\x80\x80\x80\x01\x01", "field number"),
        (MODEL_BYTES + b"\x08" + b"\x80" * 10 + b"\x01", "more than ten bytes"),
        (MODEL_BYTES + b"\x08\xff", "ends inside a number"),
        (MODEL_BYTES + b"\x3a\x7f\x00", "a field of 127 bytes where 1 are left"),
        (MODEL_BYTES + b"\x3a" + b"\xff" * 9 + b"\x01", "bytes where 0 are left"),
        (MODEL_BYTES + field(2, b"\xff\xfe"), "not UTF-8"),
        (MODEL_BYTES + field(7, field(1, field(4, b"\xc3"))), "not UTF-8"),
        (with_initializer(b"\x08\x02\x10\x01" + field(8, b"w") + field(9, bytes(7))), "needs 8 bytes and holds 7"),
        (with_initializer(b"\x08" + b"\xff" * 9 + b"\x01"), "negative dimension"),
        (with_initializer(b"\x08\x01" * 65), "65 dimensions"),
        (with_initializer(b"\x70\x01"), "where its external data lies"),
        (with_initializer(b"\x70\x01" + field(13, field(1, b"offset") + field(2, b"x"))), "no number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_bytes_are_named(tmp_path: Path, data: bytes, reason: str) -> None:
    """Each way of being malformed is an error that says what is wrong, with the file's name and a hint."""
    refused(tmp_path, data, reason)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"location": "w.bin", "offset": "-1"}, "where its external data lies"),
        ({"location": "w.bin", "length": "-8"}, "where its external data lies"),
        ({"location": "w.bin", "length": "4"}, "needs 8 bytes and has 4 outside the file"),
        ({"location": "w.bin", "offset": "9" * 5000}, "no number"),
        ({"offset": "0"}, "where its external data lies"),
    ],
)
def test_malformed_external_data_is_named(tmp_path: Path, entries: dict[str, str], reason: str) -> None:
    """A reference to external data that makes no sense is refused."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, text in entries.items():
        tensor.external_data.add(key=key, value=text)
    refused(tmp_path, with_initializer(tensor.SerializeToString()), reason)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder, a pipe and a file below a file are errors with a hint."""
    (tmp_path / "file").write_bytes(MODEL_BYTES)
    assert_refused(tmp_path / "missing.onnx", "no such model file")
    assert_refused(tmp_path, "is a folder")
    assert_refused(tmp_path / "file" / "model.onnx", "cannot read")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are POSIX")
def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    """A named pipe without a writer would block for ever."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "pipe").open("r+b", buffering=0):  # a writer, so that this test fails where it would wait
        assert_refused(tmp_path / "pipe", "not a regular file")
