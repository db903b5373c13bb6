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

from onnxtool.graph.edit import constant
from onnxtool.graph.shapes import Shape, Shapes, infer_shapes

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


def largest_number(part: Slice) -> int:
    """Return the largest plain number in the constants of a slice: it contains no wider attention window."""
    largest = 0
    for node in part.nodes:
        for operand in node.inputs:
            array = constant(operand)
            if array is None or array.dtype.kind not in "if" or array.size > _MOST_NUMBERS:
                continue
            finite = np.abs(array[np.isfinite(array)].astype(np.float64))
            # Larger numbers stand for infinity: the end of a slice, the lowest score.
            largest = max([largest, *(int(number) for number in finite.reshape(-1) if number < 1 << 24)])
    return largest


def table_lengths(part: Slice) -> set[int]:
    """Return the lengths of the tables that a slice reads: one may contain a window that no plain number tells."""
    tensors = [value.const_value for value in part.weights]
    values = [node.attributes.get("value") for node in part.nodes if node.op_type == "Constant"]
    tensors += [value.as_tensor() for value in values if value is not None]
    return {max(tensor.shape.numpy()) for tensor in tensors if tensor is not None and tensor.size > _MOST_NUMBERS}


def evaluate(
    model: ir.Model, part: Slice, sizes: Mapping[str, int], feeds: Mapping[str, NDArray[Any]]
) -> list[NDArray[Any]] | None:
    """Compute the values of a slice with the dynamic axes of the inputs at `sizes`.

    Returns:
        One array a value; None where a shape is not known or onnxruntime cannot run it.
    """
    import onnxruntime as ort

    shapes = infer_shapes(model, sizes)
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
        return list(session.run(None, {name: array for name, array in feeds.items() if name in names}))
    except Exception:  # noqa: BLE001  onnxruntime has no error class of its own; a slice that it cannot run is no known mask
        return None


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
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", len(shape))
        constants.append(numpy_helper.from_array(np.array(shape[start:end], np.int64), str(node.outputs[0].name)))
    tensors = {str(value.name): value.const_value for value in part.weights}
    constants += [numpy_helper.from_array(held.numpy(), name) for name, held in tensors.items() if held is not None]
    inputs = [helper.make_tensor_value_info(str(v.name), v.dtype.value if v.dtype else 1, None) for v in part.inputs]
    outputs = [helper.make_empty_tensor_value_info(str(value.name)) for value in part.values]
    graph = helper.make_graph(nodes, "part", inputs, outputs, constants)
    opsets = [helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    proto: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    serialized: bytes = proto.SerializeToString()
    return serialized
