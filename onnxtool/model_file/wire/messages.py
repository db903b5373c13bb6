"""The messages of onnx.proto3 as tables: the fields to read, each with its number and type.

Source: onnx.proto3 of the ONNX specification. Fields that are not in the table, or have a different wire type, are
skipped, as in protobuf.
"""

from __future__ import annotations

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
    domain=(4, TEXT),
    model_version=(5, INT),
    graph=(7, PART),
    opset_import=(8, PART),
    metadata_props=(14, PART),
    training_info=(20, PART),
    functions=(25, PART),
)
GRAPH = _message(
    node=(1, PART),
    name=(2, PART),
    initializer=(5, PART),
    input=(11, PART),
    output=(12, PART),
    value_info=(13, PART),
    quantization_annotation=(14, PART),
    sparse_initializer=(15, PART),
    metadata_props=(16, PART),
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
    metadata_props=(16, PART),
)
# The integers of a small tensor that has no raw_data, by its dtype.
TENSOR_INTEGERS = {"int32": _message(values=(5, INTS)), "int64": _message(values=(7, INTS))}
SPARSE_TENSOR = _message(values=(1, PART), indices=(2, PART), dims=(3, DIMS))
FUNCTION = _message(
    name=(1, TEXT),
    input=(4, TEXT),
    output=(5, TEXT),
    attribute=(6, TEXT),
    node=(7, PART),
    opset_import=(9, PART),
    domain=(10, TEXT),
    attribute_proto=(11, PART),
    overload=(13, TEXT),
    metadata_props=(14, PART),
)
TRAINING = _message(
    initialization=(1, PART), algorithm=(2, PART), initialization_binding=(3, PART), update_binding=(4, PART)
)
OPERATOR_SET = _message(domain=(1, TEXT), version=(2, INT))
ENTRY = _message(key=(1, PART), value=(2, PART))
ANNOTATION = _message(tensor_name=(1, TEXT), quant_parameter_tensor_names=(2, PART))
VALUE_INFO = _message(name=(1, TEXT), type=(2, PART))
VALUE_NOTES = _message(metadata_props=(4, PART))
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
DIMENSION = _message(dim_value=(1, INT), dim_param=(2, TEXT), denotation=(3, TEXT))


def read_entry(data: Data, place: Span, *, kept: bool = True) -> tuple[str, str]:
    """Return key and value of a StringStringEntryProto; one that is not `kept` takes no memory."""
    found = {"key": "", "value": ""}
    for name, (first, last) in read(data, ENTRY, place):
        found[name] = read_text(data, first, last, kept=kept)
    return found["key"], found["value"]
