"""The wire format of protobuf: a message is a sequence of fields, each a number, a wire type and a content."""

from __future__ import annotations

import mmap
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxtool.errors import ModelFileError

VARINT, BYTES = 0, 2
_FIXED64, _FIXED32 = 1, 5
_MAX_FIELD_NUMBER = (1 << 29) - 1
_MAX_VARINT = (1 << 64) - 1  # the tenth byte of a varint has room for more, which protobuf drops


class _MalformedError(Exception):
    """The bytes are no ONNX model; becomes a ModelFileError where the path is known."""


def malformed(reason: str, position: int) -> _MalformedError:
    """Make the error to raise for what is wrong at the byte `position`."""
    return _MalformedError(f"{reason} (at byte {position})")


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map the file at `path` for random reads, and name it in every error raised while it is open."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe would wait for its writer
            raise ModelFileError(f"{path} is not a regular file", "write the model to a file first")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if hasattr(data, "madvise"):
                data.madvise(mmap.MADV_RANDOM)
            yield data
    except _MalformedError as error:
        raise ModelFileError(
            f"{path} is not a complete ONNX model: {error}",
            "the file may be truncated or of another format; export or copy it again",
        ) from None
    except FileNotFoundError:
        raise ModelFileError(f"no such model file: {path}", "check the path") from None
    except IsADirectoryError:
        raise ModelFileError(f"{path} is a folder", "pass the .onnx file in it") from None
    except ValueError as error:
        if path.stat().st_size:
            raise
        raise ModelFileError(f"{path} is empty", "export or copy it again") from error
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}", "check its permissions") from error


def fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, and start and end of the content (for a varint: the value, and 0) of every field."""
    while position < end:
        tag_position = position
        tag = data[position]
        if tag < 0x80:  # one byte, as most are, without a call
            position += 1
        else:
            tag, position = read_varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= _MAX_FIELD_NUMBER:
            raise malformed(f"field number {number}", tag_position)
        if kind == VARINT:
            value, position = read_varint(data, position, end)
            yield number, kind, value, 0
            continue
        if kind == BYTES:
            length, position = read_varint(data, position, end)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise malformed(f"wire type {kind}", tag_position)
        if length > end - position:
            raise malformed(f"a field of {length} bytes where {end - position} are left", tag_position)
        yield number, kind, position, position + length
        position += length


def read_varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    """Return the unsigned number at `position`, and the position behind it."""
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MAX_VARINT, position
        shift += 7
        if shift > 63:
            raise malformed("a number of more than ten bytes", position)
    raise malformed("the file ends inside a number", position)


def packed_varints(data: mmap.mmap, position: int, end: int) -> list[int]:
    """Return the unsigned numbers of a packed repeated field."""
    values = []
    while position < end:
        value, position = read_varint(data, position, end)
        values.append(value)
    return values


def signed(value: int) -> int:
    """Read a 64-bit varint as two's complement, which is how protobuf stores negative numbers."""
    return value - (1 << 64) if value >= 1 << 63 else value


def read_text(data: mmap.mmap, start: int, end: int) -> str:
    """Return the content of a string field."""
    return decode(data[start:end], start)


def decode(raw: bytes, position: int) -> str:
    """Decode the name that was read at `position`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise malformed(f"a name that is not UTF-8: {raw[:40]!r}", position) from None


def read_entry(data: mmap.mmap, start: int, end: int) -> tuple[str, str]:
    """Return key and value of a StringStringEntryProto."""
    key = value = ""
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            key = read_text(data, first, last)
        elif number == 2 and kind == BYTES:
            value = read_text(data, first, last)
    return key, value


def encode_header(number: int, length: int) -> bytes:
    """Encode what precedes the content of a length-delimited field."""
    return _encode_varint(number << 3 | BYTES) + _encode_varint(length)


def encode_field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    return encode_header(number, len(content)) + content


def encode_number(number: int, value: int) -> bytes:
    """Encode a varint field of an unsigned value."""
    return _encode_varint(number << 3 | VARINT) + _encode_varint(value)


def encode_entry(number: int, key: str, value: str) -> bytes:
    """Encode a field that holds a StringStringEntryProto."""
    return encode_field(number, encode_field(1, key.encode()) + encode_field(2, value.encode()))


def copy_field(data: mmap.mmap, number: int, kind: int, start: int, end: int) -> bytes:
    """Encode a field as `fields` gave it."""
    if kind == VARINT:
        return encode_number(number, start)
    if kind == BYTES:
        return encode_field(number, data[start:end])
    return _encode_varint(number << 3 | kind) + data[start:end]


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
