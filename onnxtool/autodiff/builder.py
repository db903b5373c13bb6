"""Expressions over graph values, so that a gradient can be written as its formula.

Every expression is written only once: the same operator on the same values with the same attributes returns the
existing value, and so does an equal constant. Rules therefore need not share common subexpressions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike

from onnxtool.graph.writer import UniqueNames, Writer

Dimension: TypeAlias = "int | str | None"
Attribute: TypeAlias = "int | float | str | Sequence[int]"
Operand: TypeAlias = "Tensor | float"

_BOOLEAN = frozenset(("And", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Not", "Or"))
_INTEGER = frozenset(("NonZero", "Shape", "Size"))
_DTYPE_FROM = {"OneHot": 2, "Where": 1}  # index of the input that has the output's dtype, if it is not the first


class UnknownDtypeError(Exception):
    """The dtype of a value in an expression cannot be inferred."""


def _binary(op_type: str, *, swapped: bool = False) -> Callable[[Tensor, Operand], Tensor]:
    """Return a Tensor method that applies a binary operator."""

    def apply(tensor: Tensor, other: Operand) -> Tensor:
        build = tensor._builder  # noqa: SLF001 - this becomes a method of Tensor
        operand = other if isinstance(other, Tensor) else build.constant(other, tensor.dtype)
        return build.op(op_type, *((operand, tensor) if swapped else (tensor, operand)))

    return apply


class Tensor:
    """A value of a graph; Python operators on it add nodes, and numbers become constants of its dtype."""

    __slots__ = ("_builder", "value")

    def __init__(self, builder: Builder, value: ir.Value) -> None:
        self._builder = builder
        self.value = value

    @property
    def shape(self) -> tuple[Dimension, ...] | None:
        """The sizes of its axes, dynamic axes by name or None; None if even the rank is unknown."""
        shape = self.value.shape
        return None if shape is None else tuple(size if isinstance(size, int) else size.value for size in shape)

    @property
    def dtype(self) -> ir.DataType:
        """The element type.

        Raises:
            UnknownDtypeError: type inference did not determine it.
        """
        if self.value.dtype is None:
            raise UnknownDtypeError(f"the dtype of {self.value.name} cannot be inferred")
        return self.value.dtype

    __add__ = __radd__ = _binary("Add")
    __mul__ = __rmul__ = _binary("Mul")
    __sub__ = _binary("Sub")
    __rsub__ = _binary("Sub", swapped=True)
    __truediv__ = _binary("Div")
    __rtruediv__ = _binary("Div", swapped=True)
    __pow__ = _binary("Pow")
    __matmul__ = _binary("MatMul")
    __gt__ = _binary("Greater")
    __lt__ = _binary("Less")
    equals = _binary("Equal")  # `==` compares the Python objects

    def __neg__(self) -> Tensor:
        return self._builder.op("Neg", self)

    def cast(self, dtype: ir.DataType) -> Tensor:
        """Convert the elements if they have another type."""
        return self if self.dtype == dtype else self._builder.op("Cast", self, to=int(dtype))

    def size(self) -> Tensor:
        """Return the shape as int64 [rank]."""
        return self._builder.op("Shape", self)

    def reshape(self, shape: Tensor | Sequence[int]) -> Tensor:
        """Change the shape; -1 is inferred, 0 keeps the size."""
        return self._builder.op("Reshape", self, self._builder.axes(shape))

    def expand(self, shape: Tensor | Sequence[int]) -> Tensor:
        """Broadcast to `shape`."""
        return self._builder.op("Expand", self, self._builder.axes(shape))

    def transpose(self, permutation: Sequence[int]) -> Tensor:
        """Reorder the axes; no node is added if the order stays the same."""
        if list(permutation) == list(range(len(permutation))):
            return self
        return self._builder.op("Transpose", self, perm=list(permutation))

    def sum(self, axes: Tensor | Sequence[int], *, keepdims: bool = True) -> Tensor:
        """Sum over `axes`; an empty list sums over none."""
        if not isinstance(axes, Tensor) and not axes:
            return self
        return self._builder.op("ReduceSum", self, self._builder.axes(axes), keepdims=int(keepdims))

    def mean(self, axes: Tensor | Sequence[int], *, keepdims: bool = True) -> Tensor:
        """Average over `axes`, which must not be empty."""
        return self._builder.op("ReduceMean", self, self._builder.axes(axes), keepdims=int(keepdims))

    def slice(self, start: int, end: int, axis: int = 0) -> Tensor:
        """Slice one axis to [start, end)."""
        bounds = [self._builder.axes([number]) for number in (start, end, axis)]
        return self._builder.op("Slice", self, *bounds)


class Builder:
    """Writes nodes and constants for a graph; `finish` inserts them into the graph.

    Args:
        graph: the graph whose values expressions refer to.
        names: unique names for nodes and values; by default, names unused in the graph.
    """

    def __init__(self, graph: ir.Graph, *, names: UniqueNames | None = None) -> None:
        self._graph = graph
        self.names = names or UniqueNames(graph, "gradient")
        self._writer = Writer(naming=self.names)
        self._made: dict[object, tuple[Tensor, ...]] = {}

    def tensor(self, value: ir.Value) -> Tensor:
        """Wrap a value of the graph."""
        return Tensor(self, value)

    def op(self, op_type: str, *inputs: Tensor | None, **attributes: Attribute) -> Tensor:
        """Apply a standard operator with one output, whose dtype follows from its inputs."""
        return self.ops(op_type, *inputs, outputs=1, **attributes)[0]

    def ops(self, op_type: str, *inputs: Tensor | None, outputs: int, **attributes: Attribute) -> tuple[Tensor, ...]:
        """Apply a standard operator with several outputs, all of the same dtype."""
        values = [None if tensor is None else tensor.value for tensor in inputs]
        key = (op_type, outputs, *map(id, values), repr(sorted(attributes.items())))
        if key not in self._made:
            node = ir.node(op_type, values, attributes, num_outputs=outputs)
            self._made[key] = self.add(node, [_dtype(op_type, inputs, attributes)] * outputs)
        return self._made[key]

    def constant(self, numbers: ArrayLike, dtype: ir.DataType) -> Tensor:
        """Return an initializer with these elements."""
        tensor = ir.Tensor(np.asarray(numbers).astype(dtype.numpy()), dtype=dtype)
        return self.tensor(self._writer.shared_constant(tensor, lambda: self.names.new("constant")))

    def axes(self, numbers: Tensor | Sequence[int]) -> Tensor:
        """Convert a list of axes or sizes to int64 [N]."""
        return numbers if isinstance(numbers, Tensor) else self.constant(list(numbers), ir.DataType.INT64)

    def concat(self, *pieces: Tensor | Sequence[int]) -> Tensor:
        """Concatenate lists of axes or sizes, int64 [N]."""
        return self.op("Concat", *map(self.axes, pieces), axis=0)

    def zeros(self, shape: Tensor | Sequence[int], dtype: ir.DataType) -> Tensor:
        """Return zeros with a shape that is known only at run time."""
        return self.constant(0.0, dtype).expand(shape)

    def where(self, condition: Tensor, positive: Operand, negative: Operand) -> Tensor:
        """Select elementwise; at least one operand is a tensor, and a number becomes a constant of its dtype."""
        dtypes = [operand.dtype for operand in (positive, negative) if isinstance(operand, Tensor)]
        chosen = [
            operand if isinstance(operand, Tensor) else self.constant(operand, dtypes[0])
            for operand in (positive, negative)
        ]
        return self.op("Where", condition, *chosen)

    def add_along(
        self, pieces: Tensor, positions: Tensor, *, axis: int, rank: int, size: Tensor, unique: bool = False
    ) -> Tensor:
        """Return zeros with `pieces`, [..., P, ...], added at `positions`, int64 [P], along one axis.

        The axis has size `size`, int64 [1], in the result. `unique` means that all positions differ.
        """
        old = pieces.size()
        before = [old.slice(0, axis)] if axis else []
        after = [old.slice(axis + 1, rank)] if axis + 1 < rank else []
        shape = self.concat(*before, size, *after)
        places = positions.reshape([-1 if place == axis else 1 for place in range(rank)]).expand(old)
        zeros = self.zeros(shape, pieces.dtype)
        reduction = "none" if unique else "add"
        return self.op("ScatterElements", zeros, places, pieces, axis=axis, reduction=reduction)

    def once(self, key: object, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the tensors stored under `key`, creating them the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the same elements as a separate value, a new one for each call."""
        return self.add(ir.node("Identity", [tensor.value]), [tensor.dtype])[0]

    def add(self, node: ir.Node, dtypes: Sequence[ir.DataType]) -> tuple[Tensor, ...]:
        """Add a node whose outputs have these dtypes, and return them."""
        outputs = self._writer.add(node)
        for value, dtype in zip(outputs, dtypes, strict=True):
            value.dtype = dtype
        return tuple(self.tensor(value) for value in outputs)

    def finish(self, replaced: Mapping[ir.Node, Sequence[Tensor]] | None = None) -> None:
        """Insert everything into the graph, with the new nodes after the existing ones.

        Args:
            replaced: graph nodes to remove, with replacements for their outputs.
        """
        # A graph output keeps its name.
        copied = {
            node: [
                self.copy(new) if old.is_graph_output() else new for old, new in zip(node.outputs, news, strict=True)
            ]
            for node, news in (replaced or {}).items()
        }
        for constant in self._writer.initializers.values():
            self._graph.register_initializer(constant)
        self._graph.extend(self._writer.nodes)
        for node, news in copied.items():
            for old, new in zip(node.outputs, news, strict=True):
                if old.is_graph_output():
                    old.name, new.value.name = None, old.name
                    new.value.shape = old.shape
                ir.convenience.replace_all_uses_with(old, new.value, replace_graph_outputs=True)
            self._graph.remove(node, safe=True)
        if copied:
            self._graph.sort()


