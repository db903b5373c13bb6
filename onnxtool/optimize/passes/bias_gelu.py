"""Fuse the bias of a linear layer into the Gelu behind it."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import is_float, is_weight, only_consumer, operands, producer, replace_and_erase
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each

_WITH_BIAS = {"Gelu": "BiasGelu", "FastGelu": "FastGelu"}


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Gelu(Add(x, b))` by `BiasGelu(x, b)`, and `FastGelu(Add(x, b))` by `FastGelu(x, b)`."""
    found = [
        (node, add)
        for node in model.graph
        if node.domain == MICROSOFT
        and node.op_type in _WITH_BIAS
        and (len(node.inputs) == 1 or node.inputs[1] is None)
        and (add := producer(node.inputs[0], "Add")) is not None
    ]
    if not found:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    return rewrite_each(model, found, lambda match: _fuse(*match, shapes))


def _fuse(node: ir.Node, add: ir.Node, shapes: Shapes) -> str:
    """Write one operator with a bias; return why not where a precondition does not hold."""
    parts = operands(add, lambda one: is_weight(one, 1))
    length = None if parts is None else shapes.fixed(parts[0], 0)
    if parts is None or length is None or length != shapes.fixed(parts[1], -1):
        return "the bias is no vector as long as the last axis"
    bias, value = parts
    if not is_float(bias):
        return "neither float32 nor float16"
    if only_consumer(add.outputs[0], node.op_type, domain=MICROSOFT) is not node:
        return "the sum is read elsewhere"
    operator = _WITH_BIAS[node.op_type]
    replace_and_erase(
        node.outputs[0], Writer(node).node(operator, [value, bias], domain=MICROSOFT, like=node.outputs[0])
    )
    return ""


bias_gelu = Pass("bias_gelu", _apply)
