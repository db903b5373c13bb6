"""Operators that onnx does not know, or not well enough: a row for each, and the rules for their shapes.

The com.microsoft operators are documented in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. An ONNX operator has a row if its
inputs are read by name, or if its shapes are not left to onnx's inference.

Letters: B batch size, S tokens, T attended tokens, P past tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple, TypeVar

MICROSOFT = "com.microsoft"

T = TypeVar("T")
# TensorProto.DataType numbers.
_FIXED_DTYPES = {"float32": 1, "uint8": 2, "int32": 6, "bool": 9, "?": 0}
# Exceptions raised for invalid graphs, or for graphs that a rule does not cover.
WRONG = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

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


class OperatorCall(NamedTuple):
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
ShapeRule = Callable[[OperatorCall], Shapes]


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
    return tuple(_common(size, other) for size, other in zip(*sides, strict=True))


def _common(first: Size, second: Size) -> Size:
    if first == 1:
        return second
    if second == 1 or first == second:
        return first
    # A name combined with a number can only be that number, or 1; for two names nothing is known.
    return next((size for size in (first, second) if isinstance(size, int)), None)


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


def _past(call: OperatorCall, name: str, axis: int) -> Size:
    value = call.at(name)
    return 0 if value is None else value.dims[axis]


def _projecting(call: OperatorCall) -> Attended:
    """com.microsoft's Attention: it multiplies its input [B, S, …] by weights for query, key and value."""
    batch_size, num_queries, _ = call.need("input").dims
    heads = int(call.attributes["num_heads"])
    weights = call.at("weight") or call.need("weights")  # [inputs, outputs]; the first name is that of QAttention
    widths = call.attributes.get("qkv_hidden_sizes") or [parts(weights.dims[1], 3)] * 3
    num_keys = plus(num_queries, _past(call, "past", 3))
    return Attended(batch_size, heads, num_queries, num_keys, parts(widths[1], heads), parts(widths[2], heads))


def grouped(call: OperatorCall) -> Attended:
    """GroupQueryAttention: like MultiHeadAttention, with fewer key and value heads."""
    heads, key_heads = int(call.attributes["num_heads"]), int(call.attributes["kv_num_heads"])
    batch_size, num_queries, width = call.need("query").dims
    size = parts(width, heads if call.at("key") is not None else heads + 2 * key_heads)
    num_keys = plus(num_queries, _past(call, "past_key", 2))
    return Attended(batch_size, heads, num_queries, num_keys, size, size)


def multi_head(call: OperatorCall) -> Attended:
    """MultiHeadAttention: query [B, S, H x D], or all three packed [B, S, H, 3, D]."""
    query, key, value = call.need("query").dims, call.at("key"), call.at("value")
    if key is None:
        batch_size, num_queries, num_heads, _, size = query
        return Attended(batch_size, num_heads, num_queries, num_queries, size, size)
    heads = int(call.attributes["num_heads"])
    batch_size, num_queries, width = query
    tokens_axis = 2 if len(key.dims) == _RANK_OF_HEADS else 1
    num_keys = plus(key.dims[tokens_axis], _past(call, "past_key", 2))
    size = parts(width, heads)
    if value is None:  # packed with the keys, [B, T, H, 2, D]
        value_size = size
    elif len(value.dims) == _RANK_OF_HEADS:
        value_size = value.dims[3]
    else:
        value_size = parts(value.dims[2], heads)
    return Attended(batch_size, heads, num_queries, num_keys, size, value_size)


def attention_shapes(call: OperatorCall) -> Shapes:
    """Attention and QAttention: the result, and keys and values [2, B, H, T, D] for the next call."""
    sizes = _projecting(call)
    return [sizes.result, (2, sizes.batch_size, sizes.num_heads, sizes.num_keys, sizes.key_width)]


