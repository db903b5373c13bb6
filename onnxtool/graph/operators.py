"""The operators that onnx does not know, or not well enough: a row each, and nothing of it is said anywhere else.

Those of com.microsoft are described in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. An operator of ONNX itself has a row where
it multiplies, or where its shapes are not left to the inference of onnx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from onnxtool.graph import operator_rules as rules
from onnxtool.graph.edit import MICROSOFT
from onnxtool.graph.operator_rules import Call, MacRule, ShapeRule, Value
from onnxtool.summary.kinds import kind_of

T = TypeVar("T")
_FLOAT, _UINT8, _INT32, _BOOL = 1, 2, 6, 9  # of TensorProto.DataType
# What fails where a graph is wrong, or is none that a rule foresees.
WRONG = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Dtype(NamedTuple):
    """The dtype of an output: that of the first of `inputs` that is not left out, or else one that is fixed."""

    inputs: tuple[str, ...] = ()
    otherwise: int = 0

    def of(self, call: Call) -> int:
        """Return the dtype in a call; 0 where it is not known."""
        values = (call.at(name) for name in self.inputs)
        return next((value.dtype for value in values if value is not None), self.otherwise)


class Operator(NamedTuple):
    """What is known of an operator.

    Attributes:
        name: with its domain, such as `com.microsoft::Gelu`; without one where it is of ONNX.
        inputs: their names, by position; further ones are called by their position.
        dtypes: of each output; empty where onnx infers them.
        shapes: how to tell the shape of each output; None where onnx infers them.
        macs: how to count its multiplications; None where it only works elementwise, or not at all.
        onnx_name: the operator of ONNX that has the same shapes, where one has.
        lookups: the inputs that are indices of rows, each with the table of those rows.
    """

    name: str
    inputs: tuple[str, ...] = ()
    dtypes: tuple[Dtype, ...] = ()
    shapes: ShapeRule | None = None
    macs: MacRule | None = None
    onnx_name: str = ""
    lookups: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """What kind of fusion it is the result of, such as `attention`; empty where it is of none."""
        return kind_of(self.name)

    def named(self, inputs: Sequence[T | None]) -> dict[str, T | None]:
        """Return the inputs of a node by their names; None for one that is left out."""
        names = (*self.inputs, *(str(position) for position in range(len(self.inputs), len(inputs))))
        return dict(zip_longest(names, inputs))

    def call(self, inputs: Sequence[Value | None], attributes: Mapping[str, object]) -> Call:
        """Return a call with the inputs by their names."""
        return Call(self.named(inputs), attributes)

    def infer(self, call: Call) -> list[Value | None]:
        """Return shape and dtype of each output, as far as they can be told; None for one of which nothing is known."""
        shapes: Sequence[rules.Shape | None] = ()
        with suppress(*WRONG):
            shapes = self.shapes(call) if self.shapes is not None else ()
        found: list[Value | None] = []
        for index, dtype in enumerate(self.dtypes):
            value = Value(shapes[index] if index < len(shapes) else None, dtype.of(call))
            found.append(None if value == (None, 0) else value)
        return found


_PRODUCT, _PRODUCT_MACS = rules.product(), rules.product_macs()
_LENGTHS = Dtype(otherwise=_INT32)  # of the rows of a mask
_MASK = Dtype(otherwise=_BOOL)
_UNKNOWN = Dtype()


def _like(names: str, otherwise: int = 0) -> Dtype:
    return Dtype(tuple(names.split("|")), otherwise)


def _row(
    name: str,
    inputs: str,
    dtypes: str | tuple[Dtype, ...] = (),
    shapes: ShapeRule | None = None,
    macs: MacRule | None = None,
    onnx_name: str = "",
    lookups: tuple[tuple[str, str], ...] = (),
) -> Operator:
    """Return a row; spaces separate the names of inputs, and of those that outputs have their dtypes of.

    `first|second` is the dtype of `second` where `first` is left out.
    """
    if isinstance(dtypes, str):
        dtypes = tuple(_like(dtype) for dtype in dtypes.split())
    return Operator(name, tuple(inputs.split()), dtypes, shapes, macs, onnx_name, lookups)


_ONNX = (
    _row("Attention", "Q K V attn_mask past_key past_value", macs=rules.onnx_attention_macs),
    _row("Conv", "X W B", macs=rules.convolution_macs("W")),
    _row("ConvInteger", "x w x_zero_point w_zero_point", macs=rules.convolution_macs("w")),
    _row("ConvTranspose", "X W B", macs=rules.transposed_convolution_macs),
    _row("DeformConv", "X W offset B mask", macs=rules.convolution_macs("W")),
    _row("Einsum", "", "0", rules.einsum_shapes, rules.einsum_macs),
    _row("GRU", "X W R B sequence_lens initial_h", macs=rules.recurrent_macs),
    _row("Gather", "data indices", lookups=(("indices", "data"),)),
    _row("Gemm", "A B C", macs=_PRODUCT_MACS),
    _row("GroupNormalization", "X scale bias", "X", rules.like("X")),
    _row("LSTM", "X W R B sequence_lens initial_h initial_c P", macs=rules.recurrent_macs),
    _row("MatMul", "A B", macs=_PRODUCT_MACS),
    _row("MatMulInteger", "A B a_zero_point b_zero_point", macs=_PRODUCT_MACS),
    _row("MeanVarianceNormalization", "X", "X", rules.like("X")),
    _row(
        "QLinearConv",
        "x x_scale x_zero_point w w_scale w_zero_point y_scale y_zero_point B",
        macs=rules.convolution_macs("w"),
    ),
    _row(
        "QLinearMatMul",
        "a a_scale a_zero_point b b_scale b_zero_point y_scale y_zero_point",
        macs=rules.product_macs("a", "b"),
    ),
    _row("RNN", "X W R B sequence_lens initial_h", macs=rules.recurrent_macs),
    # Of onnxruntime, though they stand in the domain of ONNX.
    _row("SimplifiedLayerNormalization", "X scale", (_like("X"), Dtype(otherwise=_FLOAT)), shapes=rules.like("X", "")),
    _row("SkipLayerNormalization", "input skip gamma beta bias", "input", rules.like("input")),
)
_SKIPPED = (_like("input"), _UNKNOWN, _UNKNOWN, _like("input"))  # the result, two statistics, and the sum
_QUANTIZED = "X X_scale X_zero_point Y_scale Y_zero_point"
_QUANTIZED_PAIR = "A A_scale A_zero_point B B_scale B_zero_point C_scale C_zero_point"
_MICROSOFT = (
    _row(
        "Attention",
        "input weights bias mask_index past attention_bias past_sequence_length",
        "input input",
        rules.attention_shapes,
        rules.attention_macs,
    ),
    _row("BiasAdd", "X bias skip", "X", rules.like("X")),
    _row("BiasDropout", "data bias residual ratio training_mode", (_like("data"), _MASK), rules.like("data", "data")),
    _row("BiasGelu", "A B", "A", rules.like("A")),
    _row("BiasSoftmax", "data bias", "data", rules.like("data")),
    _row("DequantizeLinear", "x x_scale x_zero_point", "x_scale", rules.like("x")),
    _row("DynamicQuantizeMatMul", "A B b_scale b_zero_point bias", "A", _PRODUCT, _PRODUCT_MACS),
    _row(
        "EmbedLayerNormalization",
        "input_ids segment_ids word_embedding position_embedding segment_embedding gamma beta mask position_ids",
        (_like("word_embedding"), _LENGTHS, _like("word_embedding")),
        rules.embedded("input_ids", "word_embedding"),
        lookups=(("input_ids", "word_embedding"), ("segment_ids", "segment_embedding")),
    ),
    _row(
        "FakeQuant",
        "input_tensor scale zero_point",
        (_like("input_tensor"), _MASK),
        rules.like("input_tensor", "input_tensor"),
    ),
    _row("FastGelu", "X bias", "X", rules.like("X")),
    _row("FusedConv", "X W B Z", macs=rules.convolution_macs("W"), onnx_name="Conv"),
    _row("FusedGemm", "A B C", macs=_PRODUCT_MACS, onnx_name="Gemm"),
    _row("FusedMatMul", "A B", "A", _PRODUCT, _PRODUCT_MACS),
    _row(
        "GatherBlockQuantized",
        "data indices scales zero_points",
        "scales",
        rules.block_lookup_shapes,
        # A table that is shared with a head is reshaped first; its scales have as many rows, and are not.
        lookups=(("indices", "data"), ("indices", "scales")),
    ),
    _row("Gelu", "X", "X", rules.like("X")),
    _row("GemmFastGelu", "X W bias", "X", rules.product("X", "W"), rules.product_macs("X", "W")),
    _row("GroupNorm", "X gamma beta", "X", rules.like("X")),
    _row(
        "GroupQueryAttention",
        "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache position_ids",
        "query past_key|query past_value|query",
        rules.group_query_shapes,
        rules.group_query_macs,
    ),
    _row("Inverse", "X", "X", rules.like("X")),
    _row(
        "MatMulIntegerToFloat", "A B a_scale b_scale a_zero_point b_zero_point bias", "a_scale", _PRODUCT, _PRODUCT_MACS
    ),
    _row("MatMulNBits", "A B scales zero_points g_idx bias", "A", rules.block_product_shapes, rules.block_product_macs),
    _row(
        "MultiHeadAttention",
        "query key value bias key_padding_mask attention_bias past_key past_value past_sequence_length "
        "cache_indirection",
        "query past_key|query past_value|query",
        rules.multi_head_shapes,
        rules.multi_head_macs,
    ),
    _row(
        "QAttention",
        "input weight bias input_scale weight_scale mask_index input_zero_point weight_zero_point past",
        "input_scale input_scale",
        rules.attention_shapes,
        rules.attention_macs,
    ),
    _row(
        "QEmbedLayerNormalization",
        "input_ids segment_ids word_embedding_quant position_embedding_quant segment_embedding gamma_quant beta_quant "
        "mask word_embedding_scale",
        (_like("word_embedding_scale"), _LENGTHS),
        rules.embedded("input_ids", "word_embedding_quant"),
    ),
    _row("QLinearAdd", _QUANTIZED_PAIR, "A", rules.both("A", "B")),
    _row("QLinearLeakyRelu", _QUANTIZED, "X", rules.like("X")),
    _row("QLinearMul", _QUANTIZED_PAIR, "A", rules.both("A", "B")),
    _row("QLinearSigmoid", _QUANTIZED, "X", rules.like("X")),
    _row("QLinearSoftmax", "X X_scale x_zero_point y_scale y_zero_point", "X", rules.like("X")),
    _row("QuantizeLinear", "x y_scale y_zero_point", (_like("y_zero_point", _UINT8),), rules.like("x")),
    _row("QuickGelu", "X", "X", rules.like("X")),
    _row("RotaryEmbedding", "input position_ids cos_cache sin_cache", "input", rules.like("input")),
    _row("ScaledSum", "input_0 input_1 input_2", "input_0", rules.like("input_0")),
    _row("SkipGroupNorm", "X gamma beta skip bias", "X X", rules.like("X", "X")),
    _row("SkipLayerNormalization", "input skip gamma beta bias", _SKIPPED, rules.like("input", "", "", "input")),
    _row("SkipSimplifiedLayerNormalization", "input skip gamma bias", _SKIPPED, rules.like("input", "", "", "input")),
)

OPERATORS: Mapping[tuple[str, str], Operator] = {
    **{("", row.name): row for row in _ONNX},
    **{(MICROSOFT, row.name): row._replace(name=f"{MICROSOFT}::{row.name}") for row in _MICROSOFT},
}
"""The rows by domain and operator."""


def named_inputs(domain: str, op_type: str, inputs: Sequence[T | None]) -> dict[str, T | None]:
    """Return the inputs of a node by their names; nothing where its operator is not in the table."""
    row = OPERATORS.get((domain, op_type))
    return {} if row is None else row.named(inputs)
