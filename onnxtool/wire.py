"""Read a model's structure from its protobuf wire format, without its weights, with the standard library only.

The weights are nearly all of a model file and the structure is a small part of a percent of it, so this reader maps
the file, walks the length-delimited fields and jumps over every tensor payload: milliseconds instead of seconds, and
no limit of 2 GB. Field numbers are those of onnx.proto3 in the ONNX specification.

A model file is untrusted input: every length is checked against the message that contains it, nesting is bounded,
and whatever does not parse raises ModelFileError with the byte at which it went wrong.
"""

from __future__ import annotations

import mmap
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

from onnxtool.errors import ModelFileError
from onnxtool.reports import Dimension, TensorInfo

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_FIELD_NUMBER = (1 << 29) - 1
_MAX_VARINT = (1 << 64) - 1  # the tenth byte of a varint has room for more, which protobuf drops
_MAX_NESTING = 64
_MAX_RANK = 64  # as numpy; the product of many hostile dims would take forever

# TensorProto.DataType: its name in numpy and ml_dtypes, and the bits of one element (0: variable).
_DTYPES: dict[int, tuple[str, int]] = {
    0: ("undefined", 0),
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    4: ("uint16", 16),
    5: ("int16", 16),
    6: ("int32", 32),
    7: ("int64", 64),
    8: ("string", 0),
    9: ("bool", 8),
    10: ("float16", 16),
    11: ("float64", 64),
    12: ("uint32", 32),
    13: ("uint64", 64),
    14: ("complex64", 64),
    15: ("complex128", 128),
    16: ("bfloat16", 16),
    17: ("float8_e4m3fn", 8),
    18: ("float8_e4m3fnuz", 8),
    19: ("float8_e5m2", 8),
    20: ("float8_e5m2fnuz", 8),
    21: ("uint4", 4),
    22: ("int4", 4),
    23: ("float4_e2m1fn", 4),
    24: ("float8_e8m0fnu", 8),
    25: ("uint2", 2),
    26: ("int2", 2),
    27: ("float6_e2m3fn", 6),
    28: ("float6_e3m2fn", 6),
}
DTYPE_NAMES = frozenset(name for name, _ in _DTYPES.values())


# Named tuples, as `onnxtool stats` spends more time on making classes than on reading: dataclasses take seven times
# as long to make.


class ExternalData(NamedTuple):
    """Where a tensor's bytes lie outside the graph file.

    Attributes:
        length: bytes, from the dtype and dims where the file leaves it out; None for a dtype that does not tell.
    """

    location: str
    offset: int
    length: int | None


