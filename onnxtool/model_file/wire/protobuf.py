"""The wire format of protobuf: a message is a sequence of fields, each a number, a wire type and a content."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from onnxtool.errors import ModelFileError, some

VARINT, BYTES, FIXED32 = 0, 2, 5
_FIXED64 = 1
_MAX_FIELD_NUMBER = (1 << 29) - 1
_MAX_VARINT = (1 << 64) - 1  # the tenth byte of a varint has excess bits, which protobuf drops

# A model's structure is a few long runs of bytes, with a jump over the payload of each tensor.
_RUN_BYTES = 1 << 16
_JUMP_BYTES = 1 << 12
_HEADER_BYTES = 20  # a tag and a length, of ten bytes each at most
_MAX_TEXT_BYTES = 1 << 23  # of one value of metadata
_MAX_NAME_BYTES = 1 << 16

Span = tuple[int, int]  # start and end of a field's content in the file; for a varint, its value and 0
Decoder = Callable[["Data", int, int], Any] | None
Message = dict[int, tuple[str, Decoder]]  # by field number and wire type, as in a tag


class _MalformedError(Exception):
    """The bytes are not an ONNX model; becomes a ModelFileError once the path is known."""


def malformed(reason: str, position: int) -> _MalformedError:
    """Make the error to raise for a fault at the byte `position`."""
    return _MalformedError(f"{reason} (at byte {position})")


class Data:
    """Random access to the bytes of a file, with a small window in memory.

    The file is read rather than mapped: the pages around each mapped byte count as process memory, which for a file
    with hundreds of weights adds up to more than Python itself takes.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self.base = 0
        self.window = b""
        self._file = file
        self._allowance: int | None = None

    def allow(self, num_bytes: int) -> None:
        """Limit the memory for strings read from now on."""
        self._allowance = num_bytes

    def charge(self, num_bytes: int, position: int) -> None:
        """Count the memory of a stored name."""
        if self._allowance is not None:
            self._allowance -= num_bytes
            if self._allowance < 0:
                raise malformed("more names and metadata than any model has", position)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        """Return the bytes from `part.start` to `part.stop`."""
        first, last = part.start - self.base, part.stop - self.base
        if first >= 0 and last <= len(self.window):
            return self.window[first:last]
        if last - first <= _RUN_BYTES:
            self.move_to(part.start, last - first)
            return self.window[: last - first]
        return self._read(part.start, last - first)

    def move_to(self, position: int, size: int = _HEADER_BYTES) -> None:
        """Move the window so that it covers the `size` bytes at `position`, up to the end of the file."""
        follows = self.base <= position <= self.base + len(self.window)
        wanted = min(max(size, _RUN_BYTES if follows else _JUMP_BYTES), self.size - position)
        self.window, self.base = self._read(position, wanted), position

    def _read(self, position: int, size: int) -> bytes:
        self._file.seek(position)
        content = self._file.read(size)
        if len(content) < size:
            raise malformed(f"the file became shorter while it was read: {len(content)} of {size} bytes", position)
        return content


