"""Rewrite a model in memory, without its weights, which become external data in the model file itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxtool.model_file.wire.messages import GRAPH, MODEL, TENSOR
from onnxtool.model_file.wire.protobuf import (
    Data,
    Message,
    Span,
    copy_field,
    encode_entry,
    encode_field,
    encode_number,
    opened,
    read,
)

# Shapes, axes and scalars stay in the message, because passes read them; a weight matrix is larger than this.
LARGE_BYTES = 1024

_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of TensorProto
_EXTERNAL = 1


class _Every(Message):
    """A table that has every field: under its name where `named` has it, and with its tag, undecoded."""

    def __init__(self, named: Message) -> None:
        self._named = named

    def get(self, tag: int, default: Any = None) -> Any:
        name = self._named[tag][0] if tag in self._named else ""
        return name, lambda _, start, end: (tag, start, end)


_MODEL, _GRAPH, _TENSOR = _Every(MODEL), _Every(GRAPH), _Every(TENSOR)


def externalized(path: Path) -> bytes:
    """Return the ModelProto at `path` with the raw data of large initializers replaced by its location in the file.

    A tool that reads external data then maps the weights from the model file itself, at any size: they are
    neither parsed nor copied. Initializers inside nodes or in typed fields stay as they are.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with opened(path) as data:
        message = bytearray()
        for name, (tag, start, end) in read(data, _MODEL, (0, len(data))):
            if name == "graph":
                message += encode_field(tag >> 3, _graph(data, (start, end), path.name))
            else:
                message += copy_field(data, tag, start, end)
        return bytes(message)


def _graph(data: Data, place: Span, location: str) -> bytes:
    message = bytearray()
    for name, (tag, start, end) in read(data, _GRAPH, place):
        if name == "initializer" and end - start > LARGE_BYTES:
            message += encode_field(tag >> 3, _tensor(data, (start, end), location))
        else:
            message += copy_field(data, tag, start, end)
    return bytes(message)


def _tensor(data: Data, place: Span, location: str) -> bytes:
    parts = list(read(data, _TENSOR, place))
    if not any(name == "raw_data" and end - start > LARGE_BYTES for name, (_, start, end) in parts):
        return data[slice(*place)]
    message = bytearray()
    for name, (tag, start, end) in parts:
        if name == "raw_data":
            where = {"location": location, "offset": str(start), "length": str(end - start)}
            for key, value in where.items():
                message += encode_entry(_EXTERNAL_DATA, key, value)
            message += encode_number(_DATA_LOCATION, _EXTERNAL)
        elif name not in ("external_data", "data_location"):
            message += copy_field(data, tag, start, end)
    return bytes(message)
