"""Leave out the subtraction of the maximum in front of a Softmax, which subtracts it as well."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import attribute, producer, reduced_axes, remove_unused
from onnxtool.optimize.pipeline import Context, Outcome, Pass


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Softmax(x - ReduceMax(x))` by `Softmax(x)`, as gpt-oss has it: two passes over the scores less."""
    num_changes = 0
    for node in list(model.graph):
        if node.domain or node.op_type not in ("Softmax", "LogSoftmax"):
            continue
        sub = producer(node.inputs[0], "Sub")
        maximum = None if sub is None else producer(sub.inputs[1], "ReduceMax")
        if sub is None or maximum is None or maximum.inputs[0] is not sub.inputs[0]:
            continue
        # The axis 1 of old ReduceMax and Softmax is not taken for the last: their ranks are not looked up here.
        if reduced_axes(maximum) == [-1] and attribute(node, "axis", -1) == -1 and attribute(maximum, "keepdims", 1):
            node.replace_input_with(0, sub.inputs[0])
            remove_unused(model.graph, [sub])
            num_changes += 1
    return Outcome(model, num_changes)


softmax_maximum = Pass("softmax_maximum", _apply)
