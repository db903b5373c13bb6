"""Store equal initializers once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory

if TYPE_CHECKING:
    import onnx_ir as ir


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Let every use of an initializer go to the first one of equal dtype, shape and bytes."""
    import onnx_ir.passes.common as common

    before = inventory(model)
    # By hash first: comparing all weights with all others of their size would read them many times.
    common.DeduplicateHashedInitializersPass(size_limit=1 << 62)(model)
    common.RemoveUnusedNodesPass()(model)
    return Outcome(model, count_changes(before, inventory(model)))


deduplicate_initializers = Pass("deduplicate_initializers", _apply)
