"""Read all of a model but its weights."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from onnxtool.reports import TensorInfo
from onnxtool.wire.protobuf import (
    BYTES,
    VARINT,
    decode,
    encode_entry,
    fields,
    malformed,
    mapped,
    read_entry,
    read_text,
    signed,
)
from onnxtool.wire.tensors import ExternalData, Tensor, read_sparse_tensor, read_tensor, read_value_info

_MAX_NESTING = 64


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
    with mapped(path) as data:
        model = _Model()
        for number, kind, start, end in fields(data, 0, len(data)):
            if number == 1 and kind == VARINT:
                model.ir_version = signed(start)
            elif number in (2, 3) and kind == BYTES:
                model.producer[number] = read_text(data, start, end)
            elif number == 7 and kind == BYTES:
                model.has_graph = True
                _read_graph(data, start, end, model, depth=0)
            elif number == 8 and kind == BYTES:
                domain, version = _read_opset(data, start, end)
                model.opsets[domain or "ai.onnx"] = version
            elif number == 14 and kind == BYTES:
                key, value = read_entry(data, start, end)
                model.metadata[key] = value
            elif number == 25 and kind == BYTES:
                model.num_functions += 1
                _read_function(data, start, end, model)
        # Opsets are obligatory from IR version 3 on, and they follow the graph: a copy that broke off lacks them.
        if not model.has_graph or not model.ir_version or (model.ir_version >= 3 and not model.opsets):
            raise malformed("no graph, no IR version or no opset in it", len(data))
        return model.structure()


def read_nodes(path: Path) -> Iterator[Node]:
    """Yield the nodes of the main graph of the ONNX file at `path`, in their order, one at a time.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with mapped(path) as data:
        for number, kind, start, end in fields(data, 0, len(data)):
            if number == 7 and kind == BYTES:
                for inner, inner_kind, node_start, node_end in fields(data, start, end):
                    if inner == 1 and inner_kind == BYTES:
                        yield _read_node(data, node_start, node_end)


def encode_metadata(entries: dict[str, str]) -> bytes:
    """Encode `entries` as ModelProto.metadata_props; appended to a serialized model, they are added to it.

    Protobuf reads the concatenation of two messages as their merge, so a file of any size is stamped by writing a
    few bytes at its end. The caller makes sure that no key is there already.
    """
    encoded = bytearray()
    for key, value in entries.items():
        encoded += encode_entry(14, key, value)
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
        ops = Counter({decode(op, 0): count for op, count in self.ops.items()})
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
        raise malformed(f"graphs nested more than {_MAX_NESTING} deep", start)
    for number, kind, first, last in fields(data, start, end):
        if kind != BYTES:
            continue
        if number == 1:
            _count_node(data, first, last, model, depth)
        elif number == 5:
            _add_initializer(read_tensor(data, first, last, model.external), model, depth)
        elif number == 11 and depth == 0:
            model.inputs.append(read_value_info(data, first, last))
        elif number == 12 and depth == 0:
            model.outputs.append(read_value_info(data, first, last))
        elif number == 15:
            values = read_sparse_tensor(data, first, last, model.external)
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
    for number, kind, first, last in fields(data, start, end):
        if number == 7 and kind == BYTES:
            _count_node(data, first, last, body, depth=0)
        elif number == 11 and kind == BYTES:
            _read_attribute(data, first, last, body, depth=0)


def _count_node(data: mmap.mmap, start: int, end: int, model: _Model, depth: int) -> None:
    op_type = domain = b""
    for number, kind, first, last in fields(data, start, end):
        if kind != BYTES:
            continue
        if number == 4:
            op_type = data[first:last]
        elif number == 7:
            domain = data[first:last]
        elif number == 5:
            _read_attribute(data, first, last, model, depth)
    model.ops[domain + b"::" + op_type if domain not in (b"", b"ai.onnx") else op_type] += 1


def _read_attribute(data: mmap.mmap, start: int, end: int, model: _Model, depth: int) -> None:
    for number, kind, first, last in fields(data, start, end):
        if kind != BYTES:
            continue
        if number in (6, 11):
            model.num_subgraphs += 1
            _read_graph(data, first, last, model, depth + 1)
        elif number in (5, 10):
            read_tensor(data, first, last, model.external)
        elif number in (22, 23):
            read_sparse_tensor(data, first, last, model.external)


def _read_node(data: mmap.mmap, start: int, end: int) -> Node:
    texts: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: [], 7: []}
    for number, kind, first, last in fields(data, start, end):
        if kind == BYTES and number in texts:
            texts[number].append(read_text(data, first, last))
    name, op_type, domain = ("".join(texts[number][-1:]) for number in (3, 4, 7))
    return Node(op_type, domain, name, tuple(texts[1]), tuple(texts[2]))


def _read_opset(data: mmap.mmap, start: int, end: int) -> tuple[str, int]:
    domain, version = "", 0
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            domain = read_text(data, first, last)
        elif number == 2 and kind == VARINT:
            version = signed(first)
    return domain, version
