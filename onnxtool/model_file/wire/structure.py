"""Read all of a model but its weights."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from onnxtool.model_file.domains import ALIAS
from onnxtool.model_file.wire.graphs import Reading, count_node, read_attribute, read_graph, read_node, read_opset
from onnxtool.model_file.wire.protobuf import (
    BYTES,
    VARINT,
    Data,
    decode,
    encode_entry,
    fields,
    malformed,
    opened,
    read_entry,
    read_text,
    signed,
)
from onnxtool.model_file.wire.scopes import scope_of_weight
from onnxtool.model_file.wire.tensors import ExternalData, Tensor
from onnxtool.reports import TensorInfo

# What is kept of a file that was made to fill the memory; real models keep a hundredth of it.
_MAX_TEXT_BYTES = 12 << 20
_MAX_FUNCTIONS = 10_000


class Node(NamedTuple):
    """One operator call of the main graph; an input that is left out is an empty string."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Function(NamedTuple):
    """A model-local function. Its nodes are no nodes of the graph."""

    domain: str
    name: str
    overload: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    opsets: dict[str, int]
    ops: dict[str, int]
    metadata: dict[str, str]


class Training(NamedTuple):
    """A TrainingInfo: the operators of its two graphs, and which value is bound to which."""

    initialization_ops: dict[str, int]
    algorithm_ops: dict[str, int]
    initialization_binding: dict[str, str]
    update_binding: dict[str, str]


class Structure(NamedTuple):
    """All of a model but its weights. Node counts include the bodies of If, Loop and Scan.

    Attributes:
        inputs: graph inputs that are not initializers.
        initializers: those of the main graph and of every graph inside a node.
        most_inputs: of a node of each operator, with those that are left out before the last.
        given_inputs: of each operator, the places from 1 on that are not left out by every node.
        attributes: of each operator, by name the largest integer that a node has there; 0 for another type.
        external: every piece of data outside the graph file, those of node attributes and functions included.
        sparse_dims: the dims of each sparse initializer; among the initializers it counts with its values.
        denotations: what the dimensions of an input or output mean, of those that say so.
        quantization: for a value, which tensor holds which of its parameters.
        scopes: number of nodes of each part of the model; of those of which no part is known under an empty name.
        scope_bytes: bytes of the initializers of each part; those without a telling name are their first reader's.
        constants: elements that Constant nodes hold, by dtype.
        attribute_bytes: of tensors in attributes of nodes.
        annotation_bytes: of the metadata of graphs, nodes, values, tensors and functions, as stored.
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
    num_functions: int
    num_subgraphs: int
    external: tuple[ExternalData, ...]
    domain: str
    model_version: int
    graph_name: str
    graph_metadata: dict[str, str]
    functions: tuple[Function, ...]
    trainings: tuple[Training, ...]
    sparse_dims: dict[str, tuple[int, ...]]
    denotations: dict[str, tuple[str, ...]]
    quantization: dict[str, dict[str, str]]
    scopes: dict[str, int]
    scope_bytes: dict[str, int]
    constants: dict[str, int]
    attribute_bytes: int
    annotation_bytes: int

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


def _read_model(data: Data) -> Structure:
    model = Reading()
    numbers = {1: 0, 5: 0}
    texts = {2: "", 3: "", 4: ""}
    opsets: dict[str, int] = {}
    metadata: dict[str, str] = {}
    functions: list[Function] = []
    trainings: list[Training] = []
    has_graph = False
    for number, kind, start, end in fields(data, 0, len(data)):
        if kind == VARINT and number in numbers:
            numbers[number] = signed(start)
        elif kind != BYTES:
            continue
        elif number == 7:
            has_graph = True
            read_graph(data, start, end, model, depth=0)
        elif number in texts:
            texts[number] = read_text(data, start, end)
        elif number == 8:
            domain, version = read_opset(data, start, end)
            opsets[domain or ALIAS] = version
        elif number == 14:
            key, value = read_entry(data, start, end)
            metadata[key] = value
        elif number in (20, 25) and len(functions) + len(trainings) >= _MAX_FUNCTIONS:
            raise malformed(f"more than {_MAX_FUNCTIONS} functions", start)
        elif number == 20:
            trainings.append(_read_training(data, start, end, model))
        elif number == 25:
            functions.append(_read_function(data, start, end, model))
    # Opsets are obligatory from IR version 3 on, and they follow the graph: a copy that broke off lacks them.
    if not has_graph or not numbers[1] or (numbers[1] >= 3 and not opsets):
        raise malformed("no graph, no IR version or no opset in it", len(data))
    return Structure(
        ir_version=numbers[1],
        producer=f"{texts[2]} {texts[3]}".strip(),
        opsets=dict(sorted(opsets.items())),
        metadata=dict(sorted(metadata.items())),
        inputs=tuple(value for value in model.inputs if value.name not in model.initialized),
        outputs=tuple(model.outputs),
        initializers=tuple(model.initializers),
        ops=_by_count(model.ops),
        most_inputs={decode(op, 0): number for op, number in model.most_inputs.items()},
        given_inputs={decode(op, 0): frozenset(places) for op, places in model.given_inputs.items()},
        attributes={
            decode(op, 0): {decode(name, 0): value for name, value in largest.items()}
            for op, largest in model.attributes.items()
        },
        num_functions=len(functions),
        num_subgraphs=model.num_subgraphs,
        external=tuple(model.external),
        domain=texts[4],
        model_version=numbers[5],
        graph_name=model.name,
        graph_metadata=dict(sorted(model.metadata.items())),
        functions=tuple(functions),
        trainings=tuple(trainings),
        sparse_dims=model.sparse_dims,
        denotations=model.denotations,
        quantization=model.quantization,
        scopes=dict(model.scopes),
        scope_bytes=_scope_bytes(model),
        constants=dict(model.constants),
        attribute_bytes=model.attribute_bytes,
        annotation_bytes=data.annotation_bytes,
    )


def read_nodes(path: Path) -> Iterator[Node]:
    """Yield the nodes of the main graph of the ONNX file at `path`, in their order, one at a time.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with opened(path) as data:
        for number, kind, start, end in fields(data, 0, len(data)):
            if number == 7 and kind == BYTES:
                for inner, inner_kind, node_start, node_end in fields(data, start, end):
                    if inner == 1 and inner_kind == BYTES:
                        yield Node(*read_node(data, node_start, node_end))


