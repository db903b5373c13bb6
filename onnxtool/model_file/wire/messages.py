"""The messages of onnx.proto3 as tables, and readers of tensors, without their data, and of types.

A table has the fields to read, each with its number and type.

Source: onnx.proto3 of the ONNX specification. Fields that are not in the table, or have a different wire type, are
skipped, as in protobuf.
"""

from __future__ import annotations

from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from onnxtool.errors import ModelFileError
from onnxtool.model_file.wire.protobuf import (
    BYTES,
    FIXED32,
    VARINT,
    Data,
    Decoder,
    Message,
    Span,
    malformed,
    packed_varints,
    read,
    read_name,
    read_text,
    signed,
)
from onnxtool.reports import Dimension, TensorInfo

MAX_RANK = 64  # as in numpy; multiplying many hostile dims would take forever
_VARINT_BYTES = 10  # maximum size of a packed number
_CONTINUED = bytes(range(0x80, 0x100))  # bytes of a varint that are followed by another

Types = dict[int, Decoder]


def _number(data: Data, value: int, _: int) -> int:
    return signed(value)


def _one(data: Data, value: int, _: int) -> list[int]:
    return [signed(value)]


def _packed(data: Data, start: int, end: int) -> list[int]:
    return [signed(value) for value in packed_varints(data, start, end)]


def _dims(data: Data, start: int, end: int) -> list[int]:
    if end - start > _VARINT_BYTES * MAX_RANK:
        raise malformed(f"{end - start} bytes of dimensions", start)
    return _packed(data, start, end)


def _single(data: Data, start: int, end: int) -> int:
    return 1


def _num_varints(data: Data, start: int, end: int) -> int:
    return len(data[start:end].translate(None, _CONTINUED))


def _num_floats(data: Data, start: int, end: int) -> int:
    return (end - start) // 4


# The field types: a decoder for each wire type that a field of that type may have. For a nested message or a payload,
# only the start and end are read.
PART: Types = {BYTES: None}
TEXT: Types = {BYTES: read_text}
NAME: Types = {BYTES: read_name}
INT: Types = {VARINT: _number}
INTS: Types = {BYTES: _packed, VARINT: _one}
DIMS: Types = {BYTES: _dims, VARINT: _one}
NUM_INTS: Types = {BYTES: _num_varints, VARINT: _single}
NUM_FLOATS: Types = {BYTES: _num_floats, FIXED32: _single}


def _message(**listed: tuple[int, Types]) -> Message:
    return {
        number << 3 | kind: (name, decoder)
        for name, (number, types) in listed.items()
        for kind, decoder in types.items()
    }


MODEL = _message(
    ir_version=(1, INT),
    producer_name=(2, TEXT),
    producer_version=(3, TEXT),
    graph=(7, PART),
    opset_import=(8, PART),
    metadata_props=(14, PART),
    training_info=(20, PART),
    functions=(25, PART),
)
GRAPH = _message(
    node=(1, PART),
    initializer=(5, PART),
    input=(11, PART),
    output=(12, PART),
    sparse_initializer=(15, PART),
)
NODE = _message(
    input=(1, NAME),
    output=(2, NAME),
    name=(3, NAME),
    op_type=(4, NAME),
    attribute=(5, PART),
    domain=(7, NAME),
    metadata_props=(9, PART),
)
ATTRIBUTE = _message(
    name=(1, NAME),
    f=(2, NUM_FLOATS),
    i=(3, INT),
    t=(5, PART),
    g=(6, PART),
    floats=(7, NUM_FLOATS),
    ints=(8, NUM_INTS),
    tensors=(10, PART),
    graphs=(11, PART),
    sparse_tensor=(22, PART),
    sparse_tensors=(23, PART),
)
# The parts of an attribute that decide equality; documentation is left out.
ATTRIBUTE_VALUES = _message(
    name=(1, NAME),
    f=(2, {FIXED32: None}),
    i=(3, INT),
    s=(4, PART),
    t=(5, PART),
    g=(6, PART),
    floats=(7, {BYTES: None, FIXED32: None}),
    ints=(8, INTS),
    strings=(9, PART),
    tensors=(10, PART),
    graphs=(11, PART),
    tp=(14, PART),
    type_protos=(15, PART),
    ref_attr_name=(21, PART),
    sparse_tensor=(22, PART),
    sparse_tensors=(23, PART),
)
# The attributes of a Constant node that may hold a shape.
INTEGERS = {"value_int": _message(values=(3, INTS)), "value_ints": _message(values=(8, INTS))}
TENSOR = _message(
    dims=(1, DIMS),
    data_type=(2, INT),
    float_data=(4, PART),
    int32_data=(5, PART),
    string_data=(6, PART),
    int64_data=(7, PART),
    name=(8, TEXT),
    raw_data=(9, PART),
    double_data=(10, PART),
    uint64_data=(11, PART),
    external_data=(13, PART),
    data_location=(14, INT),
)
# The integers of a small tensor that has no raw_data, by its dtype.
TENSOR_INTEGERS = {"int32": _message(values=(5, INTS)), "int64": _message(values=(7, INTS))}
SPARSE_TENSOR = _message(values=(1, PART), indices=(2, PART), dims=(3, DIMS))
FUNCTION = _message(
    name=(1, TEXT),
    node=(7, PART),
    opset_import=(9, PART),
    domain=(10, TEXT),
    attribute_proto=(11, PART),
)
TRAINING = _message(initialization=(1, PART), algorithm=(2, PART))
OPERATOR_SET = _message(domain=(1, TEXT), version=(2, INT))
ENTRY = _message(key=(1, PART), value=(2, PART))
VALUE_INFO = _message(name=(1, TEXT), type=(2, PART))
TYPE = _message(
    tensor_type=(1, PART),
    sequence=(4, PART),
    map=(5, PART),
    opaque=(7, PART),
    sparse_tensor=(8, PART),
    optional=(9, PART),
)
TENSOR_TYPE = _message(elem_type=(1, INT), shape=(2, PART))
# The types that contain other types, and the fields that name these.
HOLDERS = {
    "sequence": _message(elem_type=(1, PART)),
    "map": _message(key_type=(1, INT), elem_type=(2, PART)),
    "optional": _message(elem_type=(1, PART)),
    "opaque": _message(),
    "sparse_tensor": _message(),
}
SHAPE = _message(dim=(1, PART))
DIMENSION = _message(dim_value=(1, INT), dim_param=(2, TEXT))


