"""Find the tensors of a graph whose rows are the vocabulary, and cut them.

They are found by data flow: from the ids to the tables that look them up, and from outputs over the vocabulary back to
their weights. Operators that are not known here are refused, and a tensor that merely has as many rows is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.checkpoint.vocabulary import renumbering
from onnxtool.errors import PassError
from onnxtool.graph.edit import attribute, constant, drop_unused, producer, reduced_axes, required, tensor_of
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer

IDS = "input_ids"
_MOVE = frozenset(("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
_IGNORE = frozenset(("Shape", "Size", "ArgMax"))  # the order of ids does not change
_ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "Cast", "Clip", "Div", "Equal", "Erf", "Exp", "Gelu", "Greater", "GreaterOrEqual", "Identity"),
        *("Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not", "Pow", "Relu", "Sigmoid", "Softplus"),
        *("Sqrt", "Sub", "Tanh", "Where"),
    )
)
# Operators that look up ids: the place of the ids, and those of the tables and of what belongs to their rows.
_LOOKUPS: dict[str, tuple[int, tuple[int, ...]]] = {
    "Gather": (1, (0,)),
    "com.microsoft::GatherBlockQuantized": (1, (0, 2, 3)),
    "com.microsoft::EmbedLayerNormalization": (0, (2,)),
}
_PRODUCTS = ("MatMul", "Gemm", "com.microsoft::FusedMatMul")
_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum")
_SHAPED = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}  # the place of the shape
_INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


class VocabularyRows:
    """The axes of a graph that are its vocabulary.

    Attributes:
        axes: by value, the axis, from the end (-1 is the last), and its size.
        compared: the ids that the graph compares its input with, or takes from such an axis.
    """

    def __init__(self, model: ir.Model, outputs: Collection[str]) -> None:
        """Follow the ids, and the outputs in `outputs`, whose last axis is the vocabulary.

        Raises:
            PassError: there are no ids, or an operator that is not known here reads them, or such an axis.
        """
        self._graph, self._shapes = model.graph, find_shapes(model)
        self.axes: dict[ir.Value, tuple[int, int]] = {}
        self.compared: set[int] = set()
        self._constants: dict[tuple[ir.Node, int], bool] = {}  # inputs that hold ids, or end in the number of rows
        self._ids = [value for value in model.graph.inputs if value.name == IDS]
        if not self._ids:
            raise PassError(f"the graph has no input {IDS}", "leave --vocabulary out")
        self._waiting: list[ir.Value] = []
        for value in self._ids:  # which grows
            for node, place in value.uses():
                self._read_ids(node, place)
        for output in model.graph.outputs:
            if output.name in outputs:
                self._mark(output, -1)
        while self._waiting:
            value = self._waiting.pop()
            for node in filter(None, (value.producer(), *(use.node for use in value.uses()))):
                for other, axis in self._related(node, value, *self.axes[value]):
                    self._mark(other, axis, self.axes[value][1])

        if not self.tables:
            raise PassError("no weight of the graph has a row for each token", "leave --vocabulary out")

    @property
    def tables(self) -> list[ir.Value]:
        """The weights to cut."""
        return [value for value in self.axes if value.is_initializer()]

    def bytes_beyond(self, num_kept: int) -> int:
        """Return the bytes of the rows that go if this many stay."""
        tables = ((tensor_of(table).nbytes, self.axes[table][1]) for table in self.tables)
        return sum(num_bytes // size * (size - num_kept) for num_bytes, size in tables)

    def cut(self, kept_ids: NDArray[np.int64]) -> None:
        """Keep the rows `kept_ids`, ascending, and renumber the ids in the graph.

        Raises:
            PassError: a weight has fewer rows, or the graph looks up an id that no token has.
        """
        new = renumbering(kept_ids)
        for value, (axis, size) in self.axes.items():
            if size <= kept_ids[-1]:
                raise PassError(f"{value.name} has {size} rows, and the tokenizer the id {kept_ids[-1]}")
            if value.is_initializer():
                tensor = tensor_of(value)
                rows = np.ascontiguousarray(np.take(tensor.numpy(), kept_ids, axis))
                value.const_value = ir.tensor(rows, dtype=tensor.dtype, name=value.name)
            if value.shape is not None:
                place = axis + len(value.shape)
                value.shape = ir.Shape([*value.shape[:place], len(kept_ids), *value.shape[place + 1 :]])
        for (node, place), is_id in self._constants.items():
            old, array = node.inputs[place], self._constant(node, place).copy()
            flat = array.reshape(-1)
            numbers = [new(int(number)) for number in flat] if is_id else [*flat[:-1], len(kept_ids)]
            if None in numbers and node.op_type != "Equal":
                self._refuse(node)
            flat[:] = [-1 if number is None else number for number in numbers]  # which no id equals
            node.replace_input_with(place, Writer(node).constant(array, f"{node.name}.vocabulary"))
            drop_unused([old] if old is not None and old.is_initializer() else [])

    def _read_ids(self, node: ir.Node, place: int) -> None:
        """Follow ids into a node."""
        kind = self._kind(node)
        casts = kind == "Cast" and attribute(node, "to") not in _INTEGERS
        if kind in _IGNORE:
            return
        if kind in _LOOKUPS and place == _LOOKUPS[kind][0] and not attribute(node, "axis", 0):
            for table in (node.inputs[lookup] for lookup in _LOOKUPS[kind][1] if lookup < len(node.inputs)):
                if table is not None:
                    self._mark(table, -self._rank(node, table))
        elif kind == "ScatterElements" and place == 1:
            self._mark(node.outputs[0], self._axis(node, node.outputs[0]))
        elif place == 0 and (kind in _MOVE or kind == "Gather") and not casts:
            self._ids += [output for output in node.outputs if output not in self._ids]
        elif kind == "Equal" or (kind == "Where" and place):
            other = (1 - place) if kind == "Equal" else 3 - place
            if node.inputs[other] not in self._ids:
                self._keep(node, other)
            if kind == "Where":
                self._ids += [output for output in node.outputs if output not in self._ids]
        else:
            self._refuse(node)

    def _keep(self, node: ir.Node, place: int) -> None:
        """Note that an input holds ids."""
        self.compared.update(map(int, self._constant(node, place).reshape(-1)))
        self._constants[node, place] = True

    def _constant(self, node: ir.Node, place: int) -> NDArray[Any]:
        array = constant(node.inputs[place])
        return self._refuse(node) if array is None else array

    def _mark(self, value: ir.Value, axis: int, size: int | None = None) -> None:
        """Note that an axis of a value is the vocabulary."""
        fixed = self._shapes.fixed(value, axis)
        size = fixed if size is None else size
        is_known = self.axes.get(value, (axis, size)) == (axis, size) and not value.is_graph_input()
        if size is None or fixed not in (None, size) or not is_known:
            raise PassError(f"the size of the vocabulary in {value.name} is not clear", "leave --vocabulary out")
        if value not in self.axes:
            self.axes[value] = axis, size
            self._waiting.append(value)

    def _alike(self, values: Iterable[ir.Value | None], axis: int) -> list[tuple[ir.Value, int]]:
        """Return those of `values` that have the axis, and do not broadcast along it."""
        candidates = [value for value in values if value is not None and self._shapes.fixed(value, axis) != 1]
        ranks = map(self._shapes.rank, candidates)
        return [(value, axis) for value, rank in zip(candidates, ranks, strict=True) if rank is None or rank >= -axis]

    def _related(self, node: ir.Node, value: ir.Value, axis: int, size: int) -> list[tuple[ir.Value, int]]:
        """Return the inputs and outputs of a node, and their axes, that are the vocabulary if `axis` of `value` is."""
        kind, output, inputs = self._kind(node), node.outputs[0], list(node.inputs)
        if kind in ("Shape", "Size") or (kind in _LOOKUPS and self._looks_up(node, value, axis)):
            return []
        if kind in _ELEMENTWISE:
            return self._alike((*inputs, output), axis)
        if kind in _PRODUCTS and value is not inputs[0] and not attribute(node, "transBatchB", 0):
            weight = -2 if attribute(node, "transB", 0) else -1
            if axis == (weight if value is inputs[1] else -1):
                return [(required(node, 1), weight), (output, -1), *self._alike(inputs[2:], -1)]
        if kind == "Transpose":
            order = attribute(node, "perm") or [*reversed(range(self._rank(node, inputs[0])))]
            place = axis + len(order)
            if value is output:
                return [(required(node, 0), order[place] - len(order))]
            return [(output, order.index(place) - len(order))]
        if kind in _SHAPED and axis == -1:
            self._resize(node, _SHAPED[kind], size)
            return self._alike((*inputs[: _SHAPED[kind]], output), -1)
        if kind in _REDUCTIONS and axis == -1 and self._keeps_last(node):
            return [(required(node, 0), -1), (output, -1)]
        if kind == "ScatterElements" and inputs[1] in self._ids and self._axis(node, output) == axis:
            return [(required(node, 0), axis), (output, axis)]
        if kind == "DequantizeLinear" and all(self._shapes.rank(operand) in (0, 1) for operand in inputs[1:]):
            steps = self._alike(inputs[1:], -1) if self._axis(node, output, 1) == axis else []
            return [(required(node, 0), axis), (output, axis), *steps] if value not in inputs[1:] else []
        return self._refuse(node)

    def _keeps_last(self, node: ir.Node) -> bool:
        """Return whether a reduction leaves the last axis alone."""
        return {-1, self._rank(node, node.inputs[0]) - 1}.isdisjoint(reduced_axes(node) or [-1])

    def _looks_up(self, node: ir.Node, value: ir.Value, axis: int) -> bool:
        """Return whether a node takes rows of `value` by ids; note ids that are constants."""
        place, tables = _LOOKUPS[self._kind(node)]
        if value not in [node.inputs[index] for index in tables if index < len(node.inputs)]:
            return False
        if node.inputs[place] not in self._ids:
            if self._kind(node) != "Gather" or self._axis(node, value) != axis:
                self._refuse(node)
            self._keep(node, place)
        return True

    def _resize(self, node: ir.Node, place: int, size: int) -> None:
        """Note the constant that ends a shape, unless the size is computed."""
        shape = node.inputs[place]
        joined = producer(shape, "Concat")
        if joined is not None:
            node, place = joined, len(joined.inputs) - 1
        elif producer(shape, "Shape") is not None:
            return
        last = int(self._constant(node, place).reshape(-1)[-1])
        if last not in (size, -1):
            self._refuse(node)
        if last == size:
            self._constants[node, place] = False

    def _rank(self, node: ir.Node, value: ir.Value | None) -> int:
        rank = self._shapes.rank(value)
        return self._refuse(node) if rank is None else rank

    def _axis(self, node: ir.Node, value: ir.Value, default: int = 0) -> int:
        """Return the axis of a node, from the end."""
        axis: int = attribute(node, "axis", default)
        return axis if axis < 0 else axis - self._rank(node, value)

    def _kind(self, node: ir.Node) -> str:
        if node.graph is not self._graph:
            self._refuse(node)
        return f"{node.domain}::{node.op_type}" if node.domain else node.op_type

    def _refuse(self, node: ir.Node) -> NoReturn:
        name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        raise PassError(
            f"the vocabulary cannot be cut: {name} (node {node.name}) reads ids or an axis of tokens in a way that is "
            "not known",
            "pass a plain export (onnxtool export): --vocabulary cuts it before it is fused and quantized",
        )
