"""Read the structure of a model; graphs, nodes and training records are counted rather than stored."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sized
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from onnxtool.errors import ModelFileError
from onnxtool.model_file.domains import ALIAS
from onnxtool.model_file.wire.messages import (
    ATTRIBUTE,
    ATTRIBUTE_VALUES,
    DTYPE_NAMES,
    FUNCTION,
    GRAPH,
    INTEGERS,
    MODEL,
    NODE,
    OPERATOR_SET,
    TENSOR,
    TENSOR_INTEGERS,
    TRAINING,
    ExternalData,
    Tensor,
    read_entry,
    read_sparse_tensor,
    read_tensor,
    read_value_info,
)
from onnxtool.model_file.wire.protobuf import Data, Span, decode, encode_entry, malformed, opened, read
from onnxtool.reports import TensorInfo

# Limits for a file that was made to fill the memory; real models use a hundredth of them.
_MAX_TEXT_BYTES = 12 << 20
_MAX_FUNCTIONS = 10_000
_MAX_NESTING = 64
_MAX_KEPT = 100_000  # of tensors, values and operators each; the largest models have a fifth of that
_MAX_SCOPES = 10_000
_MAX_SCOPES_BYTES = 1 << 16  # of a node; they take a few hundred
_MAX_INPUTS = 1000  # of a node, of which one may tell its part; and attributes
_MAX_MADE_UP = 100  # bytes of a name that an exporter makes up
_MOST_INTEGERS = 64  # of a constant whose values are read; no shape has more
_FORMATS = {"int32": "i", "int64": "q"}  # of struct
_ALIAS = ALIAS.encode()
_COUNTED = {tag: field for tag, field in NODE.items() if field[0] != "output"}  # of a node


class Node(NamedTuple):
    """An operator call in the main graph; an omitted input is an empty string."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Function(NamedTuple):
    """A model-local function. Its nodes do not count as nodes of the graph."""

    domain: str
    name: str
    opsets: dict[str, int]
    ops: dict[str, int]


class Structure(NamedTuple):
    """The structure of a model. Node counts include the bodies of If, Loop and Scan.

    Attributes:
        inputs: graph inputs that are not initializers.
        initializers: initializers of the main graph and of every graph inside a node.
        most_inputs: the largest number of inputs of a node, by operator, including omitted ones before the last.
        given_inputs: by operator, the positions, from 1 on, of inputs that at least one node gives.
        attributes: by operator and attribute name, the largest integer of any node; 0 for other types.
        external: all data outside the graph file, including data of node attributes and functions.
        num_trainings: TrainingInfo records.
        scopes: number of nodes in each part of the model; nodes that belong to no known part are under an empty name.
        scope_bytes: bytes of the initializers of each part; initializers whose name shows no part count for their first
            reader.
        constants: elements of Constant nodes, by dtype.
        attribute_bytes: bytes of tensors in node attributes.
    """

    ir_version: int
    producer: str
    opsets: dict[str, int]
    metadata: dict[str, str]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    initializers: tuple[Tensor, ...]
    ops: dict[str, int]
    most_inputs: dict[str, int]
    given_inputs: dict[str, frozenset[int]]
    attributes: dict[str, dict[str, int]]
    num_subgraphs: int
    external: tuple[ExternalData, ...]
    functions: tuple[Function, ...]
    num_trainings: int
    scopes: dict[str, int]
    scope_bytes: dict[str, int]
    constants: dict[str, int]
    attribute_bytes: int

    @property
    def num_nodes(self) -> int:
        """Nodes of the main graph and of every graph inside a node."""
        return sum(self.ops.values())


def read_structure(path: Path) -> Structure:
    """Read the structure of the ONNX file at `path`.

    Raises:
        ModelFileError: there is no such file, or it is not a complete ONNX model.
    """
    with opened(path) as data:
        data.allow(_MAX_TEXT_BYTES)
        return _read_model(data)


class _GraphFigures:
    """What has been read of a graph and of the graphs inside it."""

    def __init__(self) -> None:
        self.inputs: list[TensorInfo] = []
        self.outputs: list[TensorInfo] = []
        self.initializers: list[Tensor] = []
        self.initialized: set[str] = set()
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

    def apart(self) -> _GraphFigures:
        """Return the figures of a separate graph; its external data belongs to the same model."""
        other = _GraphFigures()
        other.external = self.external
        return other

    def check(self, position: int) -> None:
        """Refuse a file that was made to fill the memory."""
        kept: list[Sized] = [self.initializers, self.external, self.inputs, self.outputs, self.ops]
        if max(map(len, kept)) > _MAX_KEPT:
            raise malformed(f"more than {_MAX_KEPT} tensors, values or operators", position)

    def add(self, tensor: Tensor, depth: int) -> None:
        """Keep an initializer of a graph `depth` graphs below the main one."""
        self.initializers.append(tensor)
        if depth == 0:
            self.initialized.add(tensor.name)