class Tensor(NamedTuple):
    """An initializer without its data; of a sparse one its values, which have neither payload nor external.

    Attributes:
        size_bytes: bytes of the elements: by dtype and dims, or as stored for strings and unknown dtypes.
        payload: start and length of raw_data in the graph file; None for tensors stored in any other way.
        external: where the data lies, for a tensor outside the graph file.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    size_bytes: int
    payload: tuple[int, int] | None = None
    external: ExternalData | None = None

    @property
    def num_elements(self) -> int:
        """The product of the dims; 1 for a scalar."""
        return prod(self.dims)


class Node(NamedTuple):
    """One operator call of the main graph; an input that is left out is an empty string."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Structure(NamedTuple):
    """All of a model but its weights. Node counts include the bodies of If, Loop and Scan.

    Attributes:
        inputs: graph inputs that are not initializers.
        initializers: those of the main graph and of every graph inside a node.
        external: every piece of data outside the graph file, those of node attributes and functions included.
    """

    ir_version: int
    producer: str
    opsets: dict[str, int]
    metadata: dict[str, str]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    initializers: tuple[Tensor, ...]
    ops: dict[str, int]
    num_functions: int
    num_subgraphs: int
    external: tuple[ExternalData, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes of the main graph and of every graph inside a node."""
        return sum(self.ops.values())


def read_structure(path: Path) -> Structure:
    """Read the structure of the ONNX file at `path`.

    Raises:
        ModelFileError: there is no such file, or it is not a complete ONNX model.
    """
    with _mapped(path) as data:
        model = _Model()
        for number, kind, start, end in _fields(data, 0, len(data)):
            if number == 1 and kind == _VARINT:
                model.ir_version = _signed(start)
            elif number in (2, 3) and kind == _BYTES:
                model.producer[number] = _text(data, start, end)
            elif number == 7 and kind == _BYTES:
                model.has_graph = True
                _read_graph(data, start, end, model, depth=0)
            elif number == 8 and kind == _BYTES:
                domain, version = _read_opset(data, start, end)
                model.opsets[domain or "ai.onnx"] = version
            elif number == 14 and kind == _BYTES:
                key, value = _read_entry(data, start, end)
                model.metadata[key] = value
            elif number == 25 and kind == _BYTES:
                model.num_functions += 1
                _read_function(data, start, end, model)
        # Opsets are obligatory from IR version 3 on, and they follow the graph: a copy that broke off lacks them.
        if not model.has_graph or not model.ir_version or (model.ir_version >= 3 and not model.opsets):
            raise _malformed("no graph, no IR version or no opset in it", len(data))
        return model.structure()


def read_nodes(path: Path) -> Iterator[Node]:
    """Yield the nodes of the main graph of the ONNX file at `path`, in their order, one at a time.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with _mapped(path) as data:
        for number, kind, start, end in _fields(data, 0, len(data)):
            if number == 7 and kind == _BYTES:
                for inner, inner_kind, node_start, node_end in _fields(data, start, end):
                    if inner == 1 and inner_kind == _BYTES:
                        yield _read_node(data, node_start, node_end)


def encode_metadata(entries: dict[str, str]) -> bytes:
    """Encode `entries` as ModelProto.metadata_props; appended to a serialized model, they are added to it.

    Protobuf reads the concatenation of two messages as their merge, so a file of any size is stamped by writing a
    few bytes at its end. The caller makes sure that no key is there already.
    """
    encoded = bytearray()
    for key, value in entries.items():
        entry = _encode_field(1, key.encode()) + _encode_field(2, value.encode())
        encoded += _encode_field(14, entry)
    return bytes(encoded)


class _Model:
    """What has been read so far."""

    def __init__(self) -> None:
        self.ir_version = 0
        self.has_graph = False
        self.producer: dict[int, str] = {}
        self.opsets: dict[str, int] = {}
        self.metadata: dict[str, str] = {}
        self.inputs: list[TensorInfo] = []
        self.outputs: list[TensorInfo] = []
        self.initializers: list[Tensor] = []
        self.initialized: set[str] = set()
        self.external: list[ExternalData] = []
        self.ops: Counter[bytes] = Counter()
        self.num_functions = 0
        self.num_subgraphs = 0

    def structure(self) -> Structure:
        ops = Counter({_decode(op, 0): count for op, count in self.ops.items()})
        return Structure(
            ir_version=self.ir_version,
            producer=" ".join(self.producer[number] for number in sorted(self.producer)).strip(),
            opsets=dict(sorted(self.opsets.items())),
            metadata=dict(sorted(self.metadata.items())),
            inputs=tuple(value for value in self.inputs if value.name not in self.initialized),
            outputs=tuple(self.outputs),
            initializers=tuple(self.initializers),
            ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
            num_functions=self.num_functions,
            num_subgraphs=self.num_subgraphs,
            external=tuple(self.external),
        )


def _read_graph(data: mmap.mmap, start: int, end: int, model: _Model, depth: int) -> None:
    if depth > _MAX_NESTING:
        raise _malformed(f"graphs nested more than {_MAX_NESTING} deep", start)
    for number, kind, first, last in _fields(data, start, end):
        if kind != _BYTES:
            continue
        if number == 1:
            _count_node(data, first, last, model, depth)
        elif number == 5:
            _add_initializer(_read_tensor(data, first, last, model), model, depth)
        elif number == 11 and depth == 0:
            model.inputs.append(_read_value_info(data, first, last))
        elif number == 12 and depth == 0:
            model.outputs.append(_read_value_info(data, first, last))
        elif number == 15:
            values = _read_sparse_tensor(data, first, last, model)
            if values is not None:
                _add_initializer(values, model, depth)


def _add_initializer(tensor: Tensor, model: _Model, depth: int) -> None:
    model.initializers.append(tensor)
    if depth == 0:
        model.initialized.add(tensor.name)


def _read_function(data: mmap.mmap, start: int, end: int, model: _Model) -> None:
    """Read the body of a function for the data it has outside the file; its nodes do not count."""
    body = _Model()
    body.external = model.external
    for number, kind, first, last in _fields(data, start, end):
        if number == 7 and kind == _BYTES:
            _count_node(data, first, last, body, depth=0)
        elif number == 11 and kind == _BYTES:
            _read_attribute(data, first, last, body, depth=0)


def _count_node(data: mmap.mmap, start: int, end: int, model: _Model, depth: int) -> None:
    op_type = domain = b""
    for number, kind, first, last in _fields(data, start, end):
        if kind != _BYTES:
            continue
        if number == 4:
            op_type = data[first:last]
        elif number == 7:
            domain = data[first:last]
        elif number == 5:
            _read_attribute(data, first, last, model, depth)
    model.ops[domain + b"::" + op_type if domain not in (b"", b"ai.onnx") else op_type] += 1


def _read_attribute(data: mmap.mmap, start: int, end: int, model: _Model, depth: int) -> None:
    for number, kind, first, last in _fields(data, start, end):
        if kind != _BYTES:
            continue
        if number in (6, 11):
            model.num_subgraphs += 1
            _read_graph(data, first, last, model, depth + 1)
        elif number in (5, 10):
            _read_tensor(data, first, last, model)
        elif number in (22, 23):
            _read_sparse_tensor(data, first, last, model)


def _read_node(data: mmap.mmap, start: int, end: int) -> Node:
    texts: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: [], 7: []}
    for number, kind, first, last in _fields(data, start, end):
        if kind == _BYTES and number in texts:
            texts[number].append(_text(data, first, last))
    name, op_type, domain = ("".join(texts[number][-1:]) for number in (3, 4, 7))
    return Node(op_type, domain, name, tuple(texts[1]), tuple(texts[2]))


