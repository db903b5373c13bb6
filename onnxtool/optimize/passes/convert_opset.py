"""Convert a graph of an older opset to the passes' target opset, if there is something for them to do."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.shapes import infer_values
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.weights import from_light_proto, to_light_proto
from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory

_FIRST_OPSET, _OPSET = 7, 17  # the oldest that onnxruntime guarantees to read, and the first with LayerNormalization
_IR_VERSION = 8  # the least of opset 17
# LayerNormalization needs 17 and has a root; sizes of single axes need 15.
_PATTERNS = ("Sqrt", "Shape")
_INT8_OPSET = 11  # of DynamicQuantizeLinear
# onnx's converter copies these unchanged, but their meaning changes with that opset.
_OTHER_MEANING = {"Hardmax": 13, "Resize": 11, "Upsample": 11, "Scan": 9}
_FLATTENING = ("Softmax", "LogSoftmax")  # before opset 13, over all axes from the one that they name
_MASK_OPSET = 10  # before, the mask of Dropout is a float


def _apply(model: ir.Model, context: Context) -> Outcome:
    """Convert to opset 17 with onnx's converter, such as `Squeeze<axes=[1]>(x)` to `Squeeze(x, [1])`.

    onnxscript's converter begins with opset 18. A graph without a normalization or sizes to simplify, and, for int8,
    of opset 11 or later, keeps its opset.
    """
    opset = default_opset(model.opset_imports)
    operators = {node.op_type for node in model.graph.all_nodes() if not node.domain}
    is_below_int8 = opset < _INT8_OPSET and context.precision in ("int8", "uint8", "auto")
    if not 0 < opset < _OPSET or (operators.isdisjoint(_PATTERNS) and not is_below_int8):
        return Outcome(model, 0)
    reason = _obstacle(model, opset, operators)
    if reason:
        return Outcome(model, 0, f"left in opset {opset}: {reason}")
    from onnx.version_converter import ConvertError, convert_version

    before = inventory(model)
    if not operators.isdisjoint(_FLATTENING):
        _note_ranks(model)
    try:
        result = from_light_proto(convert_version(to_light_proto(model), _OPSET), model)
    except (ConvertError, RuntimeError, IndexError) as error:  # the last two from C++
        reason = str(error).strip().splitlines()[0].rpartition(": ")[2]
        return Outcome(model, 0, f"left in opset {opset}: onnx's converter to {_OPSET} fails: {reason}")
    result.ir_version = max(model.ir_version, _IR_VERSION)
    # Counts the opset import itself, as the graph may need no other change.
    return Outcome(result, 1 + count_changes(before, inventory(result)), f"from opset {opset} to {_OPSET}")


def _note_ranks(model: ir.Model) -> None:
    """Record the rank of each Softmax input: if it is unknown, the converter writes a Flatten and two Reshape nodes."""
    values = infer_values(to_light_proto(model)).values
    for node in model.graph:
        value = node.inputs[0] if node.op_type in _FLATTENING else None
        known = None if value is None else values.get(str(value.name))
        if value is not None and value.shape is None and known is not None and known.shape is not None:
            value.dtype, value.shape = ir.DataType(known.dtype), ir.Shape([None] * len(known.shape))


def _obstacle(model: ir.Model, opset: int, operators: set[str]) -> str:
    """Return why the converter would drop or change something; empty if it would not."""
    if opset < _FIRST_OPSET:
        return f"conversions begin with opset {_FIRST_OPSET}"
    if model.functions:
        return "onnx's converter drops model-local functions"
    for name, first in _OTHER_MEANING.items():
        if name in operators and opset < first:
            return f"{name} means something else from opset {first} on"
    masks = (node.outputs[1] for node in model.graph.all_nodes() if node.op_type == "Dropout" and len(node.outputs) > 1)
    if opset < _MASK_OPSET and any(mask.uses() or mask.is_graph_output() for mask in masks):
        return f"the mask of Dropout is no float from opset {_MASK_OPSET} on"
    return ""


convert_opset = Pass("convert_opset", _apply)