def multi_head_shapes(call: OperatorCall) -> Shapes:
    """MultiHeadAttention: the result, and keys and values [B, H, T, D] for the next call."""
    sizes = multi_head(call)
    kept = (sizes.batch_size, sizes.num_heads, sizes.num_keys)
    return [sizes.result, (*kept, sizes.key_width), (*kept, sizes.value_width)]


def group_query_shapes(call: OperatorCall) -> Shapes:
    """GroupQueryAttention: like MultiHeadAttention, with fewer key and value heads."""
    sizes = grouped(call)
    kept = (sizes.batch_size, int(call.attributes["kv_num_heads"]), sizes.num_keys, sizes.key_width)
    return [sizes.result, kept, kept]


def like(name: str, outputs: int = 1) -> ShapeRule:
    """Make the rule for an operator whose outputs, such as a result and its mask, have the shape of this input."""
    return lambda call: [call.need(name).shape] * outputs


def both(first: str, second: str) -> ShapeRule:
    """Make the rule for a binary elementwise operator."""
    return lambda call: [broadcast(call.need(first).dims, call.need(second).dims)]


def embedded(ids: str, table: str) -> ShapeRule:
    """Make the rule for an embedding lookup: the result [B, S, …], the length of each row, and the sum."""

    def rule(call: OperatorCall) -> Shapes:
        shape = (*call.need(ids).dims, call.need(table).dims[1])
        return [shape, shape[:1], shape]

    return rule


def product(first: str = "A", second: str = "B") -> ShapeRule:
    """Make the rule for a product of two matrices, which FusedMatMul may transpose."""
    return lambda call: [_product_shape(call, first, second)]


def _product_shape(call: OperatorCall, first: str, second: str) -> Shape:
    left, right = list(call.need(first).dims), list(call.need(second).dims)
    for shape, name in ((left, "transA"), (right, "transB")):
        if call.attributes.get(name) and len(shape) > 1:
            shape[-2:] = shape[:-3:-1]
    rows, columns = left[-2:-1], right[-1:] if len(right) > 1 else []
    return (*broadcast(tuple(left[:-2]), tuple(right[:-2])), *rows, *columns)


def block_product_shapes(call: OperatorCall) -> Shapes:
    """MatMulNBits: the packed weights do not show their width."""
    return [(*call.need("A").dims[:-1], int(call.attributes["N"]))]


def block_lookup_shapes(call: OperatorCall) -> Shapes:
    """GatherBlockQuantized: rows of a table that packs several numbers into a byte."""
    data, indices = call.need("data"), call.need("indices").dims
    packed = _BITS_PER_BYTE // int(call.attributes.get("bits", 4)) if data.dtype == _UINT8 else 1
    axis = int(call.attributes.get("gather_axis", 0))
    shape = (*data.dims[:axis], *indices, *data.dims[axis + 1 :])
    return [(*shape[:-1], times(shape[-1], packed))]


def _einsum_sizes(call: OperatorCall) -> tuple[dict[str, Size], Shape, str]:
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


def einsum_shapes(call: OperatorCall) -> Shapes:
    """Einsum; onnx's inference never ends for some invalid equations."""
    sizes, front, result = _einsum_sizes(call)
    before, dots, after = result.partition("...")
    return [(*(sizes[label] for label in before), *(front if dots else ()), *(sizes[label] for label in after))]