def _read_sparse_tensor(data: mmap.mmap, start: int, end: int, model: _Model) -> Tensor | None:
    """Read the values of a sparse tensor; they are no tensor by themselves, so nothing else is told of them."""
    tensors = {
        number: _read_tensor(data, first, last, model)
        for number, kind, first, last in _fields(data, start, end)
        if number in (1, 2) and kind == _BYTES
    }
    values = tensors.get(1)
    return None if values is None else Tensor(values.name, values.dtype, values.dims, values.size_bytes)


def _read_tensor(data: mmap.mmap, start: int, end: int, model: _Model) -> Tensor:
    """Read a tensor without its data, and note in `model` where data outside the file lies."""
    name, data_type, stored_bytes = "", 0, 0
    dims: list[int] = []
    payload: tuple[int, int] | None = None
    entries: dict[str, str] = {}
    is_external = False
    for number, kind, first, last in _fields(data, start, end):
        if number == 1 and kind in (_VARINT, _BYTES):
            dims += [first] if kind == _VARINT else _packed_varints(data, first, last)
        elif number == 2 and kind == _VARINT:
            data_type = _signed(first)
        elif number == 8 and kind == _BYTES:
            name = _text(data, first, last)
        elif number in (4, 5, 6, 7, 9, 10, 11) and kind == _BYTES:
            stored_bytes += last - first
            if number == 9:
                payload = (first, last - first)
        elif number == 13 and kind == _BYTES:
            key, value = _read_entry(data, first, last)
            entries[key] = value
        elif number == 14 and kind == _VARINT:
            is_external = first == 1
    if len(dims) > _MAX_RANK:
        raise _malformed(f"tensor {name!r} has {len(dims)} dimensions", start)
    sizes = tuple(_signed(dim) for dim in dims)
    if any(dim < 0 for dim in sizes):
        raise _malformed(f"tensor {name!r} has a negative dimension: {list(sizes)}", start)
    dtype, bits = _DTYPES.get(data_type, (f"type{data_type}", 0))
    size_bytes = (prod(sizes) * bits + 7) // 8 if bits else stored_bytes
    if is_external:
        external = _external_data(name, entries, size_bytes if bits else None, start)
        model.external.append(external)
        return Tensor(name, dtype, sizes, size_bytes if bits else external.length or 0, None, external)
    if payload is not None and bits and payload[1] != size_bytes:
        raise _malformed(f"tensor {name!r} needs {size_bytes} bytes and holds {payload[1]}", start)
    return Tensor(name, dtype, sizes, size_bytes, payload)


def _external_data(name: str, entries: dict[str, str], size_bytes: int | None, position: int) -> ExternalData:
    try:
        # A length of 0 says as little as none: both mean the rest of the file, of which only size_bytes are read.
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0")) or size_bytes
    except ValueError:
        raise _malformed(f"tensor {name!r} has an external offset or length that is no number", position) from None
    if not entries.get("location") or offset < 0 or (length is not None and length < 0):
        raise _malformed(f"tensor {name!r} does not say where its external data lies", position)
    if size_bytes is not None and length != size_bytes:
        raise _malformed(f"tensor {name!r} needs {size_bytes} bytes and has {length} outside the file", position)
    return ExternalData(entries["location"], offset, length)