def _read_model(data: Data) -> Structure:
    model, has_graph, ir_version, num_trainings = _GraphFigures(), False, 0, 0
    producer = {"producer_name": "", "producer_version": ""}
    opsets: dict[str, int] = {}
    metadata: dict[str, str] = {}
    functions: list[Function] = []
    for field, content in read(data, MODEL, (0, len(data))):
        if field == "ir_version":
            ir_version = content
        elif field in producer:
            producer[field] = content
        elif field == "graph":
            has_graph = True
            _read_graph(data, content, model, depth=0)
        elif field == "opset_import":
            opsets.update([_read_opset(data, content)])
        elif field == "metadata_props":
            metadata.update([read_entry(data, content)])
        elif len(functions) + num_trainings >= _MAX_FUNCTIONS:
            raise malformed(f"more than {_MAX_FUNCTIONS} functions", content[0])
        elif field == "functions":
            functions.append(_read_function(data, content, model))
        else:
            num_trainings += 1
            for _, graph in read(data, TRAINING, content):
                _read_graph(data, graph, model.apart(), depth=0)
    # Opsets are mandatory from IR version 3 on, and follow the graph: a truncated copy lacks them.
    if not has_graph or not ir_version or (ir_version >= 3 and not opsets):
        raise malformed("no graph, no IR version or no opset in it", len(data))
    return Structure(
        ir_version=ir_version,
        producer=" ".join(producer.values()).strip(),
        opsets=dict(sorted(opsets.items())),
        metadata=dict(sorted(metadata.items())),
        functions=tuple(functions),
        num_trainings=num_trainings,
        **_of_graph(model),
    )


def _of_graph(model: _GraphFigures) -> dict[str, Any]:
    """Return the fields of a structure that come from its main graph."""
    return {
        "inputs": tuple(value for value in model.inputs if value.name not in model.initialized),
        "outputs": tuple(model.outputs),
        "initializers": tuple(model.initializers),
        "ops": _by_count(model.ops),
        "most_inputs": {decode(op, 0): number for op, number in model.most_inputs.items()},
        "given_inputs": {decode(op, 0): frozenset(places) for op, places in model.given_inputs.items()},
        "attributes": {
            decode(op, 0): {decode(name, 0): value for name, value in largest.items()}
            for op, largest in model.attributes.items()
        },
        "num_subgraphs": model.num_subgraphs,
        "external": tuple(model.external),
        "scopes": dict(model.scopes),
        "scope_bytes": _scope_bytes(model),
        "constants": dict(model.constants),
        "attribute_bytes": model.attribute_bytes,
    }


def _read_graph(data: Data, place: Span, model: _GraphFigures, depth: int) -> None:
    """Read a GraphProto; inputs and outputs only for the main graph."""
    if depth > _MAX_NESTING:
        raise malformed(f"graphs nested more than {_MAX_NESTING} deep", place[0])
    for field, part in read(data, GRAPH, place):
        match field:
            case "node":
                _count_node(data, part, model, depth)
                continue
            case "initializer":
                model.add(read_tensor(data, part, model.external), depth)
            case "sparse_initializer":
                if (values := read_sparse_tensor(data, part, model.external)[0]) is not None:
                    model.add(values, depth)
            case "input" | "output" if depth == 0:
                (model.inputs if field == "input" else model.outputs).append(read_value_info(data, part))
        model.check(part[0])


