"""Read tensors without their data, and the types of a graph's inputs and outputs."""

from math import prod
from typing import NamedTuple

from onnxtool.model_file.wire.protobuf import (
    BYTES,
    VARINT,
    Data,
    fields,
    malformed,
    packed_varints,
    read_entry,
    read_text,
    signed,
)
from onnxtool.reports import Dimension, TensorInfo

_MAX_RANK = 64  # as numpy; the product of many hostile dims would take forever
_PLACE = ("location", "offset", "length")  # of the entries of external data, those that are read
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
_OTHER_TYPES = {4: "sequence", 5: "map", 7: "opaque", 8: "sparse_tensor", 9: "optional"}
_MAP = 5
_HOLDERS = {4: 1, _MAP: 2, 9: 1}  # the field of each that holds the type of its elements
_MOST_NESTED = 8
ELEMENT_BITS = {number: bits for number, (_, bits) in _DTYPES.items()}
DTYPE_NAMES = frozenset(name for name, _ in _DTYPES.values())


# Named tuples here and in structure.py: making dataclasses would take `onnxtool stats` as long as reading a model.
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


def read_sparse_tensor(
    data: Data, start: int, end: int, external: list[ExternalData]
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Read a sparse tensor: its values, which are no tensor by themselves, and its own dims."""
    tensors: dict[int, Tensor] = {}
    dims: list[int] = []
    for number, kind, first, last in fields(data, start, end):
        if number in (1, 2) and kind == BYTES:
            tensors[number] = read_tensor(data, first, last, external)
        elif number == 3 and kind in (VARINT, BYTES):
            dims += _read_dims(data, kind, first, last)
    values = tensors.get(1)
    if values is None:
        return None, ()
    sizes = _checked_dims(values.name, dims, start)
    return Tensor(values.name, values.dtype, values.dims, values.size_bytes), sizes


def _read_dims(data: Data, kind: int, first: int, last: int) -> list[int]:
    if kind == VARINT:
        return [first]
    if last - first > 10 * _MAX_RANK:
        raise malformed(f"{last - first} bytes of dimensions", first)
    return packed_varints(data, first, last)


def _checked_dims(name: str, dims: list[int], position: int) -> tuple[int, ...]:
    if len(dims) > _MAX_RANK:
        raise malformed(f"tensor {name!r} has {len(dims)} dimensions", position)
    sizes = tuple(signed(dim) for dim in dims)
    if any(dim < 0 for dim in sizes):
        raise malformed(f"tensor {name!r} has a negative dimension: {list(sizes)}", position)
    if prod(sizes) > _MAX_ELEMENTS:
        raise malformed(f"tensor {name!r} has more elements than a number of 64 bits can say: {list(sizes)}", position)
    return sizes


def read_tensor(data: Data, start: int, end: int, external: list[ExternalData]) -> Tensor:
    """Read a tensor without its data, and add to `external` where data outside the file lies."""
    name, data_type, stored_bytes = "", 0, 0
    dims: list[int] = []
    payload: tuple[int, int] | None = None
    entries: dict[str, str] = {}
    is_external = False
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind in (VARINT, BYTES):
            dims += _read_dims(data, kind, first, last)
            if len(dims) > _MAX_RANK:
                raise malformed(f"tensor {name!r} has {len(dims)} dimensions or more", start)
        elif number == 2 and kind == VARINT:
            data_type = signed(first)
        elif number == 8 and kind == BYTES:
            name = read_text(data, first, last)
        elif number in (4, 5, 6, 7, 9, 10, 11) and kind == BYTES:
            stored_bytes += last - first
            if number == 9:
                payload = (first, last - first)
        elif number == 13 and kind == BYTES:
            key, value = read_entry(data, first, last, kept=False)
            if key in _PLACE:
                entries[key] = value
        elif number == 16 and kind == BYTES:
            data.annotation_bytes += last - first
        elif number == 14 and kind == VARINT:
            is_external = first == 1
    sizes = _checked_dims(name, dims, start)
    dtype, bits = _DTYPES.get(data_type, (f"type{data_type}", 0))
    size_bytes = (prod(sizes) * bits + 7) // 8 if bits else stored_bytes
    if is_external:
        place = _external_data(name, entries, size_bytes if bits else None, start)
        data.charge(place.location.__sizeof__(), start)
        external.append(place)
        return Tensor(name, dtype, sizes, size_bytes if bits else place.length or 0, None, place)
    if payload is not None and bits and payload[1] != size_bytes:
        raise malformed(f"tensor {name!r} needs {size_bytes} bytes and holds {payload[1]}", start)
    return Tensor(name, dtype, sizes, size_bytes, payload)


def _external_data(name: str, entries: dict[str, str], size_bytes: int | None, position: int) -> ExternalData:
    try:
        # A length of 0 says as little as none: both mean the rest of the file, of which only size_bytes are read.
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", "0")) or size_bytes
    except ValueError:
        raise malformed(f"tensor {name!r} has an external offset or length that is no number", position) from None
    if not entries.get("location") or offset < 0 or (length is not None and length < 0):
        raise malformed(f"tensor {name!r} does not say where its external data lies", position)
    if size_bytes is not None and length != size_bytes:
        raise malformed(f"tensor {name!r} needs {size_bytes} bytes and has {length} outside the file", position)
    return ExternalData(entries["location"], offset, length)


def read_value_info(data: Data, start: int, end: int) -> tuple[TensorInfo, tuple[str, ...]]:
    """Read an input or output, with what its dimensions denote.

    One that is no tensor has a dtype such as `sequence(map(int64, float32))`, and the shape of the tensors in it.
    """
    name, dtype = "", "undefined"
    shape: list[tuple[Dimension, str]] = []
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            name = read_text(data, first, last)
        elif number == 2 and kind == BYTES:
            dtype, shape = _read_type(data, first, last, 0)
    return TensorInfo(name, dtype, tuple(size for size, _ in shape)), tuple(text for _, text in shape)


def _read_type(data: Data, start: int, end: int, depth: int) -> tuple[str, list[tuple[Dimension, str]]]:
    dtype = "undefined"
    shape: list[tuple[Dimension, str]] = []
    if depth > _MOST_NESTED:
        raise malformed(f"types nested more than {_MOST_NESTED} deep", start)
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            dtype, shape = _read_tensor_type(data, first, last)
        elif number in _OTHER_TYPES and kind == BYTES:
            parts: list[str] = []
            shape = []
            for inner, inner_kind, inner_start, inner_end in fields(data, first, last):
                if number == _MAP and inner == 1 and inner_kind == VARINT:
                    parts.append(_DTYPES.get(inner_start, (f"type{inner_start}", 0))[0])
                elif inner_kind == BYTES and number in _HOLDERS and inner == _HOLDERS[number]:
                    element, shape = _read_type(data, inner_start, inner_end, depth + 1)
                    parts.append(element)
            dtype = f"{_OTHER_TYPES[number]}({', '.join(parts)})" if parts else _OTHER_TYPES[number]
    return dtype, shape


def _read_tensor_type(data: Data, start: int, end: int) -> tuple[str, list[tuple[Dimension, str]]]:
    dtype = "undefined"
    shape: list[tuple[Dimension, str]] = []
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == VARINT:
            dtype = _DTYPES.get(first, (f"type{first}", 0))[0]
        elif number == 2 and kind == BYTES:
            for inner, inner_kind, dim_start, dim_end in fields(data, first, last):
                if inner == 1 and inner_kind == BYTES:
                    shape.append(_read_dimension(data, dim_start, dim_end))
                    if len(shape) > _MAX_RANK:
                        raise malformed(f"a value of {len(shape)} dimensions or more", dim_start)
    return dtype, shape


def _read_dimension(data: Data, start: int, end: int) -> tuple[Dimension, str]:
    """Return a dimension, and what it denotes."""
    dimension: Dimension = None
    denotation = ""
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == VARINT:
            size = signed(first)
            # Some exporters write -1 for a dimension of any size, and onnxruntime reads it as one.
            dimension = None if size == -1 else size
        elif number == 2 and kind == BYTES:
            dimension = read_text(data, first, last) or None
        elif number == 3 and kind == BYTES:
            denotation = read_text(data, first, last)
    return dimension, denotation
