"""Prevent onnxruntime from fusing residuals into normalizations, where that is slower."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import is_weight, only_consumer, operands, producer, replace_and_erase
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_NORMALIZATIONS = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `LayerNormalization(Add(a, b), …)` by `LayerNormalization(Sum(a, b), …)`.

    `Add(Add(a, bias), b)` becomes `Sum(a, bias, b)`. When onnxruntime loads a file, it fuses an Add in front of a
    normalization into SkipLayerNormalization by default, which takes several times as long on the CPU. It does not fuse
    a Sum, which adds the same numbers in the same order.
    """
    num_changes = 0
    for node in list(model.graph):
        if node.domain or node.op_type not in _NORMALIZATIONS:
            continue
        add = producer(node.inputs[0], "Add")
        if add is None or operands(add, is_weight):
            continue
        scale = node.inputs[1] if len(node.inputs) > 1 else None
        if scale is None or scale.dtype != ir.DataType.FLOAT:  # the CPU has no Sum of float16
            continue
        total = Writer(add).node("Sum", _terms(add), like=add.outputs[0])
        replace_and_erase(add.outputs[0], total)
        num_changes += 1
    return Outcome(model, num_changes)


def _terms(add: ir.Node) -> list[ir.Value | None]:
    """Return the terms in their order; the bias of a linear layer that only this sum reads is one of them."""
    first, second = add.inputs
    for one, other in ((first, second), (second, first)):
        inner = producer(one, "Add")
        if inner is not None and one is not None and operands(inner, is_weight) and only_consumer(one, "Add") is add:
            return [*inner.inputs, other]
    return [first, second]


residual_sums = Pass("residual_sums", _apply)