def _count_node(data: Data, place: Span, model: _GraphFigures, depth: int) -> None:
    """Count a NodeProto, and read the graphs and tensors in its attributes."""
    texts = {"op_type": b"", "domain": b"", "name": b""}
    scopes = ""
    inputs: list[bytes] = []
    attributes: list[tuple[bytes, int]] = []
    for field, content in read(data, _COUNTED, place):
        if field == "input":
            if len(inputs) < _MAX_INPUTS:
                inputs.append(content)
        elif field == "attribute":
            held = model.constants if texts["op_type"] == b"Constant" else None
            attribute = _read_attribute(data, content, model, depth, held)
            if len(attributes) < _MAX_INPUTS:
                attributes.append(attribute)
        elif field == "metadata_props":
            first, last = content
            if last - first <= _MAX_SCOPES_BYTES and SCOPES_KEY in data[first : min(last, first + 64)]:
                scopes = read_entry(data, content, is_kept=False)[1]
        else:
            texts[field] = content
    op_type, domain, name = texts.values()
    op = domain + b"::" + op_type if domain not in (b"", _ALIAS) else op_type
    if op not in model.ops:
        model.check(place[0])
        data.charge(op.__sizeof__(), place[0])
    model.ops[op] += 1
    model.most_inputs[op] = max(len(inputs), model.most_inputs.get(op, 0))
    model.given_inputs.setdefault(op, set()).update(slot for slot, source in enumerate(inputs, start=1) if source)
    largest = model.attributes.setdefault(op, {})
    for key, value in attributes:
        if key not in largest:
            data.charge(key.__sizeof__(), place[0])
        largest[key] = max(value, largest.get(key, value))
    dotted = () if scopes or b"/" in name else [decode(source, place[0]) for source in inputs if b"." in source]
    scope = scope_of_node(decode(name, place[0]), scopes, dotted)
    if scope not in model.scopes and len(model.scopes) >= _MAX_SCOPES:
        scope = ""
    model.scopes[scope] += 1
    if scope and len(model.readers) < _MAX_KEPT:
        for source in inputs:
            if len(source) <= _MAX_MADE_UP and b"/" not in source and b"." not in source:
                model.readers.setdefault(source, scope)


def _read_attribute(
    data: Data, place: Span, model: _GraphFigures, depth: int, constants: Counter[str] | None = None
) -> tuple[bytes, int]:
    """Read an AttributeProto, add its elements to `constants` by dtype, and return its name and integer, or 0."""
    name, value = b"", 0
    counted: dict[str, int] = defaultdict(int) if constants is None else constants
    for field, content in read(data, ATTRIBUTE, place):
        match field:
            case "name":
                name = content
            case "i":
                value = content
                counted["int64"] += 1
            case "ints":
                counted["int64"] += content
            case "f" | "floats":
                counted["float32"] += content
            case "g" | "graphs":
                model.num_subgraphs += 1
                _read_graph(data, content, model, depth + 1)
            case _:
                if field.startswith("sparse"):
                    tensor = read_sparse_tensor(data, content, model.external)[0]
                else:
                    tensor = read_tensor(data, content, model.external)
                if tensor is not None:
                    model.attribute_bytes += tensor.size_bytes
                    counted[tensor.dtype] += tensor.num_elements
                model.check(content[0])
    return name, value


def _read_opset(data: Data, place: Span) -> tuple[str, int]:
    opset = {"domain": "", "version": 0, **dict(read(data, OPERATOR_SET, place))}
    return str(opset["domain"]) or ALIAS, int(opset["version"])


def _read_function(data: Data, place: Span, model: _GraphFigures) -> Function:
    body = model.apart()
    texts = {"domain": "", "name": ""}
    opsets: dict[str, int] = {}
    for field, content in read(data, FUNCTION, place):
        if field in texts:
            texts[field] = content
        elif field == "node":
            _count_node(data, content, body, depth=0)
        elif field == "attribute_proto":
            _read_attribute(data, content, body, depth=0)
        else:
            opsets.update([_read_opset(data, content)])
    return Function(**texts, opsets=dict(sorted(opsets.items())), ops=_by_count(body.ops))


def _scope_bytes(model: _GraphFigures) -> dict[str, int]:
    num_bytes: Counter[str] = Counter()
    for tensor in model.initializers:
        num_bytes[scope_of_weight(tensor.name) or model.readers.get(tensor.name.encode(), "")] += tensor.size_bytes
    return dict(num_bytes)


def _by_count(counted: Mapping[bytes, int]) -> dict[str, int]:
    """Decode the names of operators, and put the most frequent first."""
    ops: Counter[str] = Counter()
    for op, count in counted.items():
        ops[decode(op, 0)] += count
    return dict(sorted(ops.items(), key=lambda item: (-item[1], item[0])))


def main_graph(data: Data) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the fields of the main graph."""
    for field, content in read(data, MODEL, (0, len(data))):
        if field == "graph":
            yield from read(data, GRAPH, content)


def _read_node(data: Data, place: Span) -> Node:
    texts = {"op_type": "", "domain": "", "name": ""}
    lists: dict[str, list[str]] = {"input": [], "output": []}
    for field, content in read(data, NODE, place):
        if field in texts:
            texts[field] = decode(content, place[0])
        elif field in lists:
            lists[field].append(decode(content, place[0]))
    domain = "" if texts["domain"] == ALIAS else texts["domain"]
    return Node(texts["op_type"], domain, texts["name"], tuple(lists["input"]), tuple(lists["output"]))


def read_nodes(path: Path) -> Iterator[Node]:
    """Yield the nodes of the main graph of the ONNX file at `path`, in their order, one at a time.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with opened(path) as data:
        for field, place in main_graph(data):
            if field == "node":
                yield _read_node(data, place)


