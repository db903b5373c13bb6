"""Convert weights and arithmetic to float16; inputs and outputs keep their types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory
from onnxtool.optimize.protos import restore_description, to_full_proto
from onnxtool.runtime.quiet import quiet

if TYPE_CHECKING:
    import onnx_ir as ir


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace float32 by float16, with Casts after the inputs, before the outputs, and around what has no float16."""
    import onnx_ir as ir
    from onnxruntime.transformers.float16 import convert_float_to_float16

    if not _has_float32_matrix(model):
        return Outcome(model, 0, "no float32 weights to convert")
    before = inventory(model)
    # It warns of every weight that float16 rounds to zero or cuts; the verification measures what that does.
    with quiet():
        converted = convert_float_to_float16(to_full_proto(model), keep_io_types=True)
    result = ir.from_proto(converted)
    result.graph.sort()  # the casts of inputs are appended at the end
    restore_description(result, model)
    return Outcome(result, count_changes(before, inventory(result)))


def _has_float32_matrix(model: ir.Model) -> bool:
    """Whether there is a weight to convert; scalars and vectors may have stayed float32 on purpose."""
    import onnx_ir as ir

    return any(
        value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) >= 2
        for value in model.graph.initializers.values()
    )


float16 = Pass("float16", _apply)
