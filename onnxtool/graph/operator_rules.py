"""Shapes of operators from what is known about their inputs: the rules behind `operators`.

Letters: B batch size, S tokens, T attended tokens, P past tokens, H heads, D head size. Source:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

Size = int | str | None  # a number, the name of a dynamic axis, or unknown
Shape = tuple[Size, ...]
_BITS_PER_BYTE = 8
_RANK_OF_HEADS = 4  # of a query, key or value with a separate head axis: [B, H, S, D]
_UINT8 = 2


class Value(NamedTuple):
    """A tensor without its elements; `shape` is None if even the rank is unknown.

    `dtype` is a TensorProto.DataType number, 0 if unknown.
    """

    shape: Shape | None
    dtype: int

    @property
    def dims(self) -> Shape:
        """The axes; some sizes may be unknown.

        Raises:
            LookupError: the rank is unknown.
        """
        if self.shape is None:
            raise LookupError("rank")
        return self.shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The axes as numbers.

        Raises:
            LookupError: one of them is unknown.
        """
        sizes = tuple(size for size in self.dims if isinstance(size, int))
        if len(sizes) < len(self.dims):
            raise LookupError("size")
        return sizes

    @property
    def is_complete(self) -> bool:
        """Whether all sizes are numbers."""
        return self.shape is not None and all(isinstance(size, int) for size in self.shape)


class Call(NamedTuple):
    """A node with what is known about its inputs, under the operator's input names; None for an omitted input."""

    inputs: Mapping[str, Value | None]
    attributes: Mapping[str, Any]

    def at(self, name: str) -> Value | None:
        """Return an input; None if it is omitted."""
        return self.inputs.get(name)

    def need(self, name: str) -> Value:
        """Return a required input.

        Raises:
            LookupError: it is omitted.
        """
        value = self.inputs.get(name)
        if value is None:
            raise LookupError(name)
        return value


Shapes = Sequence[Shape | None]
ShapeRule = Callable[[Call], Shapes]


def plus(*sizes: Size) -> Size:
    """Return the sum of sizes; None if unknown."""
    left = [size for size in sizes if size != 0]
    numbers = [size for size in left if isinstance(size, int)]
    return sum(numbers) if len(numbers) == len(left) else left[0] if len(left) == 1 else None


def times(*sizes: Size) -> Size:
    """Return the product of sizes; None if unknown."""
    left = [size for size in sizes if size != 1]
    numbers = [size for size in left if isinstance(size, int)]
    return prod(numbers) if len(numbers) == len(left) else left[0] if len(left) == 1 else None


def parts(size: Size, number: int) -> Size:
    """Return the size of each of `number` equal parts; None if unknown."""
    return size // number if isinstance(size, int) else None


def broadcast(first: Shape, second: Shape) -> Shape:
    """Return the shape of an elementwise operation on two tensors."""
    length = max(len(first), len(second))
    sides = ((1,) * (length - len(first)) + first, (1,) * (length - len(second)) + second)
    return tuple(_common(one, other) for one, other in zip(*sides, strict=True))


def _common(one: Size, other: Size) -> Size:
    if one == 1:
        return other
    if other == 1 or one == other:
        return one
    # A name combined with a number can only be that number, or 1; for two names nothing is known.
    return next((size for size in (one, other) if isinstance(size, int)), None)


class Attended(NamedTuple):
    """The sizes of an attention: batch size times heads, tokens, attended tokens, widths of key and value."""

    batch_size: Size
    num_heads: Size
    num_queries: Size
    num_keys: Size
    key_width: Size
    value_width: Size

    @property
    def result(self) -> Shape:
        """The shape of the result, [B, S, H x D]."""
        return (self.batch_size, self.num_queries, times(self.num_heads, self.value_width))


def _past(call: Call, name: str, axis: int) -> Size:
    value = call.at(name)
    return 0 if value is None else value.dims[axis]


def _projecting(call: Call) -> Attended:
    """com.microsoft's Attention: it multiplies its input [B, S, …] by weights for query, key and value."""
    batch_size, num_queries, _ = call.need("input").dims
    heads = int(call.attributes["num_heads"])
    widths = call.attributes.get("qkv_hidden_sizes") or [parts(_projection(call).dims[1], 3)] * 3
    num_keys = plus(num_queries, _past(call, "past", 3))
    return Attended(batch_size, heads, num_queries, num_keys, parts(widths[1], heads), parts(widths[2], heads))


def _projection(call: Call) -> Value:
    """Return the weights [inputs, outputs], which have another name in QAttention."""
    return call.at("weight") or call.need("weights")


def grouped(call: Call) -> Attended:
    """GroupQueryAttention: like MultiHeadAttention, with fewer key and value heads."""
    heads, key_heads = int(call.attributes["num_heads"]), int(call.attributes["kv_num_heads"])
    batch_size, num_queries, width = call.need("query").dims
    size = parts(width, heads if call.at("key") is not None else heads + 2 * key_heads)
    num_keys = plus(num_queries, _past(call, "past_key", 2))
    return Attended(batch_size, heads, num_queries, num_keys, size, size)