def _read_value_info(data: mmap.mmap, start: int, end: int) -> TensorInfo:
    name, dtype = "", "undefined"
    shape: list[Dimension] = []
    for number, kind, first, last in _fields(data, start, end):
        if number == 1 and kind == _BYTES:
            name = _text(data, first, last)
        elif number == 2 and kind == _BYTES:
            for inner, inner_kind, type_start, type_end in _fields(data, first, last):
                if inner == 1 and inner_kind == _BYTES:
                    dtype, shape = _read_tensor_type(data, type_start, type_end)
                elif inner_kind == _BYTES and inner in (4, 5, 8, 9):
                    dtype = {4: "sequence", 5: "map", 8: "sparse_tensor", 9: "optional"}[inner]
    return TensorInfo(name, dtype, tuple(shape))


def _read_tensor_type(data: mmap.mmap, start: int, end: int) -> tuple[str, list[Dimension]]:
    dtype = "undefined"
    shape: list[Dimension] = []
    for number, kind, first, last in _fields(data, start, end):
        if number == 1 and kind == _VARINT:
            dtype = _DTYPES.get(first, (f"type{first}", 0))[0]
        elif number == 2 and kind == _BYTES:
            for inner, inner_kind, dim_start, dim_end in _fields(data, first, last):
                if inner == 1 and inner_kind == _BYTES:
                    shape.append(_read_dimension(data, dim_start, dim_end))
    return dtype, shape


def _read_dimension(data: mmap.mmap, start: int, end: int) -> Dimension:
    dimension: Dimension = None
    for number, kind, first, last in _fields(data, start, end):
        if number == 1 and kind == _VARINT:
            dimension = _signed(first)
        elif number == 2 and kind == _BYTES:
            dimension = _text(data, first, last) or None
    return dimension


def _read_opset(data: mmap.mmap, start: int, end: int) -> tuple[str, int]:
    domain, version = "", 0
    for number, kind, first, last in _fields(data, start, end):
        if number == 1 and kind == _BYTES:
            domain = _text(data, first, last)
        elif number == 2 and kind == _VARINT:
            version = _signed(first)
    return domain, version


def _read_entry(data: mmap.mmap, start: int, end: int) -> tuple[str, str]:
    key = value = ""
    for number, kind, first, last in _fields(data, start, end):
        if number == 1 and kind == _BYTES:
            key = _text(data, first, last)
        elif number == 2 and kind == _BYTES:
            value = _text(data, first, last)
    return key, value


def _fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, and start and end of the content (for a varint: the value, and 0) of every field."""
    while position < end:
        tag_position = position
        tag = data[position]
        if tag < 0x80:  # one byte, as most are, without a call
            position += 1
        else:
            tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= _MAX_FIELD_NUMBER:
            raise _malformed(f"field number {number}", tag_position)
        if kind == _VARINT:
            value, position = _varint(data, position, end)
            yield number, kind, value, 0
            continue
        if kind == _BYTES:
            length, position = _varint(data, position, end)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise _malformed(f"wire type {kind}", tag_position)
        if length > end - position:
            raise _malformed(f"a field of {length} bytes where {end - position} are left", tag_position)
        yield number, kind, position, position + length
        position += length


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MAX_VARINT, position
        shift += 7
        if shift > 63:
            raise _malformed("a number of more than ten bytes", position)
    raise _malformed("the file ends inside a number", position)


def _packed_varints(data: mmap.mmap, position: int, end: int) -> list[int]:
    values = []
    while position < end:
        value, position = _varint(data, position, end)
        values.append(value)
    return values


def _signed(value: int) -> int:
    """Read a 64-bit varint as two's complement, which is how protobuf stores negative numbers."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(data: mmap.mmap, start: int, end: int) -> str:
    return _decode(data[start:end], start)


def _decode(raw: bytes, position: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _malformed(f"a name that is not UTF-8: {raw[:40]!r}", position) from None


def _encode_field(number: int, content: bytes) -> bytes:
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class _MalformedError(Exception):
    """The bytes are no ONNX model; becomes a ModelFileError where the path is known."""


def _malformed(reason: str, position: int) -> _MalformedError:
    return _MalformedError(f"{reason} (at byte {position})")


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
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