def read_names(path: Path) -> tuple[list[str], list[str]]:
    """Read the names that the main graph of the ONNX file at `path` defines: of initializers, and by its nodes.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    initializers: list[str] = []
    outputs: list[str] = []
    # The path to the names: an initializer, the values of a sparse one, and an output of a node.
    places = {5: ((8,), initializers), 15: ((1, 8), initializers), 1: ((2,), outputs)}
    with opened(path) as data:
        for number, kind, start, end in fields(data, 0, len(data)):
            if number != 7 or kind != BYTES:
                continue
            for inner, inner_kind, first, last in fields(data, start, end):
                if inner in places and inner_kind == BYTES:
                    numbers, names = places[inner]
                    names.extend(name for name in _texts_at(data, first, last, numbers) if name)
    return initializers, outputs


def _texts_at(data: Data, start: int, end: int, numbers: tuple[int, ...]) -> Iterator[str]:
    for number, kind, first, last in fields(data, start, end):
        if number == numbers[0] and kind == BYTES:
            if len(numbers) == 1:
                yield read_text(data, first, last)
            else:
                yield from _texts_at(data, first, last, numbers[1:])


def encode_metadata(entries: dict[str, str]) -> bytes:
    """Encode `entries` as ModelProto.metadata_props; appended to a serialized model, they are added to it.

    Protobuf reads the concatenation of two messages as their merge, so a file of any size is stamped by writing a
    few bytes at its end. The caller makes sure that no key is there already.
    """
    encoded = bytearray()
    for key, value in entries.items():
        encoded += encode_entry(14, key, value)
    return bytes(encoded)


def _read_function(data: Data, start: int, end: int, model: Reading) -> Function:
    body = model.apart()
    texts = {1: "", 10: "", 13: ""}
    lists: dict[int, list[str]] = {4: [], 5: [], 6: []}
    opsets: dict[str, int] = {}
    metadata: dict[str, str] = {}
    for number, kind, first, last in fields(data, start, end):
        if kind != BYTES:
            continue
        if number == 7:
            count_node(data, first, last, body, depth=0)
        elif number == 11:
            read_attribute(data, first, last, body, depth=0)
            lists[6].append(_attribute_name(data, first, last))
        elif number == 9:
            domain, version = read_opset(data, first, last)
            opsets[domain or ALIAS] = version
        elif number == 14:
            key, value = read_entry(data, first, last)
            metadata[key] = value
            data.annotation_bytes += last - first
        elif number in texts:
            texts[number] = read_text(data, first, last)
        elif number in lists:
            lists[number].append(read_text(data, first, last))
    return Function(
        domain=texts[10],
        name=texts[1],
        overload=texts[13],
        inputs=tuple(lists[4]),
        outputs=tuple(lists[5]),
        attributes=tuple(lists[6]),
        opsets=dict(sorted(opsets.items())),
        ops=_by_count(body.ops),
        metadata=dict(sorted(metadata.items())),
    )


def _attribute_name(data: Data, start: int, end: int) -> str:
    name = ""
    for number, kind, first, last in fields(data, start, end):
        if number == 1 and kind == BYTES:
            name = read_text(data, first, last)
    return name


def _read_training(data: Data, start: int, end: int, model: Reading) -> Training:
    graphs = {1: model.apart(), 2: model.apart()}
    bindings: dict[int, dict[str, str]] = {3: {}, 4: {}}
    for number, kind, first, last in fields(data, start, end):
        if kind != BYTES:
            continue
        if number in graphs:
            read_graph(data, first, last, graphs[number], depth=0)
        elif number in bindings:
            key, value = read_entry(data, first, last)
            bindings[number][key] = value
    return Training(_by_count(graphs[1].ops), _by_count(graphs[2].ops), bindings[3], bindings[4])


def _scope_bytes(model: Reading) -> dict[str, int]:
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