@contextmanager
def opened(path: Path) -> Iterator[Data]:
    """Open the file at `path` for random access, and name it in every error raised meanwhile."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a pipe would wait for its writer
            raise ModelFileError(f"{path} is not a regular file", "write the model to a file first")
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise ModelFileError(f"{path} is empty", "export or copy it again")
            yield Data(file, size)
    except _MalformedError as error:
        foreign = foreign_format(*_beginning(path))
        if foreign is not None:
            raise ModelFileError(f"{path} is {foreign[0]}, and no ONNX model", foreign[1]) from None
        raise ModelFileError(
            f"{path} is not a complete ONNX model: {error}",
            "the file may be truncated or of another format; export or copy it again",
        ) from None
    except FileNotFoundError:
        raise ModelFileError(f"no such model file: {path}", "check the path") from None
    except IsADirectoryError:
        files = [*sorted(path.glob("*.onnx")), *sorted(path.glob("*/*.onnx"))]
        hint = "export it first, if it is a checkpoint: no .onnx file is in it"
        if files:
            hint = f"pass {'one of its files: ' if len(files) > 1 else ''}{some(list(map(str, files)))}"
        raise ModelFileError(f"{path} is a folder", hint) from None
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}", "check its permissions") from error
    except ValueError:  # a path with a NUL in it
        raise ModelFileError(f"no such model file: {str(path)!r}", "check the path") from None


def _beginning(path: Path) -> tuple[bytes, int]:
    """Return the first bytes of a file, and its size; nothing if it cannot be read again."""
    try:
        with path.open("rb") as file:
            return file.read(1024), os.fstat(file.fileno()).st_size
    except OSError:
        return b"", 0


def read(data: Data, message: Message, place: Span) -> Iterator[tuple[str, Any]]:
    """Yield name and content of each field of the message at `place` that the table has.

    The content is the result of the field's decoder or, without a decoder, its location.
    """
    position, end = place
    while position < end:
        # A message that fits is read whole; of a larger one, only as much as the next headers take.
        needed = end - position if end - position <= _RUN_BYTES else _HEADER_BYTES
        if not data.base <= position <= data.base + len(data.window) - needed:
            data.move_to(position, needed)
        # A caller may move the window of `data` between two fields; this copy stays valid.
        window, base = data.window, data.base
        offset, limit = position - base, end - base
        whole_headers = limit if limit <= len(window) else len(window) - _HEADER_BYTES + 1
        while offset < whole_headers:
            tag_offset = offset
            tag = window[offset]
            if tag < 0x80:  # a single byte, as most are, needs no call
                offset += 1
            else:
                tag, offset = _varint(window, offset, limit, base)
            kind = tag & 7
            if not 0 < tag >> 3 <= _MAX_FIELD_NUMBER:
                raise malformed(f"field number {tag >> 3}", base + tag_offset)
            if kind == VARINT:
                start, offset = _varint(window, offset, limit, base)
                stop = 0
            else:
                if kind == BYTES:
                    if offset < limit and window[offset] < 0x80:
                        length = window[offset]
                        offset += 1
                    else:
                        length, offset = _varint(window, offset, limit, base)
                elif kind in (FIXED32, _FIXED64):
                    length = 4 if kind == FIXED32 else 8
                else:
                    raise malformed(f"wire type {kind}", base + tag_offset)
                if length > limit - offset:
                    raise malformed(f"a field of {length} bytes where {limit - offset} are left", base + tag_offset)
                start, offset = base + offset, offset + length
                stop = base + offset
            known = message.get(tag)
            if known is not None:
                name, decoder = known
                yield name, (start, stop) if decoder is None else decoder(data, start, stop)
        position = base + offset


def _varint(window: bytes, offset: int, limit: int, base: int) -> tuple[int, int]:
    """Return the unsigned number at `offset`, and the offset after it."""
    value = shift = 0
    while offset < limit:
        byte = window[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MAX_VARINT, offset
        shift += 7
        if shift > 63:
            raise malformed("a number of more than ten bytes", base + offset)
    raise malformed("the file ends inside a number", base + offset)


def packed_varints(data: Data, start: int, end: int) -> list[int]:
    """Return the unsigned numbers of a packed repeated field."""
    values: list[int] = []
    packed = data[start:end]
    offset = 0
    while offset < len(packed):
        value, offset = _varint(packed, offset, len(packed), start)
        values.append(value)
    return values


def signed(value: int) -> int:
    """Read a 64-bit varint as two's complement, which is how protobuf stores negative numbers."""
    return value - (1 << 64) if value >= 1 << 63 else value


def read_text(data: Data, start: int, end: int, *, is_kept: bool = True) -> str:
    """Return the content of a string field; one that is not `is_kept` does not count towards the memory limit."""
    if end - start > _MAX_TEXT_BYTES:
        raise malformed(f"a text of {end - start} bytes", start)
    text = decode(data[start:end], start)
    if is_kept:
        data.charge(text.__sizeof__(), start)
    return text


