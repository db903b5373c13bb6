"""Dtypes and shapes of all values of a graph, which rules ask for; the axes keep their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def infer_types(model: ir.Model) -> None:
    """Note dtype and shape of every value of the main graph where they are not known yet and can be inferred."""
    _infer(model)
    if _note_pieces(model):
        _infer(model)


def _note_pieces(model: ir.Model) -> bool:
    """Note the other axes of pieces whose sizes are computed, which onnx leaves out, and say if there were any.

    The function of RotaryEmbedding has such.
    """
    import onnx_ir as ir

    found = False
    for node in model.graph:
        whole = node.inputs[0].shape if node.op_type == "Split" and node.inputs[0] is not None else None
        if whole is None or all(value.shape is not None for value in node.outputs):
            continue
        attribute = node.attributes.get("axis")
        axis = (0 if attribute is None else attribute.as_int()) % len(whole)
        for value in node.outputs:
            value.shape = ir.Shape([None if place == axis else size for place, size in enumerate(whole)])
        found = True
    return found


def _infer(model: ir.Model) -> None:
    import onnx
    import onnx_ir as ir

    from onnxtool.graph.shape_proxies import with_stand_ins

    inferred = onnx.shape_inference.infer_shapes(with_stand_ins(model), data_prop=True).graph
    found = {value.name: value.type for value in (*inferred.value_info, *inferred.output)}
    for node in model.graph:
        if node.op_type == "SimplifiedLayerNormalization" and len(node.outputs) > 1:
            stash = node.attributes.get("stash_type")  # the stand-in has one output
            node.outputs[1].dtype = ir.DataType.FLOAT if stash is None else ir.DataType(stash.as_int())
        for value in node.outputs:
            if not (known := found.get(value.name)) or not known.HasField("tensor_type"):
                continue
            shape = ir.serde.deserialize_type_proto_for_shape(known)
            if value.dtype is None:
                value.dtype = ir.DataType(known.tensor_type.elem_type)
            if shape is not None:
                value.shape = shape if value.shape is None else _merge(value.shape, shape)


def _merge(known: ir.Shape, inferred: ir.Shape) -> ir.Shape:
    """Keep a size or a name that is known, and take over what is not."""
    import onnx_ir as ir

    if len(known) != len(inferred):
        return inferred
    return ir.Shape([_better(one, other) for one, other in zip(known, inferred, strict=True)])


def _better(known: int | ir.SymbolicDim, inferred: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
    if isinstance(known, int):
        return known
    return inferred if isinstance(inferred, int) or known.value is None else known
