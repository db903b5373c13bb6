"""Transpose weights once, when the model is saved, instead of in every run."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import (
    attribute,
    drop_unused,
    is_float,
    is_weight,
    producer,
    replace_and_erase,
    tensor_of,
    value_graph,
)
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `MatMul(x, Transpose(W))` by `MatMul(x, V)`, where V is the transposed weight, computed on saving.

    Where another node reads W, such as the embedding that an output layer is tied to, V would be a second copy: then it
    becomes `FusedMatMul<transB=1>(x, W)`, and W stays one tensor.
    """
    found = [
        (node, transpose)
        for node in model.graph
        if not node.domain
        and node.op_type == "MatMul"
        and (transpose := producer(node.inputs[1], "Transpose")) is not None
        and is_weight(transpose.inputs[0], 2)
        and attribute(transpose, "perm", [1, 0]) == [1, 0]
    ]
    if not found:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    made: dict[ir.Value, ir.Value] = {}
    outcome = rewrite_each(model, found, lambda match: _fuse(*match, shapes, made))
    drop_unused(made)
    return outcome


def _fuse(node: ir.Node, transpose: ir.Node, shapes: Shapes, made: dict[ir.Value, ir.Value]) -> str:
    """Rewrite one MatMul; return why not where a precondition does not hold."""
    value, weight = node.inputs[0], transpose.inputs[0]
    if value is None or weight is None or not is_float(weight):
        return "neither float32 nor float16"
    writer = Writer(node)
    if weight in made or _only_multiplied(weight):
        if weight not in made:
            made[weight] = writer.initializer(_transposed(weight), f"{weight.name}_transposed")
        fused = writer.node("MatMul", [value, made[weight]], like=node.outputs[0])
    elif (shapes.rank(value) or 0) < 2:  # 0: not known
        return "the input is not known to have two axes or more"
    else:
        attributes = {"transB": 1}
        fused = writer.node("FusedMatMul", [value, weight], attributes, domain=MICROSOFT, like=node.outputs[0])
    replace_and_erase(node.outputs[0], fused)
    return ""


def _only_multiplied(weight: ir.Value) -> bool:
    """Whether a weight is only transposed and then the right operand of MatMuls."""
    return not weight.is_graph_output() and all(
        reader.op_type == "Transpose"
        and not reader.domain
        and reader.graph is value_graph(weight)
        and attribute(reader, "perm", [1, 0]) == [1, 0]
        and not reader.outputs[0].is_graph_output()
        and all(
            place == 1 and user.op_type == "MatMul" and not user.domain and user.graph is reader.graph
            for user, place in reader.outputs[0].uses()
        )
        for reader, _ in weight.uses()
    )


def _transposed(weight: ir.Value) -> ir.TensorProtocol:
    """Return the transposed weight, float [N, M] of [M, N], computed when its bytes are read."""
    tensor = tensor_of(weight)

    def evaluate() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(tensor.numpy().T))

    return ir.LazyTensor(evaluate, tensor.dtype, ir.Shape(tensor.shape.numpy()[::-1]))


transposed_weights = Pass("transposed_weights", _apply)
