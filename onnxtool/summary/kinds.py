"""The operators that result from each kind of fusion; a separate module, so that `stats` loads nothing else."""

from __future__ import annotations

FUSED_OPERATORS: dict[str, frozenset[str]] = {
    "attention": frozenset(
        f"com.microsoft::{name}"
        for name in (
            *("Attention", "DecoderAttention", "DecoderMaskedMultiHeadAttention", "DecoderMaskedSelfAttention"),
            *("GroupQueryAttention", "LongformerAttention", "MultiHeadAttention", "PackedAttention"),
            *("PackedMultiHeadAttention", "PagedAttention", "QAttention", "QOrderedAttention"),
            *("QOrderedLongformerAttention", "SparseAttention"),
        )
    ),
    "layer_normalization": frozenset(
        {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
        | {"com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization"}
        | {"com.microsoft::EmbedLayerNormalization"}
    ),
    "gelu": frozenset(
        {
            "Gelu",
            "com.microsoft::Gelu",
            "com.microsoft::BiasGelu",
            "com.microsoft::FastGelu",
            "com.microsoft::QuickGelu",
        }
    ),
}
"""Kind to operators, named as in `Stats.ops`; an operator of ONNX has no domain in its name."""


def is_attention(operator: str) -> bool:
    """Whether an operator computes a whole attention; ONNX's does, and so does one of the same name in any domain."""
    return f"com.microsoft::{operator.rpartition(':')[2]}" in FUSED_OPERATORS["attention"]
