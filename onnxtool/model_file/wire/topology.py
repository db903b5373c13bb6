"""Read the wiring of nodes, and the properties that make two nodes equal, without weights.

Constant nodes count as initializers here: nodes read them, and they read nothing.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from onnxtool.model_file.domains import ALIAS
from onnxtool.model_file.wire.messages import (
    ATTRIBUTE_VALUES,
    GRAPH,
    NODE,
    TENSOR,
    read_sparse_tensor,
    read_tensor,
    read_value_info,
)
from onnxtool.model_file.wire.protobuf import Data, Span, decode, malformed, opened, read
from onnxtool.model_file.wire.structure import main_graph, read_constant

MAX_DRAWN_NODES = 50_000  # of the main graph and the graphs inside its nodes, including Constant nodes
INPUT = "input "  # prefix of the kind of a graph input
_MAX_NESTING = 64
_MAX_VALUE_BYTES = 1024  # of a tensor in an attribute that is compared by its data
_CHUNK_BYTES = 1 << 16
_SHORT = 60  # characters of an attribute's value that is kept as it is

# A value: the position of its node among the calls, and the index of the node's output. For a value that no node makes,
# -1 and a name; inside a body, where names may differ between equal bodies, -1 and its number by first use, or -2 and
# the position for an input.
Wire = tuple[int, int | str]


class WiredNode(NamedTuple):
    """A node that is not a Constant.

    Attributes:
        op: the operator, as in `Structure.ops`.
        attributes: name and value of each, a digest for all but numbers and short texts.
        kinds: for each input that no node makes, dtype and shape, with the values of a small integer tensor or
            Constant.
        wires: the values that it and the graphs in it read; None for an omitted input.
        outputs: the names of the values that it makes.
    """

    op: str
    name: str
    attributes: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]
    wires: tuple[Wire | None, ...]
    outputs: tuple[str, ...]


class Topology(NamedTuple):
    """The nodes of a graph, and its outputs by name, each with its type and the value that it reads."""

    calls: list[WiredNode]
    outputs: dict[str, tuple[str, Wire | None]]


class _TooManyError(Exception):
    """The model has too many nodes to be drawn."""


class _GraphScope:
    """A graph being read: its calls, its values by name, and the names that come from outside."""

    def __init__(self) -> None:
        self.calls: list[WiredNode] = []
        self.wires: dict[bytes, Wire] = {}
        self.kinds: dict[bytes, str] = {}
        self.used: dict[bytes, int] = {}
        self.outputs: dict[str, tuple[str, Wire | None]] = {}

    def wire(self, name: bytes, depth: int) -> Wire | None:
        """Return the value with this name; None for an omitted input."""
        if name in self.wires or not name:
            return self.wires.get(name)
        number = self.used.setdefault(name, len(self.used))
        return -1, number if depth else name.decode(errors="replace")


def read_topology(path: Path) -> Topology | None:
    """Read the nodes of the main graph of the ONNX file at `path`; None for more than `MAX_DRAWN_NODES`.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with opened(path) as data:
        try:
            scope = _Reader(data).read_graph(list(main_graph(data)), 0)[0]
            return Topology(scope.calls, scope.outputs)
        except _TooManyError:
            return None


