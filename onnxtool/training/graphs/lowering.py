"""Write a model so that the oldest onnxruntime that artifacts support reads it: 1.17, with IR 9 and opset 20."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx import defs

from onnxtool.errors import ArtifactError
from onnxtool.graph.edit import constant, only_consumer, producer
from onnxtool.model_file.domains import default_opset
from onnxtool.training.graphs.decomposition import decompose_training_operators

IR_VERSION = 9
HIGHEST_OPSET = 20
_REDEFINED = frozenset(("GroupNormalization",))  # opset 21 changed its scale from groups to channels


def lower(model: ir.Model) -> None:
    """Set the IR version, and lower the opset to 20 if all operators are the same there except for dtypes.

    Raises:
        ArtifactError: an operator is newer.
    """
    common.ClearMetadataAndDocStringPass()(model)  # IR 9 has no metadata of nodes and values
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *made):
        value.metadata_props.clear()
    decompose_training_operators(model)
    for graph in model.graphs():
        divide_at_once(graph)
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "onnxtool", None
    model.metadata_props.clear()
    opset = default_opset(model.opset_imports)
    if opset <= HIGHEST_OPSET:
        return
    changed = sorted({node.op_type for node in model.graph.all_nodes() if not _is_unchanged(node, opset)})
    if changed:
        raise ArtifactError(
            f"the model is of opset {opset}, and opset {HIGHEST_OPSET} has no such {', '.join(changed)}",
            f"export it again with --opset {HIGHEST_OPSET}, so that onnxruntime 1.17 and browsers read it",
        )
    for graph in model.graphs():
        graph.opset_imports[""] = HIGHEST_OPSET


def divide_at_once(graph: ir.Graph | ir.Function) -> None:
    """Turn `x * (1 / y)` into `x / y`, on which onnxruntime 1.17 to 1.20 end the process while they do the same."""
    for node in list(graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for place, factor in enumerate(node.inputs):
            division = producer(factor, "Div")
            if division is None or factor is None or only_consumer(factor) is not node:
                continue
            one = constant(division.inputs[0])
            if one is None or one.shape != () or one != 1:
                continue
            node.op_type = "Div"
            node.replace_input_with(0, node.inputs[1 - place])
            node.replace_input_with(1, division.inputs[1])
            graph.remove(division, safe=True)
            break


def _is_unchanged(node: ir.Node, opset: int) -> bool:
    """Return whether an operator takes the same inputs and attributes in the highest supported opset."""
    if node.op_type in _REDEFINED:
        return False
    if node.domain:
        return True
    try:
        new, old = (defs.get_schema(node.op_type, version, "") for version in (opset, HIGHEST_OPSET))
    except defs.SchemaError:
        return False
    attributes = set(node.attributes)
    is_known = attributes <= set(old.attributes) and len(node.inputs) <= old.max_input
    return is_known and new.max_output >= len(node.outputs)