class Operator(NamedTuple):
    """A description of an operator.

    Attributes:
        name: its name with domain, such as `com.microsoft::Gelu`; without domain for ONNX operators.
        inputs: space-separated input names, by position; further inputs are named by their position.
        outputs: for each output, space-separated, the input that has its dtype or an attribute that is one;
            `first|second` is `second` if `first` is omitted, `float32` is that dtype, and `?` is unknown. Empty if onnx
            infers the outputs.
        shapes: determines the shape of each output; if None, it equals the shape of the input that has its dtype.
        onnx_name: the ONNX operator with the same outputs, if there is one.
        lookups: the inputs that are row indices, each with the table that has the rows.
    """

    name: str
    inputs: str = ""
    outputs: str = ""
    shapes: ShapeRule | None = None
    onnx_name: str = ""
    lookups: tuple[tuple[str, str], ...] = ()

    def named(self, inputs: Sequence[T | None]) -> dict[str, T | None]:
        """Return a node's inputs by name; None for an omitted input."""
        names = self.inputs.split()
        names += (str(position) for position in range(len(names), len(inputs)))
        return dict(zip_longest(names, inputs))

    def infer(self, call: OperatorCall) -> list[Value | None]:
        """Return the shape and dtype of each output as far as known; None for outputs about which nothing is known."""
        values = [self._value_like(names.split("|"), call) for names in self.outputs.split()]
        if self.shapes is not None:
            shapes: Sequence[Shape | None] = ()
            with suppress(*WRONG):
                shapes = self.shapes(call)
            values = [Value(shape, value.dtype) for shape, value in zip_longest(shapes[: len(values)], values)]
        return [None if value == (None, 0) else value for value in values]

    @staticmethod
    def _value_like(names: Sequence[str], call: OperatorCall) -> Value:
        """Return the first of these inputs that is present, or a value with the dtype named instead."""
        for name in names:
            if (value := call.at(name)) is not None:
                return value
            if name in call.attributes:
                return Value(None, int(call.attributes[name]))
        return Value(None, _FIXED_DTYPES.get(names[-1], 0))


_PRODUCT = product()