class _Reader:
    def __init__(self, data: Data) -> None:
        self.data = data
        self.num_nodes = 0

    def read_graph(self, fields: list[tuple[str, Span]], depth: int) -> tuple[_GraphScope, str]:
        """Read a graph that lies `depth` graphs below the main one, and what it shares with every equal one."""
        scope, data = _GraphScope(), self.data
        outputs: list[bytes] = []
        inputs: list[str] = []
        for field, place in fields:
            if field in ("input", "output"):
                info = read_value_info(data, place)
                name = info.name.encode()
                if field == "output":
                    outputs.append(name)
                    continue
                scope.kinds.setdefault(name, f"{INPUT}{(info.dtype, info.shape)}")
                scope.wires[name] = (-2, len(inputs)) if depth else (-1, info.name)
                inputs.append(scope.kinds[name])
            elif field == "initializer":
                name_, kind = self.describe_tensor(place)
                scope.kinds[name_.encode()] = kind
            elif field == "sparse_initializer":
                values, dims = read_sparse_tensor(data, place, [])
                if values is not None:
                    scope.kinds[values.name.encode()] = repr((values.dtype, dims))
        for field, place in fields:
            if field == "node":
                self.read_node(place, scope, depth)
        shared = [call[:1] + call[2:5] for call in scope.calls]
        ends = [(scope.kinds.get(name, ""), scope.wire(name, depth)) for name in outputs]
        if not depth:
            scope.outputs = {name.decode(errors="replace"): end for name, end in zip(outputs, ends, strict=True)}
        return scope, repr((inputs, shared, ends)) if depth else ""

    def read_node(self, place: Span, scope: _GraphScope, depth: int) -> None:
        """Read a node, and the graphs in its attributes."""
        self.num_nodes += 1
        if self.num_nodes > MAX_DRAWN_NODES:
            raise _TooManyError
        texts = {"op_type": b"", "domain": b"", "name": b""}
        lists: dict[str, list[bytes]] = {"input": [], "output": []}
        spans: list[Span] = []
        for field, content in read(self.data, NODE, place):
            if field in texts:
                texts[field] = content
            elif field in lists:
                lists[field].append(content)
            elif field == "attribute":
                spans.append(content)
        inputs = lists["input"]
        attributes = sorted(self.read_attribute(span, depth, inputs) for span in spans)
        op, domain, name = (decode(text, place[0]) for text in texts.values())
        is_foreign = domain not in ("", ALIAS)
        if op == "Constant" and not is_foreign:
            scope.kinds.update(dict.fromkeys(lists["output"], repr([value for _, value in attributes])))
            return
        call = WiredNode(
            f"{domain}::{op}" if is_foreign else op,
            name,
            tuple(attributes),
            tuple(scope.kinds.get(source, "") for source in inputs),
            tuple(scope.wire(source, depth) for source in inputs),
            tuple(output.decode(errors="replace") for output in lists["output"]),
        )
        for slot, output in enumerate(lists["output"]):
            if output:
                scope.wires[output] = (len(scope.calls), slot)
        scope.calls.append(call)

    def read_attribute(self, place: Span, depth: int, inputs: list[bytes]) -> tuple[str, str]:
        """Return name and value of an attribute; outer values that its graphs read are added to `inputs`."""
        name = b""
        values: list[str] = []
        is_short = True
        for field, content in read(self.data, ATTRIBUTE_VALUES, place):
            match field:
                case "name":
                    name = content
                case "i" | "ints":
                    values += map(str, content if field == "ints" else [content])
                case "f":
                    values.append(f"{struct.unpack('<f', self.data[slice(*content)])[0]:.9g}")
                case "s" if content[1] - content[0] <= _SHORT:
                    values.append(repr(bytes(self.data[slice(*content)]).decode(errors="replace")))
                case "t" | "tensors":
                    is_short = False
                    values.append(self.describe_tensor(content, by_value=True)[1])
                case "g" | "graphs":
                    if depth >= _MAX_NESTING:
                        raise malformed(f"graphs nested more than {_MAX_NESTING} deep", content[0])
                    body, form = self.read_graph(list(read(self.data, GRAPH, content)), depth + 1)
                    is_short = False
                    inputs += [source for source in body.used if source not in body.kinds]
                    values.append(form)
                case _:
                    is_short = False
                    values.append(f"{field} {self.digest(content)}")
        text = ", ".join(values)
        is_short = is_short and len(text) <= _SHORT
        return decode(name, place[0]), text if is_short else sha256(repr(values).encode()).hexdigest()

    def describe_tensor(self, place: Span, *, by_value: bool = False) -> tuple[str, str]:
        """Return the name of a tensor, its dtype and shape, and its data if it is small enough, or a scalar's."""
        tensor, constant = read_tensor(self.data, place, []), read_constant(self.data, place)[1]
        value: object = constant.integers
        is_small = tensor.external is None and place[1] - place[0] <= _MAX_VALUE_BYTES
        if value is None and is_small and (by_value or not tensor.dims):
            parts = [part for field, part in read(self.data, TENSOR, place) if field.endswith("_data")]
            value = [self.digest(part) for part in parts]
        return tensor.name, repr((tensor.dtype, tensor.dims, value))

    def digest(self, place: Span) -> str:
        """Hash bytes of the file in chunks."""
        form = sha256()
        for first in range(*place, _CHUNK_BYTES):
            form.update(self.data[first : min(first + _CHUNK_BYTES, place[1])])
        return form.hexdigest()
