"""Fuse a linear layer on a matrix into one Gemm."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import is_float, is_weight, only_consumer, operands, producer, replace_and_erase
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each

_FIRST_OPSET = 7  # before, Gemm does not broadcast by default


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Add(MatMul(x, W), b)` by `Gemm(x, W, b)`, where x is a matrix, as Gemm takes no higher rank."""
    found = [
        (node, parts[0], times)
        for node in model.graph
        if not node.domain
        and node.op_type == "Add"
        and (parts := operands(node, lambda one: is_weight(one, 1))) is not None
        and (times := producer(parts[1], "MatMul")) is not None
        and is_weight(times.inputs[1], 2)
    ]
    if not found or default_opset(model.opset_imports) < _FIRST_OPSET:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    matrices = [row for row in found if shapes.rank(row[2].inputs[0]) in (None, 2)]
    return rewrite_each(model, matrices, lambda match: _fuse(*match, shapes))


def _fuse(add: ir.Node, bias: ir.Value, times: ir.Node, shapes: Shapes) -> str:
    """Write one Gemm; return why not where a precondition does not hold."""
    value, weight = times.inputs
    if shapes.rank(value) is None:
        return "the rank of the input is not known"
    if shapes.fixed(bias, 0) != shapes.fixed(weight, 1):
        return "the bias is not as long as the last axis"
    if not is_float(bias):
        return "neither float32 nor float16"
    if only_consumer(times.outputs[0], "Add") is not add:
        return "the output of the MatMul is read elsewhere"
    replace_and_erase(add.outputs[0], Writer(add).node("Gemm", [value, weight, bias], like=add.outputs[0]))
    return ""


matmul_add = Pass("matmul_add", _apply)