_ONNX = (
    Operator("Einsum", "", "0", einsum_shapes),
    Operator("Gather", "data indices", lookups=(("indices", "data"),)),
    Operator("Gemm", "A B C"),
    # Before opset 16, onnx infers nothing for these two.
    Operator("GreaterOrEqual", "A B", onnx_name="Greater"),
    Operator("GroupNormalization", "X scale bias", "X"),
    Operator("LessOrEqual", "A B", onnx_name="Less"),
    Operator("MatMul", "A B"),
    Operator("MatMulInteger", "A B a_zero_point b_zero_point"),
    Operator("MeanVarianceNormalization", "X", "X"),
    Operator("QLinearMatMul", "a a_scale a_zero_point b b_scale b_zero_point y_scale y_zero_point"),
    # onnxruntime's operators in the ONNX domain.
    Operator("SimplifiedLayerNormalization", "X scale", "X stash_type|float32"),
    Operator("SkipLayerNormalization", "input skip gamma beta bias", "input"),
)
_QUANTIZED = "X X_scale X_zero_point Y_scale Y_zero_point"
_QUANTIZED_PAIR = "A A_scale A_zero_point B B_scale B_zero_point C_scale C_zero_point"
_MICROSOFT = (
    Operator(
        "Attention",
        "input weights bias mask_index past attention_bias past_sequence_length",
        "input input",
        attention_shapes,
    ),
    Operator("BiasAdd", "X bias skip", "X"),
    Operator("BiasDropout", "data bias residual ratio training_mode", "data bool", like("data", 2)),
    Operator("BiasGelu", "A B", "A"),
    Operator("BiasSoftmax", "data bias", "data"),
    Operator("DequantizeLinear", "x x_scale x_zero_point", "x_scale", like("x")),
    Operator("DynamicQuantizeMatMul", "A B b_scale b_zero_point bias", "A", _PRODUCT),
    Operator(
        "EmbedLayerNormalization",
        "input_ids segment_ids word_embedding position_embedding segment_embedding gamma beta mask position_ids",
        "word_embedding int32 word_embedding",
        embedded("input_ids", "word_embedding"),
        lookups=(("input_ids", "word_embedding"), ("segment_ids", "segment_embedding")),
    ),
    Operator("FakeQuant", "input_tensor scale zero_point", "input_tensor bool", like("input_tensor", 2)),
    Operator("FastGelu", "X bias", "X"),
    Operator("FusedConv", "X W B Z", onnx_name="Conv"),
    Operator("FusedGemm", "A B C", onnx_name="Gemm"),
    Operator("FusedMatMul", "A B", "A", _PRODUCT),
    Operator(
        "GatherBlockQuantized",
        "data indices scales zero_points",
        "scales",
        block_lookup_shapes,
        # A table shared with a head is reshaped first; its scales have as many rows, and are not reshaped.
        lookups=(("indices", "data"), ("indices", "scales")),
    ),
    Operator("Gelu", "X", "X"),
    Operator("GemmFastGelu", "X W bias", "X", product("X", "W")),
    Operator("GroupNorm", "X gamma beta", "X"),
    Operator(
        "GroupQueryAttention",
        "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache position_ids "
        "attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight",
        "query past_key|query past_value|query",
        group_query_shapes,
    ),
    Operator("Inverse", "X", "X"),
    Operator("MatMulIntegerToFloat", "A B a_scale b_scale a_zero_point b_zero_point bias", "a_scale", _PRODUCT),
    Operator("MatMulNBits", "A B scales zero_points g_idx bias", "A", block_product_shapes),
    Operator(
        "MultiHeadAttention",
        "query key value bias key_padding_mask attention_bias past_key past_value past_sequence_length "
        "cache_indirection",
        "query past_key|query past_value|query",
        multi_head_shapes,
    ),
    Operator(
        "QAttention",
        "input weight bias input_scale weight_scale mask_index input_zero_point weight_zero_point past",
        "input_scale input_scale",
        attention_shapes,
    ),
    Operator(
        "QEmbedLayerNormalization",
        "input_ids segment_ids word_embedding_quant position_embedding_quant segment_embedding gamma_quant beta_quant "
        "mask word_embedding_scale",
        "word_embedding_scale int32",
        embedded("input_ids", "word_embedding_quant"),
    ),
    Operator("QLinearAdd", _QUANTIZED_PAIR, "A", both("A", "B")),
    Operator("QLinearLeakyRelu", _QUANTIZED, "X"),
    Operator("QLinearMul", _QUANTIZED_PAIR, "A", both("A", "B")),
    Operator("QLinearSigmoid", _QUANTIZED, "X"),
    Operator("QLinearSoftmax", "X X_scale x_zero_point y_scale y_zero_point", "X"),
    Operator("QuantizeLinear", "x y_scale y_zero_point", "y_zero_point|uint8", like("x")),
    Operator("QuickGelu", "X", "X"),
    Operator("RotaryEmbedding", "input position_ids cos_cache sin_cache", "input"),
    Operator("ScaledSum", "input_0 input_1 input_2", "input_0"),
    Operator("SkipGroupNorm", "X gamma beta skip bias", "X X"),
    Operator("SkipLayerNormalization", "input skip gamma beta bias", "input ? ? input"),
    Operator("SkipSimplifiedLayerNormalization", "input skip gamma bias", "input ? ? input"),
)

OPERATORS: Mapping[tuple[str, str], Operator] = {
    **{("", row.name): row for row in _ONNX},
    **{(MICROSOFT, row.name): row._replace(name=f"{MICROSOFT}::{row.name}") for row in _MICROSOFT},
}
"""The rows by domain and operator."""
LOOKUPS: Mapping[tuple[str, str], tuple[tuple[int, int], ...]] = {
    key: tuple((row.inputs.split().index(indices), row.inputs.split().index(table)) for indices, table in row.lookups)
    for key, row in OPERATORS.items()
    if row.lookups
}
"""The positions of row indices and of their table among the inputs of operators that look rows up."""


def named_inputs(domain: str, op_type: str, inputs: Sequence[T | None]) -> dict[str, T | None]:
    """Return a node's inputs by name; nothing if its operator is not in the table."""
    row = OPERATORS.get((domain, op_type))
    return {} if row is None else row.named(inputs)
