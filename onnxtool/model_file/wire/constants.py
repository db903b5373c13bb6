"""Read how large the constants of a graph are, and the integers of small ones: sizes that operators are given."""

import struct
from pathlib import Path
from typing import NamedTuple

from onnxtool.model_file.wire.protobuf import BYTES, VARINT, Data, fields, opened, packed_varints, read_text, signed
from onnxtool.model_file.wire.tensors import read_tensor

_MOST_INTEGERS = 64  # of one constant; no shape has more
_FORMATS = {"int32": ("i", 5), "int64": ("q", 7)}  # of struct, and the field of TensorProto beside raw_data

_INTEGERS = {"value_int": 3, "value_ints": 8}  # attributes of a Constant node, and their fields


class Constant(NamedTuple):
    """An initializer, or what a Constant node holds.

    Attributes:
        num_elements: at most.
        integers: of a small tensor of int32 or int64; None for all else.
    """

    num_elements: int
    integers: tuple[int, ...] | None


def read_constants(path: Path) -> dict[str, Constant]:
    """Read the constants of the main graph of the ONNX file at `path`, by name.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    constants: dict[str, Constant] = {}
    with opened(path) as data:
        for number, kind, start, end in fields(data, 0, len(data)):
            if number != 7 or kind != BYTES:
                continue
            for inner, inner_kind, first, last in fields(data, start, end):
                if inner == 5 and inner_kind == BYTES:
                    name, constant = _read_initializer(data, first, last)
                    constants[name] = constant
                elif inner == 1 and inner_kind == BYTES:
                    constants.update(_read_constant_node(data, first, last))
    return constants


def _read_initializer(data: Data, start: int, end: int) -> tuple[str, Constant]:
    tensor = read_tensor(data, start, end, [])
    integers: tuple[int, ...] | None = None
    if tensor.dtype in _FORMATS and tensor.num_elements <= _MOST_INTEGERS and tensor.external is None:
        letter, field = _FORMATS[tensor.dtype]
        if tensor.payload is not None:
            first, length = tensor.payload
            integers = struct.unpack(f"<{tensor.num_elements}{letter}", data[first : first + length])
        else:
            integers = _read_integers(data, start, end, field)
    return tensor.name, Constant(tensor.num_elements, integers)


def _read_integers(data: Data, start: int, end: int, field: int) -> tuple[int, ...]:
    values: list[int] = []
    for number, kind, first, last in fields(data, start, end):
        if number == field and kind == VARINT:
            values.append(signed(first))
        elif number == field and kind == BYTES:
            values.extend(signed(value) for value in packed_varints(data, first, last))
    return tuple(values)


def _read_constant_node(data: Data, start: int, end: int) -> dict[str, Constant]:
    output = op_type = ""
    attributes: list[tuple[int, int]] = []
    for number, kind, first, last in fields(data, start, end):
        if kind == BYTES and number in (2, 4):
            text = read_text(data, first, last)
            output, op_type = (text, op_type) if number == 2 else (output, text)
        elif kind == BYTES and number == 5:
            attributes.append((first, last))
    if op_type != "Constant":
        return {}
    constant = Constant(end - start, None)  # texts and floats: fewer than the bytes that hold them
    for first, last in attributes:
        name, tensor = "", None
        for number, kind, inner_first, inner_last in fields(data, first, last):
            if number == 1 and kind == BYTES:
                name = read_text(data, inner_first, inner_last)
            elif number == 5 and kind == BYTES:
                tensor = inner_first, inner_last
        if name == "value" and tensor:
            constant = _read_initializer(data, *tensor)[1]
        elif name in _INTEGERS:
            integers = _read_integers(data, first, last, _INTEGERS[name])
            constant = Constant(len(integers), integers)
    return {output: constant}
