"""Compute small parts of a graph, such as a mask, by running only the nodes above them, at provably sufficient sizes.

A mask is compared with known ones at a few sizes. That proves that they are equal at all sizes for a slice of these
operators, and `find_reach` refuses any other:

- Elements depend on sizes only through the positions at which elements are read: sums and products of positions and
  sizes, which are polynomials of degree 2. Masks that agree at three sizes of each axis agree at all sizes. So the
  shorter mask is a corner of the longer one.
- Positions are compared as `i`, `j` and `i - j` with constants no larger than K. Beyond K, no comparison changes: any
  position in the mask behaves like one of the first 2 K + 3 in both directions (small models of difference
  constraints).
- An element reads at most two numbers of the inputs, which are 0 or 1, or read only by sign. Rows in which any two
  positions take all four pairs of numbers cover everything that it can read (a covering array of strength 2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool.graph.edit import attribute, constant
from onnxtool.graph.shapes import Shape, Shapes, axis_name, infer_shapes

_MOST_NODES = 300
_MOST_NUMBERS = 8  # a larger constant is a table
_LARGEST_BYTES = 1 << 20  # of an initializer: a table of positions is a part of a mask, an embedding is not


@dataclass(frozen=True)
class Slice:
    """The nodes that compute some values of a graph.

    Attributes:
        values: the values.
        nodes: in graph order, without nodes above a Shape if the shape follows from the input sizes.
        inputs: the graph inputs that it reads.
        sized: the values whose shapes it reads without computing them.
        weights: the initializers that it reads.
    """

    values: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    sized: tuple[ir.Value, ...]
    weights: tuple[ir.Value, ...]


def slice_above(values: Sequence[ir.Value], shapes: Shapes) -> Slice | None:
    """Return the slice above `values`; None if it is too large to be a mask, such as the slice of hidden states."""
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
        elif _is_shape(node) and shapes.prime_shape(node.inputs[0]) is not None and node.inputs[0] is not None:
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
    """Return the lengths of the tables that a slice reads: a table may contain a window that no constant reveals."""
    tensors = [value.const_value for value in part.weights]
    values = [node.attributes.get("value") for node in part.nodes if node.op_type == "Constant"]
    tensors += [value.as_tensor() for value in values if value is not None]
    return {max(tensor.shape.numpy()) for tensor in tensors if tensor is not None and tensor.size > _MOST_NUMBERS}


def evaluate(
    model: ir.Model, part: Slice, sizes: Mapping[str, int], feeds: Sequence[Mapping[str, NDArray[Any]]]
) -> list[list[NDArray[Any]]] | None:
    """Compute the values of a slice with the dynamic axes of the inputs at `sizes`, once for each of `feeds`.

    Returns:
        For each of `feeds`, one array per value; None if a shape is unknown or onnxruntime cannot run it.
    """
    import onnxruntime as ort

    if all(value.is_graph_input() for value in part.sized):  # even if the rest of the model cannot have this size
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
        return [list(session.run(None, {name: feed[name] for name in names})) for feed in feeds]
    except Exception:  # noqa: BLE001  onnxruntime has no error class of its own; a slice that it cannot run is no known mask
        return None


def sizes_of(value: ir.Value, sizes: Mapping[str, int]) -> Shape:
    """Return the shape of a graph input with the dynamic axes at `sizes`; a single None if even the rank is unknown."""
    if value.shape is None:
        return (None,)
    return tuple(
        size if isinstance(size, int) else sizes[size.value or axis_name(str(value.name), axis)]
        for axis, size in enumerate(value.shape)
    )


def _to_proto(model: ir.Model, part: Slice, shapes: Mapping[str, Shape]) -> bytes | None:
    """Serialize a slice as a separate model, in which each Shape is a constant for these sizes."""
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


_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_LOGIC = frozenset({"And", "Not", "Or", "Xor"})
_SAME = frozenset({"Abs", "Cast", "Identity", "Neg"})
# Operators that move elements, with the inputs that hold the elements; the other inputs give positions.
_MOVING: dict[str, Sequence[int]] = {
    **dict.fromkeys(("Expand", "Flatten", "Gather", "GatherND", "Reshape", "Slice", "Squeeze"), (0,)),
    **dict.fromkeys(("Transpose", "Trilu", "Unsqueeze"), (0,)),
    "Concat": range(1 << 10),
    "ScatterND": (0, 2),
}
_PLACING = frozenset({"Gather", "GatherND", "ScatterND", "Slice", "Trilu"})  # by numbers, not by a shape alone
_MOST_READS = 2
_MOST_POSITIONS = 2  # in a comparison: i, j, or i - j
_INFINITE = 1e38  # for infinities among the constants, which are known numbers


@dataclass(frozen=True)
class _Elements:
    """Dependencies of the elements of a value.

    Attributes:
        reads: the paths through which they read inputs; one path reads one number per element.
        has_sizes: whether they depend on input sizes.
        varies: whether they depend on their positions other than through the numbers read.
        positions: the sum of the factors of positions in them.
        offset: the largest constant in them; infinite if they may be any number.
    """

    reads: frozenset[object] = frozenset()
    has_sizes: bool = False
    varies: bool = False
    positions: float = 0
    offset: float = 0


class _UnknownError(Exception):
    """The tried sizes would not prove what a slice computes."""


def find_reach(part: Slice, shapes: Shapes) -> int | None:
    """Return the number of positions that determine all values of a slice; None if no number does."""
    following = _Following(part, shapes)
    try:
        for node in part.nodes:
            following.add(node)
        elements = [following.of(value) for value in part.values]
    except _UnknownError:
        return None
    whole = _merged(elements)
    if len(whole.reads) > _MOST_READS or whole.has_sizes or (whole.reads and whole.offset == inf):
        return None
    return None if following.turns_at == inf else 2 * int(following.turns_at) + 3


class _Following:
    """Follow the nodes of a slice.

    Attributes:
        turns_at: the last position at which a comparison changes its result.
    """

    def __init__(self, part: Slice, shapes: Shapes) -> None:
        self._part, self._shapes = part, shapes
        self._known: dict[ir.Value, _Elements] = {}
        self.turns_at = 0.0
        for value in part.inputs:
            is_flag = "mask" in str(value.name) or value.dtype == ir.DataType.BOOL
            self._known[value] = _Elements(frozenset({value}), offset=1 if is_flag else inf)

    def of(self, value: ir.Value) -> _Elements:
        """Return the dependencies of a value; a larger constant is a table, whose end is a boundary."""
        if value in self._known:
            return self._known[value]
        array = constant(value)
        if array is None or array.dtype.kind not in "biuf" or not array.size:
            return _Elements(varies=True)
        offset = 0 if array.size > _MOST_NUMBERS else min(float(np.abs(array.astype(np.float64)).max()), _INFINITE)
        return _Elements(varies=bool((array != array.flat[0]).any()), offset=offset)

    def add(self, node: ir.Node) -> None:
        """Record the dependencies of a node's outputs.

        Raises:
            _UnknownError: the operator is unknown, or reads a disallowed value.
        """
        inputs = [value for value in node.inputs if value is not None]
        if node.domain or len(node.outputs) != 1:
            raise _UnknownError
        if node.op_type == "Shape" and inputs[0] in self._part.sized:
            elements = _Elements(has_sizes=True)
        elif node.op_type == "Constant":
            elements = self.of(node.outputs[0])
        else:
            elements = self._computed(node, inputs, [self.of(value) for value in inputs])
        self._known[node.outputs[0]] = elements

    def _computed(self, node: ir.Node, inputs: Sequence[ir.Value], operands: Sequence[_Elements]) -> _Elements:
        merged, operator = _merged(operands), node.op_type
        if operator in _MOVING:
            return self._moved(node, inputs, operands)
        if operator in ("Range", "ConstantOfShape") and not merged.reads:
            if operator == "ConstantOfShape":
                filled = attribute(node, "value")
                return _Elements(offset=0 if filled is None else min(float(np.abs(filled.numpy()).max()), _INFINITE))
            if not operands[2].has_sizes and operands[2].offset == 1:
                return _Elements(has_sizes=operands[0].has_sizes, varies=True, positions=1, offset=operands[0].offset)
        elif operator in _COMPARISONS:
            return self._compared(operator, inputs, operands)
        elif operator in _LOGIC:
            return replace(merged, positions=0, offset=1)
        elif operator in ("Add", "Sub"):
            offset = inf if merged.has_sizes else sum(operand.offset for operand in operands)
            return replace(merged, positions=sum(operand.positions for operand in operands), offset=offset)
        elif operator == "Mul":
            first, second = operands
            if merged.has_sizes:
                return replace(merged, offset=inf)
            if not (first.positions and second.positions):
                positions = first.positions * second.offset + second.positions * first.offset
                return replace(merged, positions=positions, offset=first.offset * second.offset)
        elif operator == "Where":
            values = _merged(operands[1:])
            return replace(merged, positions=values.positions, offset=values.offset)
        elif operator in ("Max", "Min") and not merged.has_sizes:
            return merged
        elif operator in _SAME:
            is_flag = operator == "Cast" and attribute(node, "to") == ir.DataType.BOOL.value
            if not merged.has_sizes or (operator in ("Cast", "Identity") and not is_flag):
                if is_flag and merged.positions:
                    self._turn(merged.positions, merged.offset)
                return replace(merged, positions=0, offset=1) if is_flag else merged
        raise _UnknownError

    def _compared(self, operator: str, inputs: Sequence[ir.Value], operands: Sequence[_Elements]) -> _Elements:
        merged = _merged(operands)
        constants = [constant(value) for value in inputs]
        if merged.has_sizes:
            # No size is negative, which exporters test with `Equal(shape, -1)`; results of arithmetic on sizes may be.
            if operator == "Equal" and merged.offset < inf and any(a is not None and (a < 0).all() for a in constants):
                return _Elements()
            raise _UnknownError
        if merged.offset == inf:
            if not any(array is not None and (array == 0).all() for array in constants) or merged.positions:
                raise _UnknownError
        elif merged.positions:
            self._turn(sum(operand.positions for operand in operands), sum(operand.offset for operand in operands))
        return replace(merged, positions=0, offset=1)

    def _turn(self, positions: float, offset: float) -> None:
        if positions > _MOST_POSITIONS:
            raise _UnknownError
        self.turns_at = max(self.turns_at, offset)

    def _moved(self, node: ir.Node, inputs: Sequence[ir.Value], operands: Sequence[_Elements]) -> _Elements:
        data = _merged([operand for index, operand in enumerate(operands) if index in _MOVING[node.op_type]])
        placing = [index for index in range(len(operands)) if index not in _MOVING[node.op_type]]
        places = _merged([operands[index] for index in placing])
        if places.reads or not self._keeps_axes(node):
            raise _UnknownError
        label = (node.op_type, str(dict(node.attributes)), *(inputs[index] for index in placing))
        moved = replace(data, reads=frozenset((*label, path) for path in data.reads))
        if node.op_type == "Concat":
            # It changes where a part ends; `_keeps_axes` has checked that all but the last end at a known position.
            sizes = [self._shapes.fixed(value, attribute(node, "axis")) or 0 for value in node.inputs[:-1]]
            self.turns_at = max(self.turns_at, sum(sizes))
            return replace(moved, varies=True, offset=data.offset + sum(sizes) * bool(data.positions))
        if node.op_type not in _PLACING:
            return moved
        if node.op_type == "Slice":
            if any((step := constant(value)) is None or (step != 1).any() for value in inputs[4:5]):
                raise _UnknownError
            placing = [1]
        from_end = any((array := constant(inputs[index])) is not None and (array < 0).any() for index in placing)
        places = _merged([operands[index] for index in placing])
        if node.op_type in ("ScatterND", "Trilu"):
            if places.has_sizes or (from_end and node.op_type == "ScatterND"):
                raise _UnknownError
            moved = replace(moved, varies=True)
        self.turns_at = max(self.turns_at, 0 if places.has_sizes else places.offset)
        if not moved.varies:
            return moved
        positions = moved.positions * max(1, places.positions) if places.varies else moved.positions
        has_sizes = moved.has_sizes or places.has_sizes or (from_end and node.op_type != "Trilu")
        return replace(moved, positions=positions, offset=moved.offset + places.offset, has_sizes=has_sizes)

    def _keeps_axes(self, node: ir.Node) -> bool:
        """Whether axes stay whole, and concatenated parts have the same position at all sizes."""
        if node.op_type == "Concat":
            axis = attribute(node, "axis")
            return all(self._shapes.fixed(value, axis) is not None for value in node.inputs[:-1])
        if node.op_type not in ("Reshape", "Flatten"):
            return True
        pair = [self._shapes.prime_shape(value) for value in (node.inputs[0], node.outputs[0])]
        ends = [{*np.cumprod(shape).tolist()} - {1} for shape in pair if shape]
        return len(ends) == 2 and (ends[0] <= ends[1] or ends[1] <= ends[0])


def _merged(operands: Sequence[_Elements]) -> _Elements:
    return _Elements(
        frozenset().union(*(operand.reads for operand in operands)),
        any(operand.has_sizes for operand in operands),
        any(operand.varies for operand in operands),
        max((operand.positions for operand in operands), default=0),
        max((operand.offset for operand in operands), default=0),
    )