def decode(raw: bytes, position: int) -> str:
    """Decode a name read at `position`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise malformed(f"a name that is not UTF-8: {raw[:40]!r}", position) from None


def read_name(data: Data, start: int, end: int) -> bytes:
    """Return the content of a string field that names something in a graph."""
    if end - start > _MAX_NAME_BYTES:
        raise malformed(f"a name of {end - start} bytes", start)
    return data[start:end]


def encode_header(number: int, length: int) -> bytes:
    """Encode the header of a length-delimited field."""
    return _encode_varint(number << 3 | BYTES) + _encode_varint(length)


def encode_field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    return encode_header(number, len(content)) + content


def encode_number(number: int, value: int) -> bytes:
    """Encode an unsigned value as a varint field."""
    return _encode_varint(number << 3 | VARINT) + _encode_varint(value)


def encode_entry(number: int, key: str, value: str) -> bytes:
    """Encode a field that holds a StringStringEntryProto."""
    return encode_field(number, encode_field(1, key.encode()) + encode_field(2, value.encode()))


def copy_field(data: Data, tag: int, start: int, end: int) -> bytes:
    """Encode a field from a table of every field."""
    kind = tag & 7
    if kind == VARINT:
        return _encode_varint(tag) + _encode_varint(start)
    length = _encode_varint(end - start) if kind == BYTES else b""
    return _encode_varint(tag) + length + data[start:end]


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_HEAD_BYTES = 1024
_EXPORT = "pass the folder of the checkpoint to onnxtool export --model_name"
_ORIGIN = "export the checkpoint that it was made of: onnxtool export --model_name"
_ITSELF = "pass the .onnx file"
_DOWNLOAD = "download the file itself: its address has /resolve/ where that of the page has /blob/"
# Position, the bytes there, the kind of file, and the way out.
_BEGINNINGS = (
    (0, b"version https://git-lfs", "a Git LFS pointer to a file that was not fetched", "run `git lfs pull`"),
    (0, b"GGUF", "a GGUF file, as llama.cpp reads them", _ORIGIN),
    (4, b"TFL3", "a TensorFlow Lite model", _ORIGIN),
    (4, b"ORTM", "a model in onnxruntime's own format", "pass the .onnx file that it was made of"),
    (0, b"\x89HDF\r\n", "an HDF5 file, as Keras writes them", _ORIGIN),
    (0, b"PAR1", "a Parquet file", _ITSELF),
    (0, b"\x93NUMPY", "an array of NumPy", _ITSELF),
    (0, b"\x1f\x8b", "a file packed by gzip", "unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "a file packed by zstd", "unpack it first"),
    (0, b"\xfd7zXZ", "a file packed by xz", "unpack it first"),
    (0, b"%PDF", "a PDF file", _ITSELF),
    (0, b"\x89PNG", "an image", _ITSELF),
    (0, b"\xff\xfe", "a text file in UTF-16", _ITSELF),
    (257, b"ustar", "a tar archive", "unpack it first"),
)
# For text, in lower case.
_TEXTS = (
    (b"<!doctype html", "a web page", _DOWNLOAD),
    (b"<html", "a web page", _DOWNLOAD),
    (b"<?xml", "an XML file, as OpenVINO writes them", _ORIGIN),
)
_JSON = re.compile(rb'\{\s*["}]|\[[\[\s]*["{\d\]-]')
_CONTROLS = frozenset(range(32)) - frozenset(b"\t\n\f\r\x1b")


def foreign_format(head: bytes, size: int) -> tuple[str, str] | None:
    """Return the kind of a file that is not an ONNX model, and the way out; None if unknown.

    Args:
        head: the first kilobyte.
        size: the file size in bytes.
    """
    for place, magic, name, hint in _BEGINNINGS:
        if head[place : place + len(magic)] == magic:
            return name, hint
    if head[:4] == b"PK\x03\x04":
        is_torch = b"/data.pkl" in head[:_HEAD_BYTES] or b"/.format_version" in head[:_HEAD_BYTES]
        return ("a file of PyTorch", _EXPORT) if is_torch else ("a ZIP archive", "unpack it first")
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle, as older PyTorch writes its files", _EXPORT
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size:
        return "a file of safetensors", _EXPORT
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if found := next(((name, hint) for begin, name, hint in _TEXTS if text.startswith(begin)), None):
        return found
    if _JSON.match(text):
        return "a JSON file", _ITSELF
    # A model begins with a control character, the tag of its version; a letter may be cut at the end of `head`.
    is_text = not _CONTROLS.intersection(head) and "\ufffd" not in head[:-3].decode(errors="replace")[:-1]
    return ("a text file", _ITSELF) if head and is_text else None
