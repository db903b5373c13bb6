"""Find the first release of onnxruntime that runs a model on the CPU, from its versions and its operators.

Each release is built with one release of ONNX and refuses anything newer; com.microsoft stays at version 1, while its
operators gain inputs and attributes. The tables were made by opening models in the
releases from 1.6 to 1.32, and from the lists of operators and kernels in the releases from 1.16 on. Value types are not
considered: a file that needs a kernel for an unusual type may need a later release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from onnxtool.model_file.domains import ALIAS

# Release, the highest IR version, and the highest opsets of ai.onnx and of ai.onnx.ml. An opset that a release reads
# but has no kernels for, such as opset 19 in 1.15, counts for the next release.
_RELEASES = (
    ("1.0", 6, 11, 2),
    ("1.3", 7, 12, 2),
    ("1.6", 7, 13, 2),
    ("1.8", 7, 14, 2),
    ("1.9", 8, 15, 2),
    ("1.11", 8, 16, 2),
    ("1.12", 8, 17, 3),
    ("1.14", 8, 18, 3),
    ("1.15", 9, 18, 3),
    ("1.16", 9, 19, 3),
    ("1.17", 9, 20, 4),
    ("1.18", 10, 21, 5),
    ("1.21", 10, 22, 5),
    ("1.23", 11, 23, 5),
    ("1.24", 13, 25, 5),
    ("1.25", 13, 26, 5),
    ("1.32", 14, 28, 5),
)
# Features that came later: an operator; `Operator/9`, with that many inputs; `Operator#6`, with its sixth input given;
# `Operator.attribute`; `Operator.attribute=8`, with a value of at least 8; and in ai.onnx, `Operator@22`, from that
# opset on.
_LATER_MICROSOFT = (
    ("1.9", "Attention.qkv_hidden_sizes"),
    ("1.10", "EmbedLayerNormalization/8"),
    ("1.11", "FusedMatMul.transBatchA FusedMatMul.transBatchB"),
    # EmbedLayerNormalization accepted position ids before, but not a single row of them for all texts.
    ("1.14", "Attention.mask_filter_value Attention.scale Attention/7 EmbedLayerNormalization/9 QuickGelu"),
    ("1.15", "Attention.do_rotary EmbedLayerNormalization.mask_index_type"),
    # In 1.15 MultiHeadAttention loads, but without a bias its results are wrong.
    ("1.16", "MultiHeadAttention"),
    ("1.16.2", "MatMulBnb4 MatMulNBits RotaryEmbedding SkipGroupNorm SkipSimplifiedLayerNormalization"),
    (
        "1.17",
        (
            "Attention.rotary_embedding_dim EPContext GemmFloat8 MatMulBnb4.training_mode MatMulBnb4.transB "
            "MatMulNBits.accuracy_level MultiHeadAttention.unidirectional RotaryEmbedding.num_heads "
            "RotaryEmbedding.rotary_embedding_dim WhisperBeamSearch"
        ),
    ),
    (
        "1.17.3",
        (
            "WhisperBeamSearch.beginning_timestamp_token_id WhisperBeamSearch.no_speech_token_id "
            "WhisperBeamSearch.no_timestamps_token_id WhisperBeamSearch.start_of_lm_token_id "
            "WhisperBeamSearch.transcribe_token_id WhisperBeamSearch.translate_token_id"
        ),
    ),
    ("1.18", "GemmaRotaryEmbedding GroupQueryAttention MatMulNBits/5 WhisperBeamSearch/15"),
    ("1.18.1", "EPContext.onnx_model_filename"),
    ("1.19", "MatMulNBits/6 RotaryEmbedding.is_packed_batching SparseAttention"),
    ("1.19.2", "GroupQueryAttention.smooth_softmax"),
    (
        "1.20",
        (
            "DecoderMaskedMultiHeadAttention DynamicTimeWarping GatherBlockQuantized GroupQueryAttention.softcap "
            "UnfoldTensor"
        ),
    ),
    ("1.21", "EPContext.max_size"),
    # Earlier releases refuse a bias shared by all texts or heads, or compute wrong results with it.
    ("1.21.1", "Attention#6 MultiHeadAttention#6"),
    ("1.22", "GroupQueryAttention/10 MatMulNBits.bits=8 MultiHeadAttention/9"),
    (
        "1.23",
        "GatherBlockQuantized.bits GroupQueryAttention.qk_output GroupQueryAttention/12 PagedAttention QMoE",
    ),
    ("1.23.2", "MoE QMoE.block_size"),
    ("1.24", "QMoE/12"),
    (
        "1.25",
        (
            "GroupQueryAttention.k_quant_type GroupQueryAttention.kv_cache_bit_width GroupQueryAttention.v_quant_type "
            "GroupQueryAttention/13 QMoE/15"
        ),
    ),
    ("1.25.1", "CausalConvWithState LinearAttention"),
    ("1.27", "MatMulNBitsMlp MatMulNBitsQkv QMoE.quant_type QMoE/16"),
    (
        "1.28",
        (
            "GroupQueryAttention.qk_norm_epsilon GroupQueryAttention/15 MatMulNBits.weight_prepacked "
            "QMoE.weights_prepacked"
        ),
    ),
    (
        "1.29",
        (
            "CausalConvWithState.state_window GroupQueryAttention.sliding_window_cache LinearAttention.state_window "
            "MRotaryEmbedding MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight PagedAttention.k_cache_dtype "
            "PagedAttention.k_quant_type PagedAttention.kv_cache_layout PagedAttention.qk_norm_epsilon "
            "PagedAttention.rotary_offset PagedAttention.v_cache_dtype PagedAttention.v_head_size "
            "PagedAttention.v_quant_type PagedAttention/11"
        ),
    ),
    (
        "1.30",
        (
            "CausalConvWithState.channels_last CausalConvWithState.dilation EngramGate GatedAdd GatedRMSNorm "
            "GroupQueryAttention.causal LinearAttentionGate NGramHashMapping PagedAttention.is_causal"
        ),
    ),
    (
        "1.31",
        (
            "BranchwiseRMSNorm DynamicSparseAttention EngramGate/6 GatedRMSNorm.activation HyperConnectionPostMix "
            "HyperConnectionPreMix NGramHashMapping.reset_on_eos NGramHashMapping/5 PackedSparseAttentionIndexer "
            "QMoE.accuracy_level QMoE.fc1_expert_weight_bits QMoE.fc2_expert_weight_bits QMoE.fc3_expert_weight_bits "
            "ScaledSiLU SparseAttentionIndexer SparsePagedAttention VarlenNGramHashMapping"
        ),
    ),
    (
        "1.32",
        (
            "CausalConvWithState.input_channel_offset CausalConvWithState.input_channels "
            "CausalConvWithState.state_channels_last CausalConvWithState.state_length "
            "CausalConvWithState.state_update_capacity ConvStateReplay DynamicSparseAttention.output_bf16 "
            "DynamicSparseAttention/18 GatedAdd/4 GatedDeltaNet GatedDeltaNetStateReplay GatherPacked "
            "GroupQueryAttention.k_norm_epsilon GroupQueryAttention.q_norm_epsilon GroupQueryAttention/17 "
            "HyperConnectionLowRankMix Mamba2Verify MatMulNBitsQLoRA MatMulPacked MoE.swiglu_limit_after_activation "
            "MoEGroupRouter MoEPacked PackedSparseAttentionIndexer.indexshare_state_policy "
            "PackedSparseAttentionIndexer.max_output_entries PackedSparseAttentionIndexer/19 "
            "PackedSparseAttentionIndexerMerge QMoE.swiglu_limit_after_activation RMSNormRotary RouterGateUpProj "
            "SpeculativePrefixCommit SwiGLU VarlenCausalConvWithState"
        ),
    ),
)
_LATER_ONNX = (
    ("1.19", "QuantizeLinear.block_size"),
    ("1.20", "QLinearMatMul@21"),
    ("1.25", "DeformConv LpNormalization@22 TensorScatter"),
    # No release has kernels for these.
    (
        "",
        (
            "GlobalLpPool@22 MaxRoiPool@22 Multinomial@22 RandomNormal@22 RandomNormalLike@22 RandomUniform@22 "
            "RandomUniformLike@22 RoiAlign@22"
        ),
    ),
)


class Usage(NamedTuple):
    """The features of an operator that its nodes use.

    Attributes:
        most_inputs: the largest number of inputs of a node, including omitted ones before the last.
        given_inputs: the positions, from 1 on, of inputs that at least one node gives.
        attributes: the largest integer of any node, by attribute name; 0 for other types.
    """

    most_inputs: int = 0
    given_inputs: frozenset[int] = frozenset()
    attributes: Mapping[str, int] = MappingProxyType({})


def least_onnxruntime(ir_version: int, opsets: Mapping[str, int], operators: Mapping[str, Usage]) -> str:
    """Return the first release that runs a model with these versions and operators; empty if none is known.

    Args:
        ir_version: the model's IR version.
        opsets: version by domain, as in `Structure`: ONNX's own is called `ai.onnx`.
        operators: the features used of each operator.
    """
    opset = opsets.get(ALIAS) or 1
    needed = [
        release
        for operator, usage in operators.items()
        for feature, release in _later().get(operator, ())
        if _needs(feature, usage, opset)
    ]
    versions = (
        release
        for release, max_ir, max_opset, max_ml in _RELEASES
        if ir_version <= max_ir and opset <= max_opset and opsets.get("ai.onnx.ml", 1) <= max_ml
    )
    first = next(versions, "")
    return max((first, *needed), key=_order) if first and "" not in needed else ""


def _order(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


@cache
def _later() -> dict[str, list[tuple[str, str]]]:
    """Return the later features of each operator, named as in `Stats.ops`, with their releases."""
    features: dict[str, list[tuple[str, str]]] = {}
    for operator, feature, release in _read_tables():
        features.setdefault(operator, []).append((feature, release))
    return features


def _read_tables() -> Iterator[tuple[str, str, str]]:
    for domain, table in (("com.microsoft::", _LATER_MICROSOFT), ("", _LATER_ONNX)):
        for release, items in table:
            for item in items.split():
                name = next((item[: item.index(sign)] for sign in "/#.@" if sign in item), item)
                yield domain + name, item[len(name) :], release


def _needs(feature: str, usage: Usage, opset: int) -> bool:
    """Whether nodes of this opset need a feature of their operator."""
    kind, detail = feature[:1], feature[1:]
    if kind == "/":
        return usage.most_inputs >= int(detail)
    if kind == "#":
        return int(detail) in usage.given_inputs
    if kind == "@":
        return opset >= int(detail)
    name, _, number = detail.partition("=")
    value = usage.attributes.get(name)
    return not kind or (value is not None and value >= int(number or value))
