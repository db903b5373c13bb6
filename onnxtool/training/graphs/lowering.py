"""Write a model so that the oldest onnxruntime that artifacts are for reads it: 1.17, of IR 9 and opset 20.

Operators that builds of onnxruntime for training alone have, FakeQuant and ScaledSum, become standard ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.errors import ArtifactError

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.autodiff.builder import Builder, Tensor

IR_VERSION = 9
HIGHEST_OPSET = 20
_REDEFINED = frozenset(("GroupNormalization",))  # in 21 its scale went from groups to channels


def lower(model: ir.Model) -> None:
    """Set the IR version, and lower the opset to 20 where all operators were the same then but for dtypes.

    Raises:
        ArtifactError: an operator is newer than that.
    """
    import onnx_ir.passes.common as common

    from onnxtool.autodiff.preparation import opset_of

    common.ClearMetadataAndDocStringPass()(model)  # IR 9 has none of nodes and values
    made = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *made):
        value.metadata_props.clear()
    _standardize(model)
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


def _standardize(model: ir.Model) -> None:
    """Replace the operators that no stock onnxruntime has."""
    import onnx_ir.passes.common as common

    from onnxtool.autodiff.builder import Builder

    build = Builder(model.graph)
    replaced = {
        node: _STANDARD[node.op_type](build, node)
        for node in model.graph
        if node.domain == "com.microsoft" and node.op_type in _STANDARD
    }
    if replaced:
        build.finish(replaced)
        common.NameFixPass()(model)  # nodes may have kept names whose values have gone
        common.RemoveUnusedOpsetsPass()(model)


def _fake_quantized(build: Builder, node: ir.Node) -> list[Tensor]:
    """Return the numbers rounded to `scale * (q - zero_point)` with q in a range, and where they were in it."""
    x, scale, zero = (build.tensor(value) for value in node.inputs if value is not None)
    lowest, highest = (
        build.constant(node.attributes.get_int(name, default), x.dtype)
        for name, default in (("quant_min", 0), ("quant_max", 255))
    )
    shifted = build.op("Round", x / scale) + zero
    inside = build.op("Not", build.op("Or", shifted < lowest, shifted > highest))
    return [(build.op("Clip", shifted, lowest, highest) - zero) * scale, inside][: len(node.outputs)]


def _scaled_sum(build: Builder, node: ir.Node) -> list[Tensor]:
    terms = [
        build.tensor(value) * node.attributes.get_float(f"scale_{place}", 1.0)
        for place, value in enumerate(node.inputs)
        if value is not None
    ]
    return [build.op("Sum", *terms)]


_STANDARD = {"FakeQuant": _fake_quantized, "ScaledSum": _scaled_sum}


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