def _dtype(op_type: str, inputs: Sequence[Tensor | None], attributes: dict[str, Attribute]) -> ir.DataType:
    if op_type in _BOOLEAN:
        return ir.DataType.BOOL
    if op_type in _INTEGER:
        return ir.DataType.INT64
    if op_type == "Cast" and isinstance(to := attributes["to"], int):
        return ir.DataType(to)
    present = [tensor for tensor in inputs if tensor is not None]
    return present[_DTYPE_FROM.get(op_type, 0)].dtype


def sum_to(build: Builder, gradient: Tensor, *, of: Tensor, to: Tensor) -> Tensor:
    """Sum `gradient`, which has the shape of `of`, down to the shape of `to`, which broadcasts to it.

    If the shapes show which axes were repeated, this is a single ReduceSum, or nothing; otherwise the axes are computed
    at run time.
    """
    if of.value is to.value:
        return gradient
    axes = repeated_axes(of.shape, to.shape)
    if axes is None or of.shape is None or to.shape is None:
        return sum_at_run_time(build, gradient, of=of.size(), to=to.size())
    added = len(of.shape) - len(to.shape)
    if set(axes) == set(range(added)):
        return gradient.sum(axes, keepdims=False)
    summed = gradient.sum(axes)
    return summed if added == 0 else build.op("Squeeze", summed, build.axes(range(added)))


def repeated_axes(of: Sequence[Dimension] | None, to: Sequence[Dimension] | None) -> list[int] | None:
    """Return the axes of `of` along which `to` was repeated; None if the shapes do not tell."""
    if of is None or to is None:
        return None
    added = len(of) - len(to)
    axes = list(range(added))
    for axis, (whole, part) in enumerate(zip(of[added:], to, strict=True), added):
        if part == 1 and whole != 1:
            axes.append(axis)
        elif not (isinstance(part, int) or (part is not None and part == whole)):
            return None  # a dynamic size that may be 1 at run time
    return axes


def sum_at_run_time(build: Builder, gradient: Tensor, *, of: Tensor, to: Tensor) -> Tensor:
    """Sum a gradient of shape `of` down to shape `to`; both shapes are int64 [rank] and computed by the graph."""
    added = build.op("Sub", build.op("Size", of), build.op("Size", to)).reshape([1])
    aligned = build.concat(build.axes([1]).expand(added), to)
    repeated = build.op("Not", aligned.equals(of))
    axes = build.op("Squeeze", build.op("NonZero", repeated), build.axes([0]))
    return build.op("ReduceSum", gradient, axes, keepdims=1, noop_with_empty_axes=1).reshape(to)
