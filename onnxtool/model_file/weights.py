"""Convert an ONNX file to an onnx_ir model and back, without parsing or copying weights.

onnx.load and onnx.save hold several copies of a model's weights: the bytes of the file, protobuf messages, and the
bytes of the result. Here, a loaded model refers to its weights on disk, and saving streams each of them from its place
into the middle of a message whose other parts are small.
"""

from __future__ import annotations

import errno
import heapq
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from onnxtool.errors import ModelFileError, first_line
from onnxtool.model_file.domains import graphs_of, settle_domains
from onnxtool.model_file.metadata import SIZES_KEY
from onnxtool.model_file.wire import external_file
from onnxtool.model_file.wire.messages import GRAPH, MODEL, TENSOR
from onnxtool.model_file.wire.protobuf import (
    Data,
    Message,
    Span,
    copy_field,
    encode_entry,
    encode_field,
    encode_header,
    encode_number,
    opened,
    read,
)

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    import onnx
    import onnx_ir as ir
    from google.protobuf.message import Message as ProtoMessage

# Shapes, axes and scalars stay in the message, because passes read them; a weight matrix is larger than this.
LARGE_BYTES = 1024

_MAPS = "onnxtool.maps"  # key under which a model keeps map types, by value name
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of TensorProto
_EXTERNAL = 1
_OTHER_FILES = 512  # that a process may have open


def load_model(path: Path) -> ir.Model:
    """Load the model at `path`; its large weights stay on disk until they are read.

    Raises:
        ModelFileError: the file is missing, or not an ONNX model.
    """
    import onnx_ir as ir
    from google.protobuf.message import DecodeError

    try:
        proto, folder = read_located(path)
        settle_domains(proto)
        sort_nodes(proto)
        model = from_proto(proto)
    except (DecodeError, ir.serde.SerdeError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"{path} is not a valid ONNX model: {first_line(error)}", "export or copy it again"
        ) from error
    model.metadata_props.pop(SIZES_KEY, None)  # a graph that is written from it has no files of fixed sizes
    _refuse_references(path, model)
    _refuse_hard_links(folder, model)
    _allow_open_files(sum(len(graph.initializers) for graph in model.graphs()))
    for graph in model.graphs():
        ir.external_data.set_base_dir(graph, folder)
    # Tensors that are small, or in a graph inside a node, are read now: a round trip through protobuf loses the folder
    # that their location is relative to.
    with detached_weights(model):
        ir.external_data.load_to_model(model)
    return model


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """Return a protobuf as a model. Map types, which onnx_ir lacks, are kept in its metadata for `to_proto`."""
    import onnx_ir as ir

    graph = proto.graph
    maps = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info) if _holds_map(value.type)}
    types = {name: value.type.SerializeToString() for name, value in maps.items()}
    for value in maps.values():
        value.ClearField("type")
    model: ir.Model = ir.from_proto(proto)
    model.meta[_MAPS] = types
    return model


def _holds_map(kind: onnx.TypeProto) -> bool:
    """Whether a type is a map, as returned by scikit-learn classifiers, or a sequence of maps."""
    if kind.HasField("sequence_type"):
        return _holds_map(kind.sequence_type.elem_type)
    return kind.HasField("map_type") or (kind.HasField("optional_type") and _holds_map(kind.optional_type.elem_type))


def read_located(path: Path) -> tuple[onnx.ModelProto, Path]:
    """Return the ModelProto, with large weights as external data, and the folder that their locations are relative to.

    Raises:
        ModelFileError: the file is missing, or its external data is missing or outside.
        DecodeError: the file is not an ONNX model.
    """
    import onnx

    proto = onnx.ModelProto.FromString(externalized(path))
    return proto, relocate(proto, path)


def _refuse_references(path: Path, model: ir.Model) -> None:
    """Refuse attributes outside functions that refer to a function attribute: nothing gives them a value."""
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.is_ref():
                raise ModelFileError(
                    f"{path} cannot be run: the attribute {attribute.name!r} of a {node.op_type} refers to one of a "
                    "function, and no function has that node",
                    "export the model again, or do not trust this file",
                )


