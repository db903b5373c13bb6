"""Run onnxoptimizer's eliminations and structural fusions, to a fixed point, without the weights."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.protos import from_light_proto, to_light_proto
from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory

# The passes of onnxoptimizer that need no weights. Left out: fuse_qkv, fuse_bn_into_conv and fuse_add_bias_into_conv
# compute with weights; eliminate_duplicate_initializer compares them; rewrite_where changes the graph for TensorRT;
# eliminate_consecutive_idempotent_ops joins two Reshape also where the second copies a size, which is another one then.
_NAMES = (
    "extract_constant_to_initializer",
    "eliminate_identity",
    "eliminate_nop_cast",
    "eliminate_nop_concat",
    "eliminate_nop_dropout",
    "eliminate_nop_expand",
    "eliminate_nop_flatten",
    "eliminate_nop_pad",
    "eliminate_nop_reshape",
    "eliminate_nop_split",
    "eliminate_nop_transpose",
    "eliminate_nop_with_unit",
    "eliminate_if_with_const_cond",
    "eliminate_shape_gather",
    "eliminate_slice_after_shape",
    "eliminate_shape_op",
    "fuse_concat_into_reshape",
    "fuse_consecutive_concats",
    "fuse_consecutive_reduce_unsqueeze",
    "fuse_consecutive_slices",
    "fuse_consecutive_squeezes",
    "fuse_consecutive_transposes",
    "fuse_consecutive_unsqueezes",
    "eliminate_common_subexpression",
    "eliminate_deadend",
    "eliminate_unused_initializer",
)
# onnxoptimizer's time grows with the square of the number of nodes: 2 s for 3,000, 30 s for 12,000, minutes for 30,000.
MAX_NODES = 10_000


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Simplify the graph: `Transpose(Transpose(x))` becomes one Transpose, `Add(x, 0)` becomes x, and so on."""
    import onnxoptimizer

    if model.functions:
        return Outcome(model, 0, "left alone: onnxoptimizer drops model-local functions")
    if (nodes := sum(1 for _ in model.graph.all_nodes())) > MAX_NODES:
        return Outcome(model, 0, f"left alone: onnxoptimizer takes minutes for {nodes:,} nodes, limit {MAX_NODES:,}")
    before = inventory(model)
    simplified = onnxoptimizer.optimize(to_light_proto(model), list(_NAMES), fixed_point=True)
    result = from_light_proto(simplified, model)
    return Outcome(result, count_changes(before, inventory(result)))


onnxoptimizer_cleanup = Pass("onnxoptimizer_cleanup", _apply)
