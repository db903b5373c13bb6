"""Keep onnxruntime from fusing residuals into normalizations, where that is slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.graph.edit import is_weight, only_consumer, operands, producer, replace_and_erase
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass

if TYPE_CHECKING:
    import onnx_ir as ir

_NORMALIZATIONS = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Add(a, b)` in front of a normalization by `Sum(a, b)`, and `Add(Add(a, bias), b)` by `Sum(a, bias, b)`.

    Every session of onnxruntime makes SkipLayerNormalization of the Add when it loads a file, unless it is told not to,
    and on the CPU that takes several times as long as the two apart. It leaves a Sum alone, which computes the same in
    the same order.
    """
    import onnx_ir as ir

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
    """Return what is added up, in order: the bias of a linear layer that only this sum reads is a term of its own."""
    first, second = add.inputs
    for one, other in ((first, second), (second, first)):
        inner = producer(one, "Add")
        if inner is not None and one is not None and operands(inner, is_weight) and only_consumer(one, "Add") is add:
            return [*inner.inputs, other]
    return [first, second]


residual_sums = Pass("residual_sums", _apply)