def read_texts(path: Path, name: str) -> Iterator[str]:
    """Yield the text of each attribute called `name` of the nodes of the main graph of the ONNX file at `path`.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with opened(path) as data:
        for field, place in main_graph(data):
            for part, span in read(data, NODE, place) if field == "node" else ():
                if part == "attribute":
                    attribute = dict(read(data, ATTRIBUTE_VALUES, span))
                    if "s" in attribute and decode(attribute.get("name", b""), span[0]) == name:
                        yield decode(data[slice(*attribute["s"])], span[0])


def read_names(path: Path) -> tuple[list[str], list[str]]:
    """Read the names that the main graph of the ONNX file at `path` defines: of initializers, and by its nodes.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    initializers: list[str] = []
    outputs: list[str] = []
    with opened(path) as data:
        for field, place in main_graph(data):
            if field == "node":
                outputs.extend(_read_node(data, place).outputs)
            elif field == "initializer":
                initializers.extend(content for name, content in read(data, TENSOR, place) if name == "name")
            elif field == "sparse_initializer" and (values := read_sparse_tensor(data, place, [])[0]) is not None:
                initializers.append(values.name)
    return [name for name in initializers if name], [name for name in outputs if name]


class Constant(NamedTuple):
    """An initializer, or the value of a Constant node.

    Attributes:
        num_elements: an upper bound.
        integers: the values of a small int32 or int64 tensor; otherwise None.
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
        for field, place in main_graph(data):
            if field == "initializer":
                constants.update([read_constant(data, place)])
            elif field == "node":
                node = _read_node(data, place)
                if node.op_type == "Constant" and node.outputs:
                    constants[node.outputs[0]] = _held_constant(data, place)
    return constants


def read_constant(data: Data, place: Span) -> tuple[str, Constant]:
    """Read the name of a tensor, and its integers if there are few."""
    tensor = read_tensor(data, place, [])
    integers: tuple[int, ...] | None = None
    if tensor.dtype in _FORMATS and tensor.num_elements <= _MOST_INTEGERS and tensor.external is None:
        if tensor.payload is not None:
            first, length = tensor.payload
            integers = struct.unpack(f"<{tensor.num_elements}{_FORMATS[tensor.dtype]}", data[first : first + length])
        else:
            integers = tuple(
                value for _, values in read(data, TENSOR_INTEGERS[tensor.dtype], place) for value in values
            )
    return tensor.name, Constant(tensor.num_elements, integers)


def _held_constant(data: Data, place: Span) -> Constant:
    constant = Constant(place[1] - place[0], None)  # strings and floats: fewer than the bytes that hold them
    for field, part in read(data, NODE, place):
        if field != "attribute":
            continue
        held = dict(read(data, ATTRIBUTE, part))
        name = decode(held.get("name", b""), place[0])
        if name == "value" and "t" in held:
            constant = read_constant(data, held["t"])[1]
        elif name in INTEGERS:
            integers = tuple(value for _, values in read(data, INTEGERS[name], part) for value in values)
            constant = Constant(len(integers), integers)
    return constant


def encode_metadata(entries: dict[str, str]) -> bytes:
    """Encode `entries` as ModelProto.metadata_props; appended to a serialized model, they are added to it.

    Protobuf reads two concatenated messages as one merged message, so appending a few bytes stamps a file of any size.
    The caller ensures that none of the keys exists.
    """
    return b"".join(encode_entry(14, key, value) for key, value in entries.items())


SCOPES_KEY = b"pkg.torch.onnx.name_scopes"

# dynamo writes this for a node that belongs to no module.
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
_NAMES_WITHOUT_NUMBER = 2
_MAX_LENGTH = 200


def scope_of_node(name: str, scopes: str, inputs: Iterable[str]) -> str:
    """Return the part that a node belongs to, from its scopes, name or weights; empty for none."""
    if scopes:
        # A list as Python prints it: ['', 'bert', 'bert.encoder', …, 'the node itself'].
        parents = scopes.strip("[]").split(", ")[:-1]
        parent = parents[-1].strip("'\"") if parents else ""
        return "" if parent == _NO_MODULE else layer_of(parent)
    if "/" in name:
        return layer_of(name.rpartition("/")[0])
    for source in inputs:
        if "/" not in source and (part := scope_of_weight(source)):
            return part
    return ""


def scope_of_weight(name: str) -> str:
    """Return the part that an initializer belongs to, from its name; empty if the name is not a path."""
    if "::" in name:  # a generated name, such as onnx::MatMul_1344
        return ""
    return layer_of(name.rpartition("/" if "/" in name and "." not in name else ".")[0])


def layer_of(scope: str) -> str:
    """Return the part of the model that a module belongs to: down to the first number, as in `encoder.layer.3`."""
    names = [name for name in scope.replace("/", ".").split(".") if name]
    number = next((index for index, name in enumerate(names) if name.isdecimal()), _NAMES_WITHOUT_NUMBER - 1)
    return ".".join(names[: number + 1])[:_MAX_LENGTH]


MAX_CALL_DEPTH = 100
MAX_EXPANDED_NODES = 1_000_000
MAX_INPUT_ELEMENTS = 1 << 28  # of fixed dims in a graph


def check_sound(path: Path, structure: Structure) -> None:
    """Refuse a graph that could crash another library.

    Raises:
        ModelFileError: the fault, by name.
    """
    _check_names(path, structure)
    for tensor in structure.initializers:
        if tensor.dtype == "undefined" or tensor.dtype not in DTYPE_NAMES:
            raise _unsound(path, f"the initializer {tensor.name[:60]!r} has the unknown dtype {tensor.dtype}")
    for info in structure.inputs:
        _check_dims(path, info)
    _check_functions(path, structure)


def _check_names(path: Path, structure: Structure) -> None:
    defined = {info.name for info in structure.inputs}
    initializers, outputs = read_names(path)
    for name in (*initializers, *outputs):
        if name in defined:
            raise _unsound(path, f"the name {name[:60]!r} is defined twice")
        defined.add(name)
    for info in structure.outputs:
        if info.name not in defined:
            raise _unsound(path, f"no node makes the output {info.name[:60]!r}")


def _check_dims(path: Path, info: TensorInfo) -> None:
    fixed = [size for size in info.shape if isinstance(size, int)]
    if any(size < 0 for size in fixed):
        raise _unsound(path, f"the input {info.name[:60]!r} has a negative dimension: {min(fixed)}")
    if prod(size for size in fixed if size > 0) > MAX_INPUT_ELEMENTS:
        raise _unsound(
            path, f"the input {info.name[:60]!r} has {fixed} as fixed dims, more than {MAX_INPUT_ELEMENTS:,} elements"
        )


def _check_functions(path: Path, structure: Structure) -> None:
    """Refuse functions that call themselves, are nested too deeply, or become too many nodes when inlined."""
    functions: dict[str, list[Function]] = {}
    for function in structure.functions:
        plain = function.domain in ("", ALIAS)
        functions.setdefault(function.name if plain else f"{function.domain}::{function.name}", []).append(function)
    expanded: dict[str, tuple[int, int]] = {}  # by operator: its number of nodes, and the depth of its calls

    def expand(op: str, depth: int) -> tuple[int, int]:
        if op not in functions:
            return 1, 0
        if op not in expanded:
            if depth > MAX_CALL_DEPTH:
                raise _unsound(path, f"functions call each other more than {MAX_CALL_DEPTH} deep, or call themselves")
            bodies = [total(function.ops.items(), depth + 1) for function in functions[op]]
            expanded[op] = max(nodes for nodes, _ in bodies), 1 + max(height for _, height in bodies)
        return expanded[op]

    def total(ops: Iterable[tuple[str, int]], depth: int) -> tuple[int, int]:
        nodes = height = 0
        for op, count in ops:
            inner, inner_height = expand(op, depth)
            nodes, height = nodes + count * inner, max(height, inner_height)
        return nodes, height

    sizes = [expand(op, 1) for op in functions]
    nodes = total(structure.ops.items(), 1)[0] if functions else 0
    if max((height for _, height in sizes), default=0) > MAX_CALL_DEPTH:
        raise _unsound(path, f"functions call each other more than {MAX_CALL_DEPTH} deep")
    if max([nodes, *(size for size, _ in sizes)]) > MAX_EXPANDED_NODES:
        raise _unsound(path, f"its functions make more than {MAX_EXPANDED_NODES:,} nodes where they are inlined")


def _unsound(path: Path, reason: str) -> ModelFileError:
    return ModelFileError(f"{path} cannot be run: {reason}", "export the model again, or do not trust this file")