def multi_head(call: Call) -> Attended:
    """MultiHeadAttention: query [B, S, H x D], or all three packed [B, S, H, 3, D]."""
    query, key, value = call.need("query").dims, call.at("key"), call.at("value")
    if key is None:
        batch_size, num_queries, num_heads, _, size = query
        return Attended(batch_size, num_heads, num_queries, num_queries, size, size)
    heads = int(call.attributes["num_heads"])
    batch_size, num_queries, width = query
    num_keys = plus(key.dims[_tokens_axis(key)], _past(call, "past_key", 2))
    size = parts(width, heads)
    if value is None:  # packed with the keys, [B, T, H, 2, D]
        value_size = size
    elif len(value.dims) == _RANK_OF_HEADS:
        value_size = value.dims[3]
    else:
        value_size = parts(value.dims[2], heads)
    return Attended(batch_size, heads, num_queries, num_keys, size, value_size)


def _tokens_axis(key: Value) -> int:
    return 2 if len(key.dims) == _RANK_OF_HEADS else 1


def attention_shapes(call: Call) -> Shapes:
    """Attention and QAttention: the result, and keys and values [2, B, H, T, D] for the next call."""
    found = _projecting(call)
    return [found.result, (2, found.batch_size, found.num_heads, found.num_keys, found.key_width)]


def multi_head_shapes(call: Call) -> Shapes:
    """MultiHeadAttention: the result, and keys and values [B, H, T, D] for the next call."""
    found = multi_head(call)
    kept = (found.batch_size, found.num_heads, found.num_keys)
    return [found.result, (*kept, found.key_width), (*kept, found.value_width)]


def group_query_shapes(call: Call) -> Shapes:
    """GroupQueryAttention: like MultiHeadAttention, with fewer key and value heads."""
    found = grouped(call)
    kept = (found.batch_size, int(call.attributes["kv_num_heads"]), found.num_keys, found.key_width)
    return [found.result, kept, kept]


def like(name: str, outputs: int = 1) -> ShapeRule:
    """Make the rule for an operator whose outputs, such as a result and its mask, have the shape of this input."""
    return lambda call: [call.need(name).shape] * outputs


def both(first: str, second: str) -> ShapeRule:
    """Make the rule for a binary elementwise operator."""
    return lambda call: [broadcast(call.need(first).dims, call.need(second).dims)]


def embedded(ids: str, table: str) -> ShapeRule:
    """Make the rule for an embedding lookup: the result [B, S, …], the length of each row, and the sum."""

    def rule(call: Call) -> Shapes:
        shape = (*call.need(ids).dims, call.need(table).dims[1])
        return [shape, shape[:1], shape]

    return rule


def product(first: str = "A", second: str = "B") -> ShapeRule:
    """Make the rule for a product of two matrices, which FusedMatMul may transpose."""
    return lambda call: [_product_shape(call, first, second)]


def _product_shape(call: Call, first: str, second: str) -> Shape:
    left, right = list(call.need(first).dims), list(call.need(second).dims)
    for shape, name in ((left, "transA"), (right, "transB")):
        if call.attributes.get(name) and len(shape) > 1:
            shape[-2:] = shape[:-3:-1]
    rows, columns = left[-2:-1], right[-1:] if len(right) > 1 else []
    return (*broadcast(tuple(left[:-2]), tuple(right[:-2])), *rows, *columns)


def block_product_shapes(call: Call) -> Shapes:
    """MatMulNBits: the packed weights do not show their width."""
    return [(*call.need("A").dims[:-1], int(call.attributes["N"]))]


def block_lookup_shapes(call: Call) -> Shapes:
    """GatherBlockQuantized: rows of a table that packs several numbers into a byte."""
    data, indices = call.need("data"), call.need("indices").dims
    packed = _BITS_PER_BYTE // int(call.attributes.get("bits", 4)) if data.dtype == _UINT8 else 1
    axis = int(call.attributes.get("gather_axis", 0))
    shape = (*data.dims[:axis], *indices, *data.dims[axis + 1 :])
    return [(*shape[:-1], times(shape[-1], packed))]


def _einsum_sizes(call: Call) -> tuple[dict[str, Size], Shape, str]:
    """Return the size of each Einsum label, the shape of the axes that `...` stands for, and the result's labels."""
    equation = call.attributes["equation"].decode().replace(" ", "")
    left, arrow, result = equation.partition("->")
    sizes: dict[str, Size] = {}
    front: Shape = ()
    operands, inputs = left.split(","), list(call.inputs.values())
    if len(operands) != len(inputs):
        raise ValueError(equation)
    for operand, value in zip(operands, inputs, strict=True):
        if value is None:
            raise LookupError(operand)
        shape, (before, dots, after) = value.dims, operand.partition("...")
        num_dotted = len(shape) - len(before) - len(after)
        if num_dotted < 0 or (num_dotted and not dots):
            raise ValueError(equation)
        behind = zip(after, shape[len(before) + num_dotted :], strict=True)
        for label, size in (*zip(before, shape, strict=False), *behind):
            (sizes[label],) = broadcast((sizes.get(label, size),), (size,))
        front = broadcast(front, shape[len(before) : len(before) + num_dotted])
    if not arrow:
        result = "..." * ("..." in left) + "".join(sorted(label for label in sizes if left.count(label) == 1))
    return sizes, front, result


def einsum_shapes(call: Call) -> Shapes:
    """Einsum; onnx's inference never ends for some invalid equations."""
    sizes, front, result = _einsum_sizes(call)
    before, dots, after = result.partition("...")
    return [(*(sizes[label] for label in before), *(front if dots else ()), *(sizes[label] for label in after))]
