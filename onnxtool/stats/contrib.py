"""Shapes and dtypes of what onnxruntime's own operators compute, which onnx knows nothing of; and of Einsum.

Letters: B rows, S tokens, T tokens that are attended to, P tokens of the past, H heads, D width of a head. From
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Shape = tuple[int, ...]
_BITS_OF_A_BYTE = 8
_HEADS_APART = 4  # axes of a query, key or value of which each head is on its own: [B, H, S, D]


class Value(NamedTuple):
    """A tensor without its elements; `dtype` is a number of TensorProto.DataType."""

    shape: Shape
    dtype: int


class Call(NamedTuple):
    """A node with what is known of its inputs; None for one that is left out."""

    inputs: Sequence[Value | None]
    attributes: Mapping[str, Any]
    num_outputs: int

    def at(self, index: int) -> Value | None:
        """Return an input; None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def need(self, index: int) -> Value:
        """Return an input that the operator cannot do without.

        Raises:
            LookupError: it is left out.
        """
        value = self.at(index)
        if value is None:
            raise LookupError(f"input {index}")
        return value


Rule = Callable[[Call], list[Value | None]]


class Attended(NamedTuple):
    """What an attention multiplies: rows times heads, tokens, tokens attended to, widths of key and value."""

    num_queries: int
    num_keys: int
    num_heads: int
    key_width: int
    value_width: int
    batch_size: int

    @property
    def macs(self) -> int:
        """Multiplications of the scores, and of the values by them."""
        pairs = self.batch_size * self.num_heads * self.num_queries * self.num_keys
        return pairs * (self.key_width + self.value_width)


def attended(op_type: str, call: Call) -> Attended:
    """Return what an attention of this operator multiplies, without the projections that some do before.

    Raises:
        LookupError: an input that tells it is left out.
    """
    if op_type in ("Attention", "QAttention") and len(call.need(1).shape) == 2:
        return _projecting(op_type, call)
    if op_type == "GroupQueryAttention":
        return _grouped(call)
    return _given(call)


