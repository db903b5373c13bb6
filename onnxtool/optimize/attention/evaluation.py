"""Compute small parts of a graph, such as a mask, by running only the nodes above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool.graph.shapes import Shape, Shapes, axis_name, infer_shapes

_MOST_NODES = 300
_MOST_NUMBERS = 8  # a larger constant is a table
_LARGEST_BYTES = 1 << 20  # of an initializer: a table of positions is a part of a mask, an embedding is not


@dataclass(frozen=True)
class Slice:
    """The nodes from which some values of a graph are computed.

    Attributes:
        values: the values.
        nodes: in the order of the graph. Nodes above a Shape are not among them where the shape follows from the
            sizes of the inputs.
        inputs: the graph inputs that it reads.
        sized: the values whose shapes it reads, without computing them.
        weights: the initializers that it reads.
    """

    values: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    sized: tuple[ir.Value, ...]
    weights: tuple[ir.Value, ...]


def slice_above(values: Sequence[ir.Value], shapes: Shapes) -> Slice | None:
    """Return the slice above `values`; None where it is too large to be a mask, such as that of hidden states."""
    nodes: dict[ir.Node, None] = {}
    inputs: dict[ir.Value, None] = {}
    sized: dict[ir.Value, None] = {}
    weights: dict[ir.Value, None] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value.is_graph_input():
            inputs[value] = None
        elif node is None:
            if value.const_value is None or value.const_value.nbytes > _LARGEST_BYTES:
                return None
            weights[value] = None
        elif _is_shape(node) and shapes.of(node.inputs[0]) is not None and node.inputs[0] is not None:
            sized[node.inputs[0]] = None
            nodes[node] = None
        elif node not in nodes:
            if len(nodes) >= _MOST_NODES or any(a.type.name in ("GRAPH", "GRAPHS") for a in node.attributes.values()):
                return None
            nodes[node] = None
            waiting.extend(operand for operand in node.inputs if operand is not None)
    graphs = {id(node.graph): node.graph for node in nodes}
    if len(graphs) > 1:
        return None
    order = [node for graph in graphs.values() for node in graph or () if node in nodes]
    return Slice(tuple(values), tuple(order), tuple(inputs), tuple(sized), tuple(weights))


def _is_shape(node: ir.Node) -> bool:
    return node.op_type == "Shape" and node.domain == ""


def table_lengths(part: Slice) -> set[int]:
    """Return the lengths of the tables that a slice reads: one may contain a window that no plain number tells."""
    tensors = [value.const_value for value in part.weights]
    values = [node.attributes.get("value") for node in part.nodes if node.op_type == "Constant"]
    tensors += [value.as_tensor() for value in values if value is not None]
    return {max(tensor.shape.numpy()) for tensor in tensors if tensor is not None and tensor.size > _MOST_NUMBERS}


def evaluate(
    model: ir.Model, part: Slice, sizes: Mapping[str, int], feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> list[list[NDArray[Any]]] | None:
    """Compute the values of a slice with the dynamic axes of the inputs at `sizes`, once for each of `feeds`.

    Returns:
        For each of `feeds` one array a value; None where a shape is not known or onnxruntime cannot run it.
    """
    import onnxruntime as ort

    if all(value.is_graph_input() for value in part.sized):  # also where the rest of the model has no such size
        shapes = {str(value.name): sizes_of(value, sizes) for value in part.sized}
    else:
        shapes = dict(infer_shapes(model, sizes))
    proto = _to_proto(model, part, shapes)
    if proto is None:
        return None
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        names = {value.name for value in session.get_inputs()}
        return [list(session.run(None, {name: one[name] for name in names})) for one in feeds]
    except Exception:  # noqa: BLE001  onnxruntime has no error class of its own; a slice that it cannot run is no known mask
        return None


def sizes_of(value: ir.Value, sizes: Mapping[str, int]) -> Shape:
    """Return the shape of a graph input with the dynamic axes at `sizes`; one None where not even the rank is known."""
    if value.shape is None:
        return (None,)
    return tuple(
        size if isinstance(size, int) else sizes[size.value or axis_name(str(value.name), axis)]
        for axis, size in enumerate(value.shape)
    )


def _to_proto(model: ir.Model, part: Slice, shapes: Mapping[str, Shape]) -> bytes | None:
    """Serialize a slice as a model of its own, in which each Shape is a constant for these sizes."""
    nodes, constants = [], []
    for node in part.nodes:
        sized = node.inputs[0] if _is_shape(node) else None
        if sized is None or sized not in part.sized:
            nodes.append(ir.to_proto(node))
            continue
        shape = shapes.get(str(sized.name))
        if shape is None or None in shape:
            return None
        part_of_shape = shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(shape))]
        constants.append(numpy_helper.from_array(np.array(part_of_shape, np.int64), str(node.outputs[0].name)))
    tensors = {str(value.name): value.const_value for value in part.weights}
    constants += [numpy_helper.from_array(held.numpy(), name) for name, held in tensors.items() if held is not None]
    inputs = [helper.make_tensor_value_info(str(v.name), v.dtype.value if v.dtype else 1, None) for v in part.inputs]
    outputs = [helper.make_empty_tensor_value_info(str(value.name)) for value in part.values]
    graph = helper.make_graph(nodes, "part", inputs, outputs, constants)
    opsets = [helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    proto: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    serialized: bytes = proto.SerializeToString()
    return serialized
