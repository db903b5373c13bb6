"""Count fused operators, and require them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtool.errors import FusionError
from onnxtool.optimize.attention.scores import match_roots
from onnxtool.optimize.report import FusionCount, PassResult
from onnxtool.summary.figures import Stats
from onnxtool.summary.kinds import FUSED_OPERATORS


def expected_attentions(model: ir.Model) -> int:
    """Count the attentions of a graph: those that are an operator of onnxruntime, and those that are none yet."""
    operators = FUSED_OPERATORS["attention"]
    fused = sum(f"{node.domain}::{node.op_type}" in operators for node in model.graph)
    return fused + sum(1 for _ in match_roots(model.graph))


def count_fusions(stats: Stats, attentions: int) -> tuple[FusionCount, ...]:
    """Count the fused operators of a model that has `attentions` in all."""
    expected = {"attention": attentions}
    return tuple(
        FusionCount(kind, expected.get(kind), sum(stats.ops.get(operator, 0) for operator in operators))
        for kind, operators in FUSED_OPERATORS.items()
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
