"""Infer a graph's shapes for all input sizes at once, with sizes as polynomials in the dynamic axes.

onnx is asked for what it can infer from names; what operators compute with sizes is here: arithmetic on elements, and
the shapes that Reshape, Slice and similar operators make from it. What depends on more than sizes stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxtool.graph.elements import BROADCASTING, Scope, attributes_of, is_small, reads_of
from onnxtool.graph.inference import MAX_ELEMENTS, Inference
from onnxtool.graph.operators import Size, Value
from onnxtool.graph.sizes import Sizes

Elements = NDArray[Any]  # dtype object: numbers, names, and None for unknown elements
_INT32, _INT64, _BOOL = 6, 7, 9
_TO_THE_END = 1 << 31  # or more: how exporters write the end of a Slice
# Output shapes of these follow only from the shapes and known elements that they read.
_OF_SHAPES = frozenset(
    {"AveragePool", "Conv", "ConvTranspose", "DepthToSpace", "LpPool", "MaxPool", "SpaceToDepth", "Split"}
)
_ELEMENTWISE = BROADCASTING | {"BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mean", "PRelu", "Sum"}


class SymbolicInference(Inference):
    """Follows a model whose dynamic axes are names.

    Args:
        model: the model with its small initializers; large ones may be inputs.
        sizes: knows the axes; all other sizes are added to it.
    """

    def __init__(self, model: onnx.ModelProto, sizes: Sizes) -> None:
        super().__init__(model)
        self._sizes = sizes
        self._rules: Mapping[str, Callable[[onnx.NodeProto, Scope], Sequence[Sequence[Size]] | None]] = {
            "AveragePool": self._windows,
            "Concat": self._concat,
            "Conv": self._windows,
            "ConstantOfShape": self._filled,
            "Expand": self._expand,
            "Flatten": self._flatten,
            "LpPool": self._windows,
            "MatMul": self._matmul,
            "MaxPool": self._windows,
            "Pad": self._pad,
            "Range": self._range,
            "Reshape": self._reshape,
            "Resize": self._resize,
            "Slice": self._slice,
            "Split": self._split,
            "Tile": self._tile,
        }

    def _enter(self, node: onnx.NodeProto, scope: Scope, depth: int) -> Sequence[Value | None]:
        before, self._sizes.is_certain = self._sizes.is_certain, False
        try:
            return super()._enter(node, scope, depth)
        finally:
            self._sizes.is_certain = before

    def _infer(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value | onnx.TypeProto | None]:
        elements = None if node.domain else self._elements(node, scope)
        outputs = list(super()._infer(node, scope))
        if elements is not None and node.output[0] not in scope.numbers and outputs:
            outputs[0] = self._keep(node, elements, outputs[0], scope)
            return outputs
        if node.domain:
            return outputs
        rule = self._rules.get(node.op_type, self._broadcast if node.op_type in _ELEMENTWISE else None)
        shapes = None if rule is None else rule(node, scope)
        for index, value in enumerate(outputs):
            if isinstance(value, Value):
                outputs[index] = self._better(node, scope, index, value, shapes)
        return outputs

    def _better(
        self, node: onnx.NodeProto, scope: Scope, index: int, value: Value, shapes: Sequence[Sequence[Size]] | None
    ) -> Value:
        """Return an output's type, improved by what a rule knows, with names for sizes that follow from shapes."""
        if shapes is not None and index < len(shapes):
            value = Value(tuple(shapes[index]), value.dtype)
        if value.shape is None or None not in value.shape or node.op_type not in _OF_SHAPES:
            return value
        key = self._key(node, scope)
        named = (
            self._sizes.name((key, index, axis)) if size is None and key is not None else size
            for axis, size in enumerate(value.shape)
        )
        return Value(tuple(named), value.dtype)

    def _key(self, node: onnx.NodeProto, scope: Scope) -> Any:
        """Return everything that determines the output shapes; None if part of it is unknown."""
        known: list[Any] = [node.op_type, *sorted(attribute.SerializeToString() for attribute in node.attribute)]
        for name in reads_of(node):
            value = scope.values.get(name)
            if value is None or value.shape is None or None in value.shape:
                return None
            known.append(value.shape)
            if value.dtype in (_INT32, _INT64):  # for example, the lengths of a Split
                elements = self._known(name, scope)
                if elements is None or None in elements.reshape(-1).tolist():
                    return None
                known.append(tuple(elements.reshape(-1).tolist()))
        return tuple(known)

    def _known(self, name: str, scope: Scope) -> Elements | None:
        """Return the elements of a value; some may be None."""
        if name in scope.numbers:
            return scope.numbers[name].astype(object)
        return scope.sizes.get(name)

    def _keep(self, node: onnx.NodeProto, elements: Elements, value: Any, scope: Scope) -> Value:
        """Record the elements that `node` computes, and return the shape and dtype of its output."""
        dtype = value.dtype if isinstance(value, Value) and value.dtype else _INT64
        if all(isinstance(element, int) for element in elements.flat):
            numpy_dtype = onnx.helper.tensor_dtype_to_np_dtype(dtype)
            scope.keep(node.output[0], elements.astype(numpy_dtype))
            return scope.values[node.output[0]]
        scope.sizes[node.output[0]] = elements
        return Value(elements.shape, dtype)

    # Elements: computations on sizes.

    def _elements(self, node: onnx.NodeProto, scope: Scope) -> Elements | None:
        """Return the elements a node computes from sizes; None if it does something else."""
        if len(node.output) != 1 or not (reads := reads_of(node)):
            return None
        if node.op_type == "Size":
            dims = self._dims(node, scope)
            return None if dims is None else np.array(self._sizes.times(*dims), object)
        known_arrays = [self._known(name, scope) for name in reads]
        if not any(name in scope.sizes for name in reads) or any(array is None for array in known_arrays):
            return None
        operands = [array for array in known_arrays if array is not None]
        compute = self._operators().get(node.op_type)
        if compute is not None:
            shape = np.broadcast_shapes(*(operand.shape for operand in operands))
            if not is_small(shape, MAX_ELEMENTS):
                return None
            return np.asarray(np.frompyfunc(compute, len(operands), 1)(*operands), object)
        if node.op_type == "Cast":
            cast = self._casts().get(attributes_of(node).get("to", 0))
            return None if cast is None else np.asarray(np.frompyfunc(_known_only(cast), 1, 1)(operands[0]), object)
        if node.op_type in ("ReduceProd", "ReduceSum") and operands[0].ndim == 1 and operands[-1].size:
            combine = self._sizes.times if node.op_type == "ReduceProd" else self._sizes.plus
            known = [element for element in operands[0] if element is not None]
            if len(known) < operands[0].size:
                return None
            keeps = attributes_of(node).get("keepdims", 1)
            return np.array([combine(*known)] if keeps else combine(*known), object)
        return None

    def _casts(self) -> Mapping[int, Callable[[int | str], Any]]:
        return {
            **dict.fromkeys((_INT32, _INT64), lambda size: size if isinstance(size, str) else int(size)),
            _BOOL: lambda size: _not(self._equal(size, 0)),
        }

    def _operators(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "Add": _known_only(self._sizes.plus),
            "Sub": _known_only(self._sizes.minus),
            "Mul": _known_only(self._sizes.times),
            "Sign": _known_only(self._sign),
            "Neg": _known_only(lambda size: self._sizes.times(size, -1)),
            "Div": _known_only(self._divide),
            "Mod": _known_only(self._remainder),
            "Min": _known_only(lambda *sizes: reduce(self._smaller, sizes)),
            "Max": _known_only(lambda *sizes: reduce(self._larger, sizes)),
            "Equal": _known_only(self._equal),
            "Less": _known_only(self._less),
            "Greater": _known_only(lambda first, second: self._less(second, first)),
            "LessOrEqual": _known_only(lambda first, second: _not(self._less(second, first))),
            "GreaterOrEqual": _known_only(lambda first, second: _not(self._less(first, second))),
            "Not": _not,
            "And": lambda first, second: (
                False if False in (first, second) else None if None in (first, second) else True
            ),
            "Or": lambda first, second: True if True in (first, second) else None if None in (first, second) else False,
            "Where": _chosen,
        }

    def _divide(self, dividend: int | str, divisor: int | str) -> int | str | None:
        if divisor == 0:
            return None
        exact = self._sizes.quotient([dividend], [divisor])
        if exact is None:
            self._sizes.note_turn(dividend, divisor)
        signed = not all(self._sizes.is_at_least(size, 0) for size in (dividend, divisor))
        return self._sizes.name(("Div", dividend, divisor), signed=signed) if exact is None else exact

    def _remainder(self, dividend: int | str, divisor: int | str) -> int | str | None:
        if divisor == 0:
            return None
        if self._sizes.quotient([dividend], [divisor]) is not None:
            return 0
        self._sizes.note_turn(dividend, divisor)
        signed = not (self._sizes.is_at_least(dividend, 0) and self._sizes.is_larger(divisor, 0))
        return self._sizes.name(("Mod", dividend, divisor), signed=signed)

    def _smaller(self, first: int | str, other: int | str) -> int | str:
        for smaller, larger in ((first, other), (other, first)):
            if self._sizes.is_at_least(larger, smaller):
                return smaller
        self._sizes.note_turn(first, other)
        bounds = (first, other)
        signed = not all(self._sizes.is_at_least(size, 0) for size in bounds)
        return self._sizes.name(("Min", *sorted(bounds, key=str)), signed=signed, bounds=bounds)

    def _larger(self, first: int | str, other: int | str) -> int | str:
        for larger, smaller in ((first, other), (other, first)):
            if self._sizes.is_at_least(larger, smaller):
                return larger
        self._sizes.note_turn(first, other)
        signed = not any(self._sizes.is_at_least(size, 0) for size in (first, other))
        return self._sizes.name(("Max", *sorted((first, other), key=str)), signed=signed)

    def _sign(self, size: int | str) -> int | None:
        """Return 1 for any non-empty axis; exporters query it for Python's floor division."""
        if isinstance(size, int):
            return (size > 0) - (size < 0)
        return 1 if self._sizes.is_at_least(size, 1, least=1) else None

    def _equal(self, size: int | str, other: int | str) -> bool | None:
        """Return whether two sizes are equal; None if that depends on the input sizes."""
        if size == other:
            return True
        if self._sizes.is_larger(size, other) or self._sizes.is_larger(other, size):
            return False
        self._sizes.note_turn(size, other)
        return None

    def _less(self, size: int | str, other: int | str) -> bool | None:
        """Return whether a size is below another one; None if that depends on the input sizes."""
        if self._sizes.is_larger(other, size):
            return True
        if self._sizes.is_at_least(size, other):
            return False
        self._sizes.note_turn(size, other)
        return None

    # Shapes: what operators make from sizes.

    def _dims(self, node: onnx.NodeProto, scope: Scope, index: int = 0) -> list[int | str] | None:
        """Return the sizes of an input; None if any is unknown."""
        value = scope.values.get(node.input[index]) if index < len(node.input) else None
        if value is None or value.shape is None:
            return None
        dims = [size for size in value.shape if size is not None]
        return dims if len(dims) == len(value.shape) else None

    def _list(self, node: onnx.NodeProto, scope: Scope, index: int, attribute: str = "") -> list[Any] | None:
        """Return the elements of an input, or of an attribute in older opsets; None if unknown."""
        name = node.input[index] if index < len(node.input) else ""
        if not name:
            values = attributes_of(node).get(attribute)
            return None if values is None else list(values)
        elements = self._known(name, scope)
        return None if elements is None else elements.reshape(-1).tolist()

    def _sized(self, elements: Sequence[Any] | None) -> list[Size] | None:
        """Return elements as axis sizes; an element that could be below 0 becomes unknown."""
        return None if elements is None else [self._length(element) for element in elements]

    def _length(self, element: Any) -> Size:
        """Return an element as an axis size; None if it is unknown or could be below 0."""
        is_known = isinstance(element, (int, str)) and self._sizes.is_at_least(element, 0, least=1)
        return element if is_known else None

    def _broadcast(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        shapes = [scope.values[name].shape if name in scope.values else None for name in reads_of(node)]
        result: list[Size] = []
        for shape in shapes:
            if shape is None:
                return None
            result = self._broadcast_shapes(result, shape)
        return [result]

    def _broadcast_shapes(self, first: Sequence[Size], second: Sequence[Size]) -> list[Size]:
        rank = max(len(first), len(second))
        left, right = ((*[1] * (rank - len(side)), *side) for side in (first, second))
        return [self._sizes.broadcast(*pair) for pair in zip(left, right, strict=True)]

    def _expand(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        value, target = scope.values.get(node.input[0]), self._sized(self._list(node, scope, 1))
        if value is None or value.shape is None or target is None:
            return None
        return [self._broadcast_shapes(value.shape, target)]

    def _matmul(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        shapes = [scope.values[name].shape if name in scope.values else None for name in node.input]
        if shapes[0] is None or shapes[1] is None or min(len(shapes[0]), len(shapes[1])) < 2:
            return None
        return [[*self._broadcast_shapes(shapes[0][:-2], shapes[1][:-2]), shapes[0][-2], shapes[1][-1]]]

    def _windows(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        """Infer a convolution or pooling, which turns L into (L + pads - kernel) // stride + 1."""
        dims, attributes = self._dims(node, scope), attributes_of(node)
        weight = self._dims(node, scope, 1) if node.op_type == "Conv" else None
        kernel = attributes.get("kernel_shape") or (weight or [])[2:]
        rank = len(kernel)
        if dims is None or len(dims) != rank + 2 or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
            return None
        pads, strides = attributes.get("pads", [0] * 2 * rank), attributes.get("strides", [1] * rank)
        dilations = attributes.get("dilations", [1] * rank)
        if attributes.get("ceil_mode", 0) or not all(isinstance(size, int) for size in kernel):
            return None
        lost = [(size - 1) * step for size, step in zip(kernel, dilations, strict=True)]
        front: list[Size] = [dims[0], weight[0] if weight else dims[1]]
        more = [before + after - less for before, after, less in zip(pads[:rank], pads[rank:], lost, strict=True)]
        steps = zip(dims[2:], more, strides, strict=True)
        left = (self._divide(self._sizes.plus(size, number + stride - 1), stride) for size, number, stride in steps)
        return [[*front, *map(self._length, left)]]

    def _filled(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        shape = self._sized(self._list(node, scope, 0))
        return None if shape is None else [shape]

    def _flatten(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        dims, axis = self._dims(node, scope), attributes_of(node).get("axis", 1)
        return None if dims is None else [[self._sizes.times(*dims[:axis]), self._sizes.times(*dims[axis:])]]

    def _concat(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        shapes = [self._dims(node, scope, index) for index in range(len(node.input))]
        known = [shape for shape in shapes if shape is not None]
        axis = attributes_of(node).get("axis", 1)
        rank = len(known[0]) if known else 0
        if len(known) < len(shapes) or any(len(shape) != rank for shape in known) or not -rank <= axis < rank:
            return None
        result = list(known[0])
        for place, sizes in enumerate(zip(*known, strict=True)):  # a number says more than a name that must be equal
            result[place] = next((size for size in sizes if isinstance(size, int)), sizes[0])
        result[axis] = self._sizes.plus(*(shape[axis] for shape in known))
        return [list(result)]

    def _tile(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        dims, repeats = self._dims(node, scope), self._sized(self._list(node, scope, 1))
        if dims is None or repeats is None or len(repeats) != len(dims):
            return None
        pairs = zip(dims, repeats, strict=True)
        return [[None if times is None else self._sizes.times(size, times) for size, times in pairs]]

    def _pad(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        dims, pads = self._dims(node, scope), self._list(node, scope, 1, "pads")
        if dims is None or pads is None or None in pads:
            return None
        axes = self._list(node, scope, 3) if len(node.input) > 3 and node.input[3] else list(range(len(dims)))
        if axes is None or len(pads) != 2 * len(axes):
            return None
        result: list[Size] = list(dims)
        for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
            result[axis] = self._length(self._sizes.plus(dims[axis], before, after))
        return [result]

    def _range(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        known = [self._known(name, scope) for name in node.input]
        start, limit, step = (None if array is None or array.size != 1 else array.reshape(-1)[0] for array in known)
        if start is None or limit is None or step != 1 or isinstance(start, float) or isinstance(limit, float):
            return None
        return [[self._length(self._sizes.minus(limit, start))]]

    def _reshape(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        value, target = scope.values.get(node.input[0]), self._list(node, scope, 1, "shape")
        if value is None or target is None:
            return None
        if not attributes_of(node).get("allowzero", 0) and 0 in target:
            if value.shape is None or any(size == 0 and axis >= len(value.shape) for axis, size in enumerate(target)):
                return None
            target = [value.shape[axis] if size == 0 else size for axis, size in enumerate(target)]
        inferred_axis = target.index(-1) if -1 in target else None
        result = [size if axis == inferred_axis else self._length(size) for axis, size in enumerate(target)]
        if inferred_axis is None:
            return [result]
        known_sizes = [size for axis, size in enumerate(result) if axis != inferred_axis and size is not None]
        dims = self._dims(node, scope)
        if dims is None or len(known_sizes) < len(result) - 1:
            result[inferred_axis] = None
            return [result]
        result[inferred_axis] = self._sizes.quotient(dims, known_sizes)
        if result[inferred_axis] is None and 0 not in known_sizes:
            result[inferred_axis] = self._sizes.name(
                ("Reshape", self._sizes.times(*dims), self._sizes.times(*known_sizes))
            )
        return [result]

    def _resize(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        """Infer a Resize to given sizes, or by factors that are integers."""
        dims, attributes = self._dims(node, scope), attributes_of(node)
        sizes = self._list(node, scope, 3)
        factors = self._list(node, scope, 2) if len(node.input) == 3 else None
        if dims is None or attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            return None
        axes = attributes.get("axes", range(len(dims)))
        if factors is not None and all(isinstance(factor, float) and factor.is_integer() for factor in factors):
            sizes = [self._sizes.times(dims[axis], int(factor)) for axis, factor in zip(axes, factors, strict=True)]
        if sizes is None or len(sizes) != len(axes):
            return None
        result: list[Size] = list(dims)
        for axis, size in zip(axes, sizes, strict=True):
            result[axis] = self._length(size)
        return [result]

    def _slice(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        value = scope.values.get(node.input[0])
        starts, ends = self._list(node, scope, 1, "starts"), self._list(node, scope, 2, "ends")
        if value is None or value.shape is None or starts is None or ends is None:
            return None
        has_axes = (len(node.input) > 3 and node.input[3]) or "axes" in attributes_of(node)
        axes = self._list(node, scope, 3, "axes") if has_axes else list(range(len(starts)))
        steps = self._list(node, scope, 4) if len(node.input) > 4 and node.input[4] else [1] * len(starts)
        if axes is None or steps is None:
            return None
        result: list[Size] = list(value.shape)
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
            result[axis] = self._cut(result[axis], start, end, step)
        return [result]

    def _cut(self, whole: Size, start: Size, end: Size, step: Size) -> Size:
        """Return how many elements a Slice takes from an axis."""
        if whole is None or start is None or end is None or step is None:
            return None
        if isinstance(whole, int) and isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
            return len(range(whole)[start:end:step])
        if step != 1:
            return self._sizes.name(("Slice", whole, start, end, step))
        first, last = self._place(whole, start), self._place(whole, end)
        if first is None or last is None:
            return self._sizes.name(("Slice", whole, start, end, step))
        first, is_first_exact = self._at_most(first, whole)
        last, is_last_exact = self._at_most(last, whole)
        length = self._sizes.minus(last, first)
        if is_first_exact and is_last_exact and self._sizes.is_at_least(length, 0, least=1):
            return length
        # It is no longer than requested, and no longer than what is available.
        self._sizes.note_turn(whole, first if is_last_exact else last)
        bounds = (length, self._sizes.minus(whole, first)) if is_first_exact else (length,)
        return self._sizes.name(("Slice", whole, first, last), bounds=bounds)

    def _place(self, whole: int | str, place: int | str) -> int | str | None:
        """Return a position counted from the start; None if it is unknown which end it is counted from."""
        if isinstance(place, int) and place >= _TO_THE_END - 1:
            return whole
        if self._sizes.is_at_least(place, 0):
            return place
        if isinstance(place, int):
            return self._sizes.plus(whole, place) if self._sizes.is_at_least(whole, -place, least=1) else None
        return None

    def _at_most(self, place: int | str, whole: int | str) -> tuple[int | str, bool]:
        """Return a position capped at the end, and whether the result is certain."""
        if self._sizes.is_at_least(whole, place, least=1):
            return place, True
        return (whole, True) if self._sizes.is_at_least(place, whole, least=1) else (place, False)

    def _split(self, node: onnx.NodeProto, scope: Scope) -> list[list[Size]] | None:
        dims, lengths = self._dims(node, scope), self._sized(self._list(node, scope, 1, "split"))
        if dims is None:
            return None
        axis = attributes_of(node).get("axis", 0)
        if lengths is None:
            part = self._sizes.quotient([dims[axis]], [len(node.output)])
            if part is None:
                return None
            lengths = [part] * len(node.output)
        shapes = []
        for length in lengths:
            shape: list[Size] = list(dims)
            shape[axis] = length
            shapes.append(shape)
        return shapes


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _chosen(condition: bool | None, yes: Any, no: Any) -> Any:
    if condition is None:
        return yes if yes == no else None
    return yes if condition else no


def _known_only(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to return unknown if any argument is unknown or not an integer."""

    def computed(*sizes: Any) -> Any:
        return compute(*sizes) if all(isinstance(size, (int, str)) for size in sizes) else None

    return computed
