"""Walk graphs, nodes and functions, and count what they have rather than keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized

from onnxtool.model_file.domains import ALIAS, settled
from onnxtool.model_file.wire.protobuf import (
    BYTES,
    VARINT,
    Data,
    decode,
    fields,
    malformed,
    packed_varints,
    read_entry,
    read_name,
    read_text,
    signed,
)
from onnxtool.model_file.wire.scopes import SCOPES_KEY, scope_of_node
from onnxtool.model_file.wire.tensors import ExternalData, Tensor, read_sparse_tensor, read_tensor, read_value_info
from onnxtool.reports import TensorInfo

_MAX_NESTING = 64
_ALIAS = ALIAS.encode()
_MAX_KEPT = 100_000  # of tensors, values and operators each; the largest models have a fifth of that
_MAX_SCOPES = 10_000
_MAX_SCOPES_BYTES = 1 << 16  # of a node; they take a few hundred
_MAX_INPUTS = 1000  # of a node, of which one may tell its part; and attributes
_MAX_MADE_UP = 100  # bytes of a name that an exporter makes up


class Reading:
    """What has been read of a graph and those inside of it so far."""

    def __init__(self) -> None:
        self.name = ""
        self.metadata: dict[str, str] = {}
        self.inputs: list[TensorInfo] = []
        self.outputs: list[TensorInfo] = []
        self.initializers: list[Tensor] = []
        self.initialized: set[str] = set()
        self.sparse_dims: dict[str, tuple[int, ...]] = {}
        self.denotations: dict[str, tuple[str, ...]] = {}
        self.quantization: dict[str, dict[str, str]] = {}
        self.external: list[ExternalData] = []
        self.ops: Counter[bytes] = Counter()
        self.most_inputs: dict[bytes, int] = {}
        self.given_inputs: dict[bytes, set[int]] = {}
        self.attributes: dict[bytes, dict[bytes, int]] = {}
        self.scopes: Counter[str] = Counter()
        self.readers: dict[bytes, str] = {}
        self.constants: Counter[str] = Counter()
        self.num_subgraphs = 0
        self.attribute_bytes = 0

    def apart(self) -> Reading:
        """Return a reading for a graph that is no part of this one; its data outside the file belongs to the model."""
        other = Reading()
        other.external = self.external
        return other

    def check(self, position: int) -> None:
        """Refuse a file that was made to fill the memory."""
        kept: tuple[Sized, ...] = (
            self.initializers,
            self.external,
            self.inputs,
            self.outputs,
            self.ops,
            self.quantization,
        )
        if max(map(len, kept)) > _MAX_KEPT:
            raise malformed(f"more than {_MAX_KEPT} tensors, values or operators", position)


def read_graph(data: Data, start: int, end: int, model: Reading, depth: int) -> None:
    """Read a GraphProto; names, inputs and outputs of the main graph alone."""
    if depth > _MAX_NESTING:
        raise malformed(f"graphs nested more than {_MAX_NESTING} deep", start)
    for number, kind, first, last in fields(data, start, end):
        if kind != BYTES:
            continue
        if number == 1:
            count_node(data, first, last, model, depth)
            continue
        if number == 5:
            _add_initializer(read_tensor(data, first, last, model.external), model, depth)
            model.check(first)
        elif number == 15:
            values, dims = read_sparse_tensor(data, first, last, model.external)
            if values is not None:
                _add_initializer(values, model, depth)
                model.sparse_dims[values.name] = dims
            model.check(first)
        elif number == 13:
            data.annotation_bytes += sum(
                b - a for inner, kind, a, b in fields(data, first, last) if inner == 4 and kind == BYTES
            )
        elif number == 16:
            data.annotation_bytes += last - first
            if depth == 0:
                key, value = read_entry(data, first, last)
                model.metadata[key] = value
        elif depth == 0:
            _read_own(data, number, first, last, model)


def _read_own(data: Data, number: int, start: int, end: int, model: Reading) -> None:
    """Read a field that is kept of the main graph only."""
    if number == 2:
        model.name = read_text(data, start, end)
    elif number in (11, 12):
        value, denotations = read_value_info(data, start, end)
        (model.inputs if number == 11 else model.outputs).append(value)
        if any(denotations):
            model.denotations[value.name] = denotations
        model.check(start)
    elif number == 14:
        name = ""
        parameters: dict[str, str] = {}
        for inner, kind, first, last in fields(data, start, end):
            if inner == 1 and kind == BYTES:
                name = read_text(data, first, last)
            elif inner == 2 and kind == BYTES:
                key, tensor = read_entry(data, first, last)
                parameters[key] = tensor
        model.quantization[name] = parameters
        model.check(start)


def _add_initializer(tensor: Tensor, model: Reading, depth: int) -> None:
    model.initializers.append(tensor)
    if depth == 0:
        model.initialized.add(tensor.name)


def count_node(data: Data, start: int, end: int, model: Reading, depth: int) -> None:
    """Count a NodeProto, and read the graphs and tensors in its attributes."""
    op_type = domain = name = b""
    scopes = ""
    inputs: list[bytes] = []
    attributes: list[tuple[bytes, int]] = []
    for number, kind, first, last in fields(data, start, end):
        if kind != BYTES:
            continue
        if number == 1:
            if len(inputs) < _MAX_INPUTS:
                inputs.append(read_name(data, first, last))
        elif number == 3:
            name = read_name(data, first, last)
        elif number == 4:
            op_type = read_name(data, first, last)
        elif number == 5:
            held = model.constants if op_type == b"Constant" else None
            attribute = read_attribute(data, first, last, model, depth, held)
            if len(attributes) < _MAX_INPUTS:
                attributes.append(attribute)
        elif number == 7:
            domain = read_name(data, first, last)
        elif number == 9:
            data.annotation_bytes += last - first
            if last - first <= _MAX_SCOPES_BYTES and SCOPES_KEY in data[first : min(last, first + 64)]:
                scopes = read_entry(data, first, last, kept=False)[1]
    op = domain + b"::" + op_type if domain not in (b"", _ALIAS) else op_type
    if op not in model.ops:
        model.check(start)
        data.charge(op.__sizeof__(), start)
    model.ops[op] += 1
    model.most_inputs[op] = max(len(inputs), model.most_inputs.get(op, 0))
    model.given_inputs.setdefault(op, set()).update(place for place, source in enumerate(inputs, start=1) if source)
    largest = model.attributes.setdefault(op, {})
    for key, value in attributes:
        if key not in largest:
            data.charge(key.__sizeof__(), start)
        largest[key] = max(value, largest.get(key, value))
    dotted = () if scopes or b"/" in name else [decode(source, start) for source in inputs if b"." in source]
    scope = scope_of_node(decode(name, start), scopes, dotted)
    if scope not in model.scopes and len(model.scopes) >= _MAX_SCOPES:
        scope = ""
    model.scopes[scope] += 1
    if scope and len(model.readers) < _MAX_KEPT:
        for source in inputs:
            if (
                len(source) <= _MAX_MADE_UP
                and source not in model.readers
                and b"/" not in source
                and b"." not in source
            ):
                model.readers[source] = scope


def read_attribute(
    data: Data, start: int, end: int, model: Reading, depth: int, constants: Counter[str] | None = None
) -> tuple[bytes, int]:
    """Read an AttributeProto, add its elements to `constants` by dtype, and return its name and integer, or 0."""
    name, value = b"", 0
    for number, kind, first, last in fields(data, start, end):
        if constants is not None and number in (2, 7):  # floats, also packed
            constants["float32"] += (last - first) // 4
        elif constants is not None and number in (3, 8):
            constants["int64"] += len(packed_varints(data, first, last)) if kind == BYTES else 1
        if kind == VARINT and number == 3:
            value = signed(first)
        if kind != BYTES:
            continue
        if number == 1:
            name = read_name(data, first, last)
        elif number in (6, 11):
            model.num_subgraphs += 1
            read_graph(data, first, last, model, depth + 1)
        elif number in (5, 10, 22, 23):
            read = read_tensor(data, first, last, model.external) if number < 22 else None
            tensor = read or read_sparse_tensor(data, first, last, model.external)[0]
            if tensor is not None:
                model.attribute_bytes += tensor.size_bytes
                if constants is not None:
                    constants[tensor.dtype] += tensor.num_elements
            model.check(first)
    return name, value


def read_node(data: Data, start: int, end: int) -> tuple[str, str, str, tuple[str, ...], tuple[str, ...]]:
    """Return operator, domain, name, inputs and outputs of a NodeProto."""
    texts: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: [], 7: []}
    for number, kind, first, last in fields(data, start, end):
        if kind == BYTES and number in texts:
            texts[number].append(read_text(data, first, last))
    name, op_type, domain = ("".join(texts[number][-1:]) for number in (3, 4, 7))
    return op_type, settled(domain), name, tuple(texts[1]), tuple(texts[2])


def read_opset(data: Data, start: int, end: int) -> tuple[str, int]:
    """Return domain and version of an OperatorSetIdProto."""
    domain, version = "", 0
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            domain = read_text(data, first, last)
        elif number == 2 and kind == VARINT:
            version = signed(first)
    return domain, version
