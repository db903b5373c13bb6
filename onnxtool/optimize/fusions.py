"""Count fused operators, and require them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnxtool.errors import FusionError
from onnxtool.optimize.attention.scores import match_roots
from onnxtool.optimize.report import FusionCount, PassResult
from onnxtool.summary.figures import Stats

if TYPE_CHECKING:
    import onnx_ir as ir

# What a kind of fusion ends in. An operator of ai.onnx has no domain in its name.
_KINDS: dict[str, tuple[str, ...]] = {
    "attention": (
        "com.microsoft::Attention",
        "com.microsoft::MultiHeadAttention",
        "com.microsoft::GroupQueryAttention",
        "com.microsoft::PackedAttention",
        "com.microsoft::PackedMultiHeadAttention",
        "com.microsoft::QAttention",
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


def expected_attentions(model: ir.Model) -> int:
    """Count the attentions of a graph: those that are an operator of onnxruntime, and those that are none yet."""
    operators = _KINDS["attention"]
    fused = sum(f"{node.domain}::{node.op_type}" in operators for node in model.graph)
    return fused + sum(1 for _ in match_roots(model.graph))


def count_fusions(stats: Stats, attentions: int) -> tuple[FusionCount, ...]:
    """Count the fused operators of a model that has `attentions` in all."""
    expected = {"attention": attentions}
    return tuple(
        FusionCount(kind, expected.get(kind), sum(stats.ops.get(operator, 0) for operator in operators))
        for kind, operators in _KINDS.items()
    )


def require_attention(fusions: Sequence[FusionCount], passes: Sequence[PassResult]) -> None:
    """Insist on at least one attention, and on every one being fused.

    Raises:
        FusionError: there are fewer; it says why the attention pass left them alone.
    """
    attention = next(count for count in fusions if count.kind == "attention")
    if not attention.expected:
        raise FusionError(
            "no attention was found in the graph, and --require_fusion asks for them",
            "leave --require_fusion out for a model without attention",
        )
    if attention.found < attention.expected:
        reason = next((result.note for result in passes if result.name == "attention" and result.note), "")
        raise FusionError(
            f"{attention.found} of {attention.expected} attentions are fused, and --require_fusion asks for all"
            + (f": {reason}" if reason else ""),
            "export the model another way (--exporter), or leave --require_fusion out",
        )
