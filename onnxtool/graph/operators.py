"""Operators that onnx does not know, or not well enough: one row each, the only place that describes them.

The com.microsoft operators are documented in
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. An ONNX operator has a row if its
inputs are read by name, or if its shapes are not left to onnx's inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from onnxtool.graph import operator_rules as rules
from onnxtool.graph.operator_rules import Call, ShapeRule, Value

MICROSOFT = "com.microsoft"

T = TypeVar("T")
# TensorProto.DataType numbers.
_FIXED_DTYPES = {"float32": 1, "uint8": 2, "int32": 6, "bool": 9, "?": 0}
# Exceptions raised for invalid graphs, or for graphs that a rule does not cover.
WRONG = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


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

    def infer(self, call: Call) -> list[Value | None]:
        """Return the shape and dtype of each output as far as known; None for outputs about which nothing is known."""
        looks = [self._look(names.split("|"), call) for names in self.outputs.split()]
        if self.shapes is not None:
            shapes: Sequence[rules.Shape | None] = ()
            with suppress(*WRONG):
                shapes = self.shapes(call)
            looks = [Value(shape, look.dtype) for shape, look in zip_longest(shapes[: len(looks)], looks)]
        return [None if look == (None, 0) else look for look in looks]

    @staticmethod
    def _look(names: Sequence[str], call: Call) -> Value:
        """Return the first of these inputs that is present, or a value with the dtype named instead."""
        for name in names:
            if (value := call.at(name)) is not None:
                return value
            if name in call.attributes:
                return Value(None, int(call.attributes[name]))
        return Value(None, _FIXED_DTYPES.get(names[-1], 0))


_PRODUCT = rules.product()

_ONNX = (
    Operator("Einsum", "", "0", rules.einsum_shapes),
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
        rules.attention_shapes,
    ),
    Operator("BiasAdd", "X bias skip", "X"),
    Operator("BiasDropout", "data bias residual ratio training_mode", "data bool", rules.like("data", 2)),
    Operator("BiasGelu", "A B", "A"),
    Operator("BiasSoftmax", "data bias", "data"),
    Operator("DequantizeLinear", "x x_scale x_zero_point", "x_scale", rules.like("x")),
    Operator("DynamicQuantizeMatMul", "A B b_scale b_zero_point bias", "A", _PRODUCT),
    Operator(
        "EmbedLayerNormalization",
        "input_ids segment_ids word_embedding position_embedding segment_embedding gamma beta mask position_ids",
        "word_embedding int32 word_embedding",
        rules.embedded("input_ids", "word_embedding"),
        lookups=(("input_ids", "word_embedding"), ("segment_ids", "segment_embedding")),
    ),
    Operator("FakeQuant", "input_tensor scale zero_point", "input_tensor bool", rules.like("input_tensor", 2)),
    Operator("FastGelu", "X bias", "X"),
    Operator("FusedConv", "X W B Z", onnx_name="Conv"),
    Operator("FusedGemm", "A B C", onnx_name="Gemm"),
    Operator("FusedMatMul", "A B", "A", _PRODUCT),
    Operator(
        "GatherBlockQuantized",
        "data indices scales zero_points",
        "scales",
        rules.block_lookup_shapes,
        # A table shared with a head is reshaped first; its scales have as many rows, and are not reshaped.
        lookups=(("indices", "data"), ("indices", "scales")),
    ),
    Operator("Gelu", "X", "X"),
    Operator("GemmFastGelu", "X W bias", "X", rules.product("X", "W")),
    Operator("GroupNorm", "X gamma beta", "X"),
    Operator(
        "GroupQueryAttention",
        "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache position_ids "
        "attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight",
        "query past_key|query past_value|query",
        rules.group_query_shapes,
    ),
    Operator("Inverse", "X", "X"),
    Operator("MatMulIntegerToFloat", "A B a_scale b_scale a_zero_point b_zero_point bias", "a_scale", _PRODUCT),
    Operator("MatMulNBits", "A B scales zero_points g_idx bias", "A", rules.block_product_shapes),
    Operator(
        "MultiHeadAttention",
        "query key value bias key_padding_mask attention_bias past_key past_value past_sequence_length "
        "cache_indirection",
        "query past_key|query past_value|query",
        rules.multi_head_shapes,
    ),
    Operator(
        "QAttention",
        "input weight bias input_scale weight_scale mask_index input_zero_point weight_zero_point past",
        "input_scale input_scale",
        rules.attention_shapes,
    ),
    Operator(
        "QEmbedLayerNormalization",
        "input_ids segment_ids word_embedding_quant position_embedding_quant segment_embedding gamma_quant beta_quant "
        "mask word_embedding_scale",
        "word_embedding_scale int32",
        rules.embedded("input_ids", "word_embedding_quant"),
    ),
    Operator("QLinearAdd", _QUANTIZED_PAIR, "A", rules.both("A", "B")),
    Operator("QLinearLeakyRelu", _QUANTIZED, "X"),
    Operator("QLinearMul", _QUANTIZED_PAIR, "A", rules.both("A", "B")),
    Operator("QLinearSigmoid", _QUANTIZED, "X"),
    Operator("QLinearSoftmax", "X X_scale x_zero_point y_scale y_zero_point", "X"),
    Operator("QuantizeLinear", "x y_scale y_zero_point", "y_zero_point|uint8", rules.like("x")),
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