def _allow_open_files(num_weights: int) -> None:
    """Raise this process's limit on open files if weights need it: onnx_ir opens the file again for each one it reads.

    Systems allow 1,024 by default, and about a million on request.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * num_weights + _OTHER_FILES  # a copy of the model reads them as well
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # more than the system allows; what needs them fails, and says so
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _refuse_hard_links(folder: Path, model: ir.Model) -> None:
    """Refuse hard-linked files, whose weights onnx_ir does not read: another name may lie in another folder."""
    import onnx_ir as ir

    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    locations = {folder / tensor.location for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    for file in sorted(locations):
        if file.is_file() and file.stat().st_nlink > 1:
            raise ModelFileError(
                f"{file} is a hard link: {file.stat().st_nlink} names share its content",
                "make a copy of it, and use that",
            )


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the protobuf of a model.

    Raises:
        ModelFileError: something in it cannot be stored, such as a string that is not UTF-8 and was not read until now.
    """
    import onnx_ir as ir

    try:
        proto: onnx.ModelProto = ir.to_proto(model)
    except (ir.serde.SerdeError, TypeError, ValueError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = first_line(cause)
        raise ModelFileError(f"the model cannot be written: {reason}", "export it again") from error
    types = model.meta.get(_MAPS, {})
    for value in (*proto.graph.input, *proto.graph.output) if types else ():
        if value.name in types:
            value.type.ParseFromString(types[value.name])
    return proto


def to_full_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf with all weights inside; `model` itself is unchanged."""
    from onnx import TensorProto

    proto = to_proto(model)
    for tensor in proto.graph.initializer:
        weight = model.graph.initializers[tensor.name].const_value
        if tensor.data_location == TensorProto.EXTERNAL and weight is not None:
            del tensor.external_data[:]
            tensor.data_location = TensorProto.DEFAULT
            tensor.raw_data = weight.tobytes()
    return proto


def to_light_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf whose large weights are graph inputs; `model` is unchanged.

    This is for tools that only look at the structure: serializing copies every weight, and nothing over 2 GB can be
    serialized at all.
    """
    graph = model.graph
    inputs = list(graph.inputs)
    listed = {value.name for value in inputs}  # IR versions before 4 also list initializers as inputs
    with detached_weights(model) as weights:
        graph.inputs.extend(value for name, value in weights.items() if name not in listed)
        try:
            return to_proto(model)
        finally:
            graph.inputs[:] = inputs


def from_light_proto(proto: onnx.ModelProto, original: ir.Model) -> ir.Model:
    """Convert a tool's result for `to_light_proto(original)` back, restoring the weights of `original`.

    Weights that nodes no longer use are dropped.
    """
    model = from_proto(proto)
    restore_description(model, original)
    with detached_weights(original) as weights:
        tensors = {name: value.const_value for name, value in weights.items()}
    inputs = []
    for value in model.graph.inputs:
        name = str(value.name)
        if name not in tensors:
            inputs.append(value)
        elif value.uses() or value.is_graph_output():
            value.const_value = tensors[name]
            model.graph.initializers[name] = value
    model.graph.inputs[:] = inputs
    return model


def restore_description(model: ir.Model, original: ir.Model) -> None:
    """Restore the metadata and producer of `original`, which tools drop or replace."""
    model.producer_name, model.producer_version = original.producer_name, original.producer_version
    model.metadata_props.clear()
    model.metadata_props.update(original.metadata_props)


def write_inline(model: ir.Model, path: Path) -> None:
    """Write `model` to one file at `path`. All weights together must be smaller than 2 GiB, protobuf's limit.

    The bytes depend only on the model. Large initializers come last in the graph message, in their original order.
    """
    import onnx
    import onnx_ir as ir

    _refuse_external_attributes(model)
    with detached_weights(model) as weights:
        message = to_proto(ir.external_data.load_to_model(model))  # the small rest
    graph = message.graph.SerializeToString()
    message.ClearField("graph")
    tensors = [value.const_value for value in weights.values() if value.const_value is not None]
    headers = []
    for name, tensor in zip(weights, tensors, strict=True):
        header = onnx.TensorProto(name=name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
        headers.append(header.SerializeToString() + encode_header(_RAW_DATA, tensor.nbytes))
    fields = [
        encode_header(_INITIALIZER, len(header) + tensor.nbytes) + header
        for header, tensor in zip(headers, tensors, strict=True)
    ]
    length = len(graph) + sum(len(field) + tensor.nbytes for field, tensor in zip(fields, tensors, strict=True))
    with path.open("wb") as file:
        file.write(message.SerializeToString())
        file.write(encode_header(_GRAPH, length))
        file.write(graph)
        for field, tensor in zip(fields, tensors, strict=True):
            file.write(field)
            _write_tensor(tensor, file)


@contextmanager
def detached_weights(model: ir.Model) -> Iterator[dict[str, ir.Value]]:
    """Take the large weights out of the main graph during the block, and yield them by name."""
    graph = model.graph
    initializers = dict(graph.initializers)
    weights = {name: value for name, value in initializers.items() if _is_large(value)}
    try:
        for name in weights:
            graph.initializers.pop(name)
        yield weights
    finally:
        graph.initializers.clear()
        graph.initializers.update(initializers)


def read_once(tensor: Any) -> Any:
    """Return a copy of a tensor's array, without keeping its place in a file mapped."""
    import onnx_ir as ir

    array = tensor.numpy().copy()
    if isinstance(tensor, ir.ExternalTensor):
        with suppress(BufferError):  # an array of it is still held somewhere
            tensor.release()
    return array


def release_weights(model: ir.Model) -> None:
    """Unmap weights that were read; reading them again maps them again."""
    import onnx_ir as ir

    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                with suppress(BufferError):  # an array of it is still held somewhere
                    value.const_value.release()


def _is_large(value: ir.Value) -> bool:
    import onnx_ir as ir

    tensor = value.const_value
    return tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.nbytes > LARGE_BYTES


def _write_tensor(tensor: Any, file: BinaryIO) -> None:
    start = file.tell()
    try:
        tensor.tofile(file)
    except OSError as error:
        if error.errno is None:  # numpy's own error, which gives the bytes written but not the cause
            raise OSError(errno.ENOSPC, "not all of a weight could be written") from error
        raise
    written = file.tell() - start
    if written != tensor.nbytes:  # the lengths before it are written already
        raise ModelFileError(
            f"the weight {tensor.name} has {written} bytes where its shape needs {tensor.nbytes}",
            "the model is damaged; export it again",
        )


def _refuse_external_attributes(model: ir.Model) -> None:
    """Refuse tensors in attributes with external data, which would be left behind."""
    import onnx_ir as ir

    for graph in model.graphs():
        for node in graph:
            for attribute in node.attributes.values():
                if isinstance(attribute.value, ir.ExternalTensor):
                    raise ModelFileError(
                        f"the attribute {attribute.name} of node {node.name} holds external data",
                        "convert it to an initializer; onnxtool moves external data of initializers only",
                    )


class _Every(Message):
    """A table that has every field: under its name where `named` has it, and with its tag, undecoded."""

    def __init__(self, message: Message) -> None:
        self._named = message

    def get(self, tag: int, default: Any = None) -> Any:
        name = self._named[tag][0] if tag in self._named else ""
        return name, lambda _, start, end: (tag, start, end)


def externalized(path: Path) -> bytes:
    """Return the ModelProto at `path` with the raw data of large initializers replaced by its location in the file.

    A tool that reads external data then maps the weights from the model file itself, at any size: they are
    neither parsed nor copied. Initializers inside nodes or in typed fields stay as they are.

    Raises:
        ModelFileError: there is no such file, or it is not an ONNX model.
    """
    with opened(path) as data:
        message = bytearray()
        for field, (tag, start, end) in read(data, _Every(MODEL), (0, len(data))):
            if field != "graph":
                message += copy_field(data, tag, start, end)
                continue
            graph = bytearray()
            for name, (inner, first, last) in read(data, _Every(GRAPH), (start, end)):
                if name == "initializer" and last - first > LARGE_BYTES:
                    graph += encode_field(inner >> 3, _without_data(data, (first, last), path.name))
                else:
                    graph += copy_field(data, inner, first, last)
            message += encode_field(tag >> 3, bytes(graph))
        return bytes(message)


def _without_data(data: Data, place: Span, location: str) -> bytes:
    parts = list(read(data, _Every(TENSOR), place))
    if not any(name == "raw_data" and end - start > LARGE_BYTES for name, (_, start, end) in parts):
        return data[slice(*place)]
    message = bytearray()
    for name, (tag, start, end) in parts:
        if name == "raw_data":
            entries = {"location": location, "offset": str(start), "length": str(end - start)}
            for key, value in entries.items():
                message += encode_entry(_EXTERNAL_DATA, key, value)
            message += encode_number(_DATA_LOCATION, _EXTERNAL)
        elif name not in ("external_data", "data_location"):
            message += copy_field(data, tag, start, end)
    return bytes(message)


def relocate(proto: onnx.ModelProto, path: Path) -> Path:
    """Refer to the external data of the model at `path` by its location after following links; return its folder.

    onnx_ir does not read data through links, nor does onnxruntime for a model in memory; in the hub's cache all files
    are links. The message is only changed if there are links.

    Raises:
        ModelFileError: the data is missing or outside (`external_file`).
    """
    entries = [entry for tensor in _external_tensors(proto) for entry in tensor.external_data]
    entries = [entry for entry in entries if entry.key == "location"]
    files = {path.name: path.resolve()}  # whatever its name: weights inside the file itself
    for location in {entry.value for entry in entries} - {path.name}:
        files[location] = external_file(path, location)
    folder = path.parent.resolve()
    if all(file == folder / location for location, file in files.items()):
        return folder
    folder = Path(os.path.commonpath([file.parent for file in files.values()]))
    for entry in entries:
        entry.value = files[entry.value].relative_to(folder).as_posix()
    return folder


def _external_tensors(message: ProtoMessage) -> Iterator[onnx.TensorProto]:
    """Yield all tensors with external data in a message: in graphs, attributes and functions."""
    import onnx

    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if isinstance(value, Iterable) else (value,):
                yield from _external_tensors(inner)


def sort_nodes(model: onnx.ModelProto) -> bool:
    """Sort the nodes of all graphs and functions of `model` in place; return whether any was out of order.

    onnxruntime accepts any order, so such files exist. onnx_ir treats a value that is read before it is produced as a
    different value of the same name, which silently disconnects the graph.

    Nodes move no further than necessary. Nodes in a cycle keep their order, after all others.
    """
    bodies: list[MutableSequence[onnx.NodeProto]] = [model.graph.node, *(function.node for function in model.functions)]
    return any([_sort(nodes) for nodes in bodies])  # noqa: C419  all of them are to be sorted


def _sort(nodes: MutableSequence[onnx.NodeProto]) -> bool:
    """Sort one body and the bodies inside its nodes; return whether any was out of order."""
    changed = any([_sort(graph.node) for node in nodes for graph in graphs_of(node)])  # noqa: C419
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    sources = [{makers[name] for name in _reads(node) if name in makers} for node in nodes]
    if all(max(needed, default=-1) < place for place, needed in enumerate(sources)):
        return changed
    readers: list[list[int]] = [[] for _ in nodes]
    for place, needed in enumerate(sources):
        for source in needed:
            readers[source].append(place)
    ready = [place for place, needed in enumerate(sources) if not needed]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers[place]:
            sources[reader].discard(place)
            if not sources[reader]:
                heapq.heappush(ready, reader)
    left = sorted(set(range(len(nodes))) - set(order))
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    for place, source in enumerate([*order, *left]):
        nodes[place].CopyFrom(copies[source])
    return True


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, including outer values read by graphs inside it."""
    yield from node.input
    for graph in graphs_of(node):
        inside = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        inside.update(name for inner in graph.node for name in inner.output)
        yield from (value.name for value in graph.output if value.name not in inside)
        for inner in graph.node:
            yield from (name for name in _reads(inner) if name not in inside)
