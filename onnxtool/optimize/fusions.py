"""Count fused operators, and require them."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtool.errors import FusionError
from onnxtool.reports import FusionCount, Stats

# What a kind of fusion ends in. An operator of ai.onnx has no domain in its name.
_KINDS: dict[str, tuple[str, ...]] = {
    "attention": (
        "Attention",
        "com.microsoft::Attention",
        "com.microsoft::MultiHeadAttention",
        "com.microsoft::GroupQueryAttention",
        "com.microsoft::PackedAttention",
        "com.microsoft::PackedMultiHeadAttention",
    ),
    "layer_normalization": (
        "LayerNormalization",
        "RMSNormalization",
        "SimplifiedLayerNormalization",
        "com.microsoft::SkipLayerNormalization",
        "com.microsoft::SkipSimplifiedLayerNormalization",
        "com.microsoft::EmbedLayerNormalization",
    ),
    "gelu": (
        "Gelu",
        "com.microsoft::Gelu",
        "com.microsoft::BiasGelu",
        "com.microsoft::FastGelu",
        "com.microsoft::QuickGelu",
    ),
}


def count_fusions(stats: Stats) -> tuple[FusionCount, ...]:
    """Count the fused operators of a model; an attention a layer is expected where the metadata says the layers."""
    layers = stats.metadata.get("num_layers", "")
    expected = {"attention": int(layers) if layers.isdecimal() and len(layers) < 10 else None}
    return tuple(
        FusionCount(kind, expected.get(kind), sum(stats.ops.get(operator, 0) for operator in operators))
        for kind, operators in _KINDS.items()
    )


def require_attention(fusions: Sequence[FusionCount]) -> None:
    """Insist on a fused attention in every layer, or on one at all where the number of layers is not known.

    Raises:
        FusionError: there are fewer.
    """
    attention = next(count for count in fusions if count.kind == "attention")
    expected = 1 if attention.expected is None else attention.expected
    if attention.found < expected:
        raise FusionError(
            f"{attention.found} of {expected} attentions are fused, and --require_fusion asks for all",
            "export with --exporter torchscript, whose attention onnxruntime's fusions know",
        )