def read_entry(data: Data, place: Span, *, is_kept: bool = True) -> tuple[str, str]:
    """Return key and value of a StringStringEntryProto; one that is not `is_kept` takes no memory."""
    entry = {"key": "", "value": ""}
    for name, (first, last) in read(data, ENTRY, place):
        entry[name] = read_text(data, first, last, is_kept=is_kept)
    return entry["key"], entry["value"]


_PLACE = ("location", "offset", "length")  # the external-data entries to read
_EXTERNAL = 1  # of TensorProto.DataLocation
_MAX_ELEMENTS = (1 << 63) - 1

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
_MOST_NESTED = 8
DTYPE_NAMES = frozenset(name for name, _ in _DTYPES.values())


# Named tuples here and in structure.py: making dataclasses would take `onnxtool stats` as long as reading a model.
class ExternalData(NamedTuple):
    """The location of a tensor's bytes outside the graph file.

    Attributes:
        length: bytes; computed from dtype and dims if the file omits it, None if the dtype has no fixed size.
    """

    location: str
    offset: int
    length: int | None


class Tensor(NamedTuple):
    """An initializer without its data; for a sparse one, its values, which have neither payload nor external.

    Attributes:
        size_bytes: bytes of the elements: computed from dtype and dims, or as stored for strings and unknown dtypes.
        payload: start and length of raw_data in the graph file; None for tensors stored otherwise.
        external: the location of data outside the graph file.
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


def read_sparse_tensor(data: Data, place: Span, external: list[ExternalData]) -> tuple[Tensor | None, tuple[int, ...]]:
    """Read a sparse tensor: its values, which do not count as a tensor, and its dims."""
    values: Tensor | None = None
    dims: list[int] = []
    for field, content in read(data, SPARSE_TENSOR, place):
        match field:
            case "values":
                values = read_tensor(data, content, external)
            case "indices":
                read_tensor(data, content, external)
            case "dims":
                dims += content
    if values is None:
        return None, ()
    sizes = _checked_dims(values.name, dims, place[0])
    return Tensor(values.name, values.dtype, values.dims, values.size_bytes), sizes


def _checked_dims(name: str, dims: list[int], position: int) -> tuple[int, ...]:
    if len(dims) > MAX_RANK:
        raise malformed(f"tensor {name!r} has {len(dims)} dimensions", position)
    sizes = tuple(dims)
    if any(dim < 0 for dim in sizes):
        raise malformed(f"tensor {name!r} has a negative dimension: {list(sizes)}", position)
    if prod(sizes) > _MAX_ELEMENTS:
        raise malformed(f"tensor {name!r} has more elements than a number of 64 bits can say: {list(sizes)}", position)
    return sizes


def read_tensor(data: Data, place: Span, external: list[ExternalData]) -> Tensor:
    """Read a tensor without its data, and add the location of external data to `external`."""
    name, data_type, stored_bytes = "", 0, 0
    dims: list[int] = []
    payload: tuple[int, int] | None = None
    entries: dict[str, str] = {}
    is_external = False
    for field, content in read(data, TENSOR, place):
        match field:
            case "dims":
                dims += content
                if len(dims) > MAX_RANK:
                    raise malformed(f"tensor {name!r} has {len(dims)} dimensions or more", place[0])
            case "data_type":
                data_type = content
            case "name":
                name = content
            case "external_data":
                key, value = read_entry(data, content, is_kept=False)
                if key in _PLACE:
                    entries[key] = value
            case "data_location":
                is_external = content == _EXTERNAL
            case _:
                first, last = content
                stored_bytes += last - first
                if field == "raw_data":
                    payload = first, last - first
    sizes = _checked_dims(name, dims, place[0])
    dtype, bits = _DTYPES.get(data_type, (f"type{data_type}", 0))
    size_bytes = (prod(sizes) * bits + 7) // 8 if bits else stored_bytes
    if is_external:
        outside = _external_data(name, entries, size_bytes if bits else None, place[0])
        data.charge(outside.location.__sizeof__(), place[0])
        external.append(outside)
        return Tensor(name, dtype, sizes, size_bytes if bits else outside.length or 0, None, outside)
    if payload is not None and bits and payload[1] != size_bytes:
        raise malformed(f"tensor {name!r} needs {size_bytes} bytes and holds {payload[1]}", place[0])
    return Tensor(name, dtype, sizes, size_bytes, payload)


def _external_data(name: str, entries: dict[str, str], size_bytes: int | None, position: int) -> ExternalData:
    try:
        # A length of 0 and a missing length both mean the rest of the file, of which only size_bytes are read.
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0")) or size_bytes
    except ValueError:
        raise malformed(f"tensor {name!r} has an external offset or length that is no number", position) from None
    if not entries.get("location") or offset < 0 or (length is not None and length < 0):
        raise malformed(f"tensor {name!r} does not say where its external data lies", position)
    if size_bytes is not None and length != size_bytes:
        raise malformed(f"tensor {name!r} needs {size_bytes} bytes and has {length} outside the file", position)
    return ExternalData(entries["location"], offset, length)


def external_file(path: Path, location: str) -> Path:
    """Return the external data file at `location` of the model at `path`, following links.

    The rule for all commands: the location names a file below the folder of `path`, and that file, links followed,
    lies below this folder or below the folder of the file that `path` leads to. In the hub's cache, model and data are
    links into one folder of blobs; a data file that leads anywhere else is not read.

    Raises:
        ModelFileError: it lies outside, or is missing.
    """
    # A location is POSIX by specification, but a hostile one may be written for Windows.
    pure = PurePosixPath(location)
    outside = pure.is_absolute() or PureWindowsPath(location).drive or ".." in pure.parts or "\\" in location
    try:
        file = (path.parent / pure).resolve()
        if outside or not any(file.is_relative_to(folder) for folder in (path.parent.resolve(), path.resolve().parent)):
            raise ModelFileError(
                f"{path} refers to external data outside its folder: {location!r}",
                "onnxtool reads data beside the model only; move it there, or do not trust this file",
            )
        if file.is_file():
            return file
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a loop of links, or a NUL: no such file
        pass
    raise ModelFileError(
        f"the external data {location!r} of {path} is missing", "copy it beside the model under this name"
    )


def read_value_info(data: Data, place: Span) -> TensorInfo:
    """Read an input or output.

    If it is not a tensor, it has a dtype such as `sequence(map(int64, float32))`, and the shape of the tensors in it.
    """
    name, dtype = "", "undefined"
    shape: list[Dimension] = []
    for field, content in read(data, VALUE_INFO, place):
        if field == "name":
            name = content
        else:
            dtype, shape = _read_type(data, content, 0)
    return TensorInfo(name, dtype, tuple(shape))


def _read_type(data: Data, place: Span, depth: int) -> tuple[str, list[Dimension]]:
    dtype = "undefined"
    shape: list[Dimension] = []
    if depth > _MOST_NESTED:
        raise malformed(f"types nested more than {_MOST_NESTED} deep", place[0])
    for kind, content in read(data, TYPE, place):
        if kind == "tensor_type":
            dtype, shape = _read_tensor_type(data, content)
            continue
        parts: list[str] = []
        shape = []
        for field, inner in read(data, HOLDERS[kind], content):
            if field == "key_type":
                parts.append(_dtype_name(inner))
            else:
                element, shape = _read_type(data, inner, depth + 1)
                parts.append(element)
        dtype = f"{kind}({', '.join(parts)})" if parts else kind
    return dtype, shape


def _read_tensor_type(data: Data, place: Span) -> tuple[str, list[Dimension]]:
    dtype = "undefined"
    shape: list[Dimension] = []
    for field, content in read(data, TENSOR_TYPE, place):
        if field == "elem_type":
            dtype = _dtype_name(content)
            continue
        for _, dim in read(data, SHAPE, content):
            shape.append(_read_dimension(data, dim))
            if len(shape) > MAX_RANK:
                raise malformed(f"a value of {len(shape)} dimensions or more", dim[0])
    return dtype, shape


def _dtype_name(data_type: int) -> str:
    return _DTYPES.get(data_type, (f"type{data_type}", 0))[0]


def _read_dimension(data: Data, place: Span) -> Dimension:
    dimension: Dimension = None
    for _, content in read(data, DIMENSION, place):
        # Some exporters write -1 for a dimension of any size, and onnxruntime reads it as one.
        dimension = None if content in (-1, "") else content
    return dimension
