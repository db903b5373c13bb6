"""Write a model so that the oldest onnxruntime that artifacts are for reads it: 1.17, of IR 9 and opset 20."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.errors import ArtifactError

if TYPE_CHECKING:
    import onnx_ir as ir

IR_VERSION = 9
HIGHEST_OPSET = 20
_REDEFINED = frozenset(("GroupNormalization",))  # in 21 its scale went from groups to channels


def lower(model: ir.Model) -> None:
    """Set the IR version, and lower the opset to 20 where all operators were the same then but for dtypes.

    Raises:
        ArtifactError: an operator is newer than that.
    """
    from onnxtool.training.autodiff.preparation import opset_of

    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "onnxtool", None
    model.metadata_props.clear()
    opset = opset_of(model)
    if opset <= HIGHEST_OPSET:
        return
    changed = sorted({node.op_type for node in model.graph.all_nodes() if not _is_the_same(node, opset)})
    if changed:
        raise ArtifactError(
            f"the model is of opset {opset}, and {', '.join(changed)} of it is not what opset {HIGHEST_OPSET} has",
            f"export it again with --opset {HIGHEST_OPSET}, so that onnxruntime 1.17 and browsers read it",
        )
    for graph in model.graphs():
        graph.opset_imports[""] = HIGHEST_OPSET


def _is_the_same(node: ir.Node, opset: int) -> bool:
    """Return whether an operator takes the same inputs and attributes in the old opset."""
    from onnx import defs

    if node.op_type in _REDEFINED:
        return False
    if node.domain not in ("", "ai.onnx"):
        return True
    if not defs.has(node.op_type) or not _existed(node.op_type):
        return False
    new, old = (defs.get_schema(node.op_type, version, "") for version in (opset, HIGHEST_OPSET))
    used = set(node.attributes)
    return used <= set(old.attributes) and len(node.inputs) <= old.max_input and new.max_output >= len(node.outputs)


def _existed(op_type: str) -> bool:
    from onnx import defs

    try:
        defs.get_schema(op_type, HIGHEST_OPSET, "")
    except defs.SchemaError:
        return False
    return True
