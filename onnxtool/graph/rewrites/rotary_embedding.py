"""Match rotary embeddings: `x * cos + concat(-x[D/2:], x[:D/2]) * sin`.

Letters of shapes: B batch, S sequence, H heads, D size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import attribute, constant, operands, producer

_END = np.iinfo(np.int32).max  # a Slice beyond this ends where its input does
_LAST = (-1, 3)


@dataclass(frozen=True)
class Rotation:
    """`value * cosine + turned * sine`.

    Attributes:
        value: [B, H, S, D].
        turned: the second half of `value`, negated, before the first half.
        cosine: [1 or B, 1, S, D], with two equal halves; so has `sine`.
    """

    node: ir.Node
    value: ir.Value
    turned: ir.Value
    cosine: ir.Value
    sine: ir.Value


def match_rotation(node: ir.Node) -> Rotation | None:
    """Match an Add. Callers check that its parts are halves of equal size, and that halves of the cosines are equal."""
    if node.domain or node.op_type != "Add":
        return None
    products = [producer(value, "Mul") for value in node.inputs]
    for plain, turned in (products, products[::-1]):
        if plain is None or turned is None:
            continue
        parts = operands(turned, _turned)
        source = None if parts is None else _turned(parts[0])
        if parts is None or source is None or source not in plain.inputs:
            continue
        cosine = plain.inputs[1] if plain.inputs[0] is source else plain.inputs[0]
        if cosine is not None:
            return Rotation(node, source, parts[0], cosine, parts[1])
    return None


def _turned(value: ir.Value | None) -> ir.Value | None:
    """Return x where `value` is concat(-x[D/2:], x[:D/2]) over the last axis, else None."""
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2 or attribute(concat, "axis") not in _LAST:
        return None
    negated = producer(concat.inputs[0], "Neg")
    second = None if negated is None else _half(negated.inputs[0], second=True)
    first = _half(concat.inputs[1], second=False)
    return first if first is not None and first is second else None


def _half(value: ir.Value | None, *, second: bool) -> ir.Value | None:
    """Return x where `value` is one half of it, cut off the last axis; its length is not checked here."""
    node = producer(value, "Slice", "Split")
    if node is None or value is None:
        return None
    if node.op_type == "Split":
        is_right = len(node.outputs) == 2 and node.outputs[second] is value and attribute(node, "axis", 0) in _LAST
        return node.inputs[0] if is_right else None
    starts, ends, axes, steps = (
        constant(one) if one is not None else None for one in [*node.inputs[1:], *[None] * 4][:4]
    )
    if starts is None or ends is None or axes is None or axes.tolist() not in [[one] for one in _LAST]:
        return None
    if steps is not None and steps[0] != 1:
        return None
    is_right = (starts[0] != 0 and ends[0] >= _END) if second else starts[0] == 0
    return node.inputs[0] if is_right else None
