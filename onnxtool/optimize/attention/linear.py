"""Match linear layers in front of an attention: a MatMul with a weight and its bias, in the forms of all exporters.

Letters of shapes: B batch, S sequence, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtool.graph.edit import attribute, is_weight, operands, producer, tensor_of
from onnxtool.graph.shapes import Shapes


@dataclass(frozen=True)
class Linear:
    """`x @ weight + bias`.

    Attributes:
        x: [B, S, I].
        weight: an initializer [I, O].
        bias: an initializer [O], or None.
        part: which third of O, where one layer computes q, k and v; None for all of it.
    """

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    part: int | None = None


def find_linear(value: ir.Value, shapes: Shapes) -> Linear | None:
    """Match the linear layer that computes `value`, [B, S, O], or the third of one that computes all of q, k and v."""
    split = producer(value, "Split")
    if split is not None and split.inputs[0] is not None and len(split.outputs) == 3:
        sizes = {shapes.fixed(output, -1) for output in split.outputs}
        whole = _whole(split.inputs[0], shapes)
        if whole is None or len(sizes) != 1 or None in sizes or attribute(split, "axis", 0) not in (-1, 2):
            return None
        return Linear(whole.x, whole.weight, whole.bias, split.outputs.index(value))
    return _whole(value, shapes)


def _whole(value: ir.Value, shapes: Shapes) -> Linear | None:
    add = producer(value, "Add")
    if add is not None:
        sides = operands(add, lambda side: is_weight(side, 1))
        if sides is None or (matmul := _matmul(sides[1])) is None:
            return None
        bias, weight = sides[0], matmul[1]
        return Linear(*matmul, bias) if tensor_of(bias).shape[0] == tensor_of(weight).shape[1] else None
    matmul = _matmul(value)
    return Linear(*matmul, None) if matmul is not None else _flattened(value, shapes)


def _matmul(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return x and weight of a MatMul."""
    node = producer(value, "MatMul")
    if node is None or node.inputs[0] is None or node.inputs[1] is None or not is_weight(node.inputs[1], 2):
        return None
    return node.inputs[0], node.inputs[1]


def _flattened(value: ir.Value, shapes: Shapes) -> Linear | None:
    """Match `Reshape(Gemm(Reshape(x)))`, which flattens a batch of sequences to one matrix in between."""
    after = producer(value, "Reshape")
    gemm = None if after is None else producer(after.inputs[0], "Gemm")
    before = None if gemm is None else producer(gemm.inputs[0], "Reshape")
    if gemm is None or before is None or (x := before.inputs[0]) is None:
        return None
    is_plain = all(attribute(gemm, name, 1.0) == 1.0 for name in ("alpha", "beta"))
    is_plain = is_plain and not any(attribute(gemm, name, 0) for name in ("transA", "transB"))
    weight, bias = gemm.inputs[1], gemm.inputs[2] if len(gemm.inputs) > 2 else None
    if not is_plain or weight is None or not is_weight(weight, 2) or (bias is not None and not is_weight(bias, 1)):
        return None
    # Rows stay rows where the axes before the last are the same on both sides.
    outer, inner = shapes.shape(x), shapes.shape(value)
    if outer is None or inner is None or outer[:-1] != inner[:-1]:
        return None
    return Linear(x, weight, bias)