def _projecting(op_type: str, call: Call) -> Attended:
    """Attention of com.microsoft: it multiplies its input [B, S, …] with weights for query, key and value."""
    batch_size, num_queries, _ = call.need(0).shape
    heads = int(call.attributes["num_heads"])
    sizes = call.attributes.get("qkv_hidden_sizes") or [call.need(1).shape[1] // 3] * 3
    past = call.at(4 if op_type == "Attention" else 8)
    num_keys = num_queries + (past.shape[3] if past is not None else 0)
    return Attended(num_queries, num_keys, heads, sizes[1] // heads, sizes[2] // heads, batch_size)


def _grouped(call: Call) -> Attended:
    query, past = call.need(0), call.at(3)
    heads, key_heads = int(call.attributes["num_heads"]), int(call.attributes["kv_num_heads"])
    batch_size, num_queries, width = query.shape
    size = width // (heads if call.at(1) is not None else heads + 2 * key_heads)
    num_keys = num_queries + (past.shape[2] if past is not None else 0)
    return Attended(num_queries, num_keys, heads, size, size, batch_size)


def _given(call: Call) -> Attended:
    """MultiHeadAttention, and Attention of ONNX: query, key and value [B, S, H x D] or [B, H, S, D]."""
    query, key, value = call.need(0), call.at(1), call.at(2)
    is_onnx = "q_num_heads" in call.attributes or "num_heads" not in call.attributes
    if len(query.shape) == _HEADS_APART and is_onnx:
        batch_size, heads, num_queries, size = query.shape
        past = call.at(4)
        num_keys, value_size = call.need(1).shape[2], call.need(2).shape[3]
        return Attended(
            num_queries, num_keys + (past.shape[2] if past is not None else 0), heads, size, value_size, batch_size
        )
    heads = int(call.attributes.get("num_heads") or call.attributes["q_num_heads"])
    if key is None:  # packed: [B, S, H, 3, D]
        batch_size, num_queries, heads, _, size = query.shape
        return Attended(num_queries, num_queries, heads, size, size, batch_size)
    batch_size, num_queries, width = query.shape
    past = call.at(6 if not is_onnx else 4)
    num_keys = key.shape[2] if len(key.shape) == _HEADS_APART else key.shape[1]
    num_keys += past.shape[2] if past is not None else 0
    size = width // heads
    if value is None or len(value.shape) == _HEADS_APART:
        value_size = size if value is None else value.shape[3]
    else:
        value_size = value.shape[2] // int(call.attributes.get("kv_num_heads") or heads)
    return Attended(num_queries, num_keys, heads, size, value_size, batch_size)


def _as_first(call: Call) -> list[Value | None]:
    return [call.need(0)]


def _normalized(call: Call) -> list[Value | None]:
    """SkipLayerNormalization and its kin: the result, two statistics, and the sum that was normalized."""
    first = call.need(0)
    return [first, None, None, first]


def _embedded(call: Call) -> list[Value | None]:
    ids, words = call.need(0), call.need(2)
    value = Value((*ids.shape, words.shape[1]), words.dtype)
    return [value, Value(ids.shape[:1], ids.dtype), value]


def _attention(call: Call) -> list[Value | None]:
    first = call.need(0)
    dtype = first.dtype if first.dtype in _FLOATS else call.need(3).dtype  # QAttention: of the scales
    found = _projecting("Attention" if first.dtype in _FLOATS else "QAttention", call)
    present = (2, found.batch_size, found.num_heads, found.num_keys, found.key_width)
    output = (found.batch_size, found.num_queries, found.num_heads * found.value_width)
    return [Value(output, dtype), Value(present, dtype)]


def _multi_head(call: Call) -> list[Value | None]:
    found, dtype = _given(call), call.need(0).dtype
    output = Value((found.batch_size, found.num_queries, found.num_heads * found.value_width), dtype)
    kept = (found.batch_size, found.num_heads, found.num_keys)
    return [output, Value((*kept, found.key_width), dtype), Value((*kept, found.value_width), dtype)]


def _group_query(call: Call) -> list[Value | None]:
    found, dtype = _grouped(call), call.need(0).dtype
    output = Value((found.batch_size, found.num_queries, found.num_heads * found.value_width), dtype)
    kept = (found.batch_size, int(call.attributes["kv_num_heads"]), found.num_keys, found.key_width)
    return [output, Value(kept, dtype), Value(kept, dtype)]


def _block_product(call: Call) -> list[Value | None]:
    first = call.need(0)
    return [Value((*first.shape[:-1], int(call.attributes["N"])), first.dtype)]


def _block_lookup(call: Call) -> list[Value | None]:
    data, indices, scales = call.need(0), call.need(1), call.need(2)
    bits = int(call.attributes.get("bits", 4))
    packed = _BITS_OF_A_BYTE // bits if data.dtype == _UINT8 else 1
    axis = int(call.attributes.get("gather_axis", 0))
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return [Value((*shape[:-1], shape[-1] * packed), scales.dtype)]


def product_shape(call: Call) -> Shape:
    """Return the shape of a matrix product, with what com.microsoft's FusedMatMul may transpose."""
    first, second = list(call.need(0).shape), list(call.need(1).shape)
    for shape, name in ((first, "transA"), (second, "transB")):
        if call.attributes.get(name) and len(shape) > 1:
            shape[-2:] = shape[:-3:-1]
    rows, columns = first[-2:-1], second[-1:] if len(second) > 1 else []
    return (*broadcast(tuple(first[:-2]), tuple(second[:-2])), *rows, *columns)


def _product(call: Call) -> list[Value | None]:
    return [Value(product_shape(call), call.need(0).dtype)]


def _scaled_product(call: Call) -> list[Value | None]:
    return [Value(product_shape(call), call.need(2).dtype)]


def _dequantized(call: Call) -> list[Value | None]:
    return [Value(call.need(0).shape, call.need(1).dtype)]


def _quantized(call: Call) -> list[Value | None]:
    point = call.at(2)
    return [Value(call.need(0).shape, _UINT8 if point is None else point.dtype)]


def _quantized_pair(call: Call) -> list[Value | None]:
    first, second = call.need(0), call.need(3)
    return [Value(broadcast(first.shape, second.shape), first.dtype)]


def einsum_sizes(call: Call) -> tuple[dict[str, int], Shape, str]:
    """Return the size of each label of an Einsum, the shape of the axes that `...` stands for, and the result's labels.

    Raises:
        ValueError: the equation does not fit its inputs.
    """
    equation = call.attributes["equation"].decode().replace(" ", "")
    left, arrow, result = equation.partition("->")
    sizes: dict[str, int] = {}
    front: Shape = ()
    operands = left.split(",")
    if len(operands) != len(call.inputs):
        raise ValueError(equation)
    for index, operand in enumerate(operands):
        shape, (before, dots, after) = call.need(index).shape, operand.partition("...")
        num_dotted = len(shape) - len(before) - len(after)
        if num_dotted < 0 or (num_dotted and not dots):
            raise ValueError(equation)
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(after, shape[len(before) + num_dotted :], strict=True))
        front = broadcast(front, shape[len(before) : len(before) + num_dotted])
    if not arrow:
        result = "..." * ("..." in left) + "".join(sorted(label for label in sizes if left.count(label) == 1))
    return sizes, front, result


def _einsum(call: Call) -> list[Value | None]:
    # Not by onnx, whose inference never ends on some equations that are wrong.
    sizes, front, result = einsum_sizes(call)
    before, dots, after = result.partition("...")
    shape = (*(sizes[label] for label in before), *(front if dots else ()), *(sizes[label] for label in after))
    return [Value(shape, call.need(0).dtype)]


def broadcast(first: Shape, second: Shape) -> Shape:
    """Return the shape of an elementwise operation on two tensors."""
    length = max(len(first), len(second))
    sides = ((1,) * (length - len(first)) + first, (1,) * (length - len(second)) + second)
    return tuple(other if one == 1 else one for one, other in zip(*sides, strict=True))


_UINT8 = 2
_FLOATS = frozenset({1, 10, 11, 16})

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu"), _as_first),
    **dict.fromkeys(("GroupNorm", "Inverse", "QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax"), _as_first),
    **dict.fromkeys(("QuickGelu", "RotaryEmbedding", "SimplifiedLayerNormalization"), _as_first),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipGroupNorm"), _normalized),
    **dict.fromkeys(("EmbedLayerNormalization", "QEmbedLayerNormalization"), _embedded),
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    "DequantizeLinear": _dequantized,
    "DynamicQuantizeMatMul": _product,
    "Einsum": _einsum,
    "FusedMatMul": _product,
    "GatherBlockQuantized": _block_lookup,
    "GemmFastGelu": _product,
    "GroupQueryAttention": _group_query,
    "MatMulIntegerToFloat": _scaled_product,
    "MatMulNBits": _block_product,
    "MultiHeadAttention": _multi_head,
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _quantized_pair),
    "QuantizeLinear": _quantized,
}
