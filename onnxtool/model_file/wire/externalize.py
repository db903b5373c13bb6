"""Rewrite a model file, in memory and without its weights, so that the weights are external data in that same file."""

from __future__ import annotations

from pathlib import Path

from onnxtool.model_file.wire.protobuf import (
    BYTES,
    Data,
    copy_field,
    encode_entry,
    encode_field,
    encode_number,
    fields,
    opened,
)

# Shapes, axes and scalars stay in the message, because passes read them; a weight matrix is larger than this.
LARGE_BYTES = 1024

_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
_EXTERNAL = 1


def externalized(path: Path) -> bytes:
    """Return the ModelProto at `path` with the raw data of large initializers replaced by where it lies in the file.

    A tool that reads external data then maps the weights from the model file itself, at any size: they are
    neither parsed nor copied. Initializers inside of nodes, and those in typed fields, stay as they are.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with opened(path) as data:
        message = bytearray()
        for number, kind, start, end in fields(data, 0, len(data)):
            if number == _GRAPH and kind == BYTES:
                message += encode_field(number, _graph(data, start, end, path.name))
            else:
                message += copy_field(data, number, kind, start, end)
        return bytes(message)


def _graph(data: Data, start: int, end: int, location: str) -> bytes:
    message = bytearray()
    for number, kind, first, last in fields(data, start, end):
        if number == _INITIALIZER and kind == BYTES and last - first > LARGE_BYTES:
            message += encode_field(number, _tensor(data, first, last, location))
        else:
            message += copy_field(data, number, kind, first, last)
    return bytes(message)


def _tensor(data: Data, start: int, end: int, location: str) -> bytes:
    parts = list(fields(data, start, end))
    if not any(number == _RAW_DATA and last - first > LARGE_BYTES for number, _, first, last in parts):
        return data[start:end]
    message = bytearray()
    for number, kind, first, last in parts:
        if number == _RAW_DATA and kind == BYTES:
            place = {"location": location, "offset": str(first), "length": str(last - first)}
            for key, value in place.items():
                message += encode_entry(_EXTERNAL_DATA, key, value)
            message += encode_number(_DATA_LOCATION, _EXTERNAL)
        elif number not in (_EXTERNAL_DATA, _DATA_LOCATION):
            message += copy_field(data, number, kind, first, last)
    return bytes(message)
