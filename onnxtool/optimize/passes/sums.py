"""Write sums as nodes of their own, where onnxruntime's operator for a sum and what follows it is slower on the CPU."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import is_weight, only_consumer, operands, producer, replace_and_erase
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_NORMALIZATIONS = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `LayerNormalization(Add(a, b), …)` by `LayerNormalization(Sum(a, b), …)`, and `BiasGelu` likewise.

    `Add(Add(a, bias), b)` becomes `Sum(a, bias, b)`, and `BiasGelu(x, b)` becomes `Gelu(Sum(x, b))`. When onnxruntime
    loads a file, it fuses an Add in front of these into SkipLayerNormalization and BiasGelu by default. On the CPU the
    first takes several times as long, the second a third longer. It does not fuse a Sum, which adds the same numbers in
    the same order.
    """
    num_changes = 0
    for node in list(model.graph):
        if (node.domain, node.op_type) == (MICROSOFT, "BiasGelu"):
            num_changes += _write_gelu(node)
        elif not node.domain and node.op_type in _NORMALIZATIONS:
            num_changes += _write_residual(node)
    return Outcome(model, num_changes)


def _write_gelu(node: ir.Node) -> bool:
    """Write bias and Gelu one after the other; return whether that was done."""
    bias, result = node.inputs[1], node.outputs[0]
    if bias is None or bias.dtype != ir.DataType.FLOAT:  # the CPU has no Sum of float16
        return False
    writer = Writer(node)
    total = writer.node("Sum", node.inputs, like=result)
    replace_and_erase(result, writer.node("Gelu", [total], domain=MICROSOFT, like=result))
    return True


def _write_residual(node: ir.Node) -> bool:
    """Write the residual in front of a normalization as a Sum; return whether there is one."""
    add = producer(node.inputs[0], "Add")
    if add is None or operands(add, is_weight):
        return False
    scale = node.inputs[1] if len(node.inputs) > 1 else None
    if scale is None or scale.dtype != ir.DataType.FLOAT:  # the CPU has no Sum of float16
        return False
    replace_and_erase(add.outputs[0], Writer(add).node("Sum", _terms(add), like=add.outputs[0]))
    return True


def _terms(add: ir.Node) -> list[ir.Value | None]:
    """Return the terms in their order; the bias of a linear layer that only this sum reads is one of them."""
    first, second = add.inputs
    for one, other in ((first, second), (second, first)):
        inner = producer(one, "Add")
        if inner is not None and one is not None and operands(inner, is_weight) and only_consumer(one, "Add") is add:
            return [*inner.inputs, other]
    return [first, second]


sums = Pass("sums", _apply)
