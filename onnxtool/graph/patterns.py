"""Match patterns that several rewrites look for: divisions by a root mean square, and rotary embeddings.

Letters: B batch, S sequence, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import attribute, constant, only_consumer, operands, producer, reduced_axes, scalar


@dataclass(frozen=True)
class Normalized:
    """A value divided by its root mean square over the last axis.

    Attributes:
        value: the dividend.
        epsilon: the number added to the mean square.
        nodes: the nodes of the pattern.
        factor: the reciprocal of the root, if the division is a multiplication by it.
    """

    value: ir.Value
    epsilon: float
    nodes: tuple[ir.Node, ...]
    factor: ir.Value | None = None


def match_normalized(node: ir.Node) -> Normalized | None:
    """Match `x / Sqrt(ReduceMean(x ** 2) + epsilon)`, as a Div or as a Mul by the reciprocal of the root."""
    if len(node.inputs) != 2 or node.domain:
        return None
    first, second = node.inputs
    if node.op_type == "Div":
        return _match_root(first, second, (node,))
    if node.op_type != "Mul":
        return None
    for value, inverse in ((first, second), (second, first)):
        reciprocal = producer(inverse, "Reciprocal", "Div")
        if reciprocal is None or (reciprocal.op_type == "Div" and scalar(reciprocal.inputs[0]) != 1):
            continue
        if (normalized := _match_root(value, reciprocal.inputs[-1], (node, reciprocal))) is not None:
            return replace(normalized, factor=inverse)
    return None


def scaled(normalized: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return the scale and result of the Mul that is the only reader of a normalized value, or None."""
    node = only_consumer(normalized, "Mul")
    if node is None:
        return None
    scale = node.inputs[1] if node.inputs[0] is normalized else node.inputs[0]
    return None if scale is None else (scale, node.outputs[0])


def mean_of(node: ir.Node | None) -> ir.Value | None:
    """Return the input of a ReduceMean over the last axis with keepdims; None for any other node."""
    if node is None or node.op_type != "ReduceMean" or node.domain or not attribute(node, "keepdims", 1):
        return None
    value, axes = node.inputs[0], reduced_axes(node)
    if value is None or axes is None or len(axes) != 1:
        return None
    last = axes[0] == -1 or (value.shape is not None and axes[0] == len(value.shape) - 1)
    return value if last else None


def _match_root(value: ir.Value | None, root: ir.Value | None, nodes: tuple[ir.Node, ...]) -> Normalized | None:
    sqrt = producer(root, "Sqrt")
    add = None if sqrt is None else producer(sqrt.inputs[0], "Add")
    parts = None if add is None else operands(add, lambda operand: scalar(operand) is not None)
    mean = None if parts is None else producer(parts[1], "ReduceMean")
    square = producer(mean_of(mean))
    if value is None or sqrt is None or add is None or parts is None or mean is None or square is None:
        return None
    epsilon = scalar(parts[0])
    base = _base_of(square)
    if epsilon is None or epsilon < 0 or len(parts[0].shape or ()) > 1 or not _are_equal(base, value):
        return None
    twin = () if base is value or base is None else (base.producer(),)
    return Normalized(value, epsilon, (*nodes, sqrt, add, mean, square, *(node for node in twin if node is not None)))


def _base_of(square: ir.Node) -> ir.Value | None:
    """Return the base of a square; None if the node is not a square."""
    if len(square.inputs) != 2:
        return None
    first, second = square.inputs
    is_square = scalar(second) == 2 if square.op_type == "Pow" else square.op_type == "Mul" and first is second
    return first if is_square else None


def _are_equal(first: ir.Value | None, second: ir.Value) -> bool:
    """Return whether two values are equal or equal differences: exporters compute x minus its mean twice."""
    if first is second:
        return True
    left, right = producer(first, "Sub"), producer(second, "Sub")
    return left is not None and right is not None and tuple(left.inputs) == tuple(right.inputs)


_END = np.iinfo(np.int32).max  # a Slice beyond this ends where its input does
_LAST = (-1, 3)


@dataclass(frozen=True)
class Rotation:
    """`value * cosine + turned * sine`.

    Attributes:
        value: [B, H, S, D].
        turned: the second half of `value`, negated, before the first half.
        cosine: [1 or B, 1, S, D], with two equal halves; `sine` is the same.
    """

    node: ir.Node
    value: ir.Value
    turned: ir.Value
    cosine: ir.Value
    sine: ir.Value


def match_rotation(node: ir.Node) -> Rotation | None:
    """Match an Add. Callers must check that its parts are halves of equal size, and cosine halves equal."""
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
    """Return x if `value` is concat(-x[D/2:], x[:D/2]) over the last axis, else None."""
    concat = producer(value, "Concat")
    if concat is None or len(concat.inputs) != 2 or attribute(concat, "axis") not in _LAST:
        return None
    negated = producer(concat.inputs[0], "Neg")
    second = None if negated is None else _half(negated.inputs[0], second=True)
    first = _half(concat.inputs[1], second=False)
    return first if first is not None and first is second else None


def _half(value: ir.Value | None, *, second: bool) -> ir.Value | None:
    """Return x if `value` is one half of it, sliced along the last axis; the length is not checked here."""
    node = producer(value, "Slice", "Split")
    if node is None or value is None:
        return None
    if node.op_type == "Split":
        is_right = len(node.outputs) == 2 and node.outputs[second] is value and attribute(node, "axis", 0) in _LAST
        return node.inputs[0] if is_right else None
    starts, ends, axes, steps = (
        constant(operand) if operand is not None else None for operand in [*node.inputs[1:], *[None] * 4][:4]
    )
    if starts is None or ends is None or axes is None or axes.tolist() not in [[axis] for axis in _LAST]:
        return None
    if steps is not None and steps[0] != 1:
        return None
    is_right = (starts[0] != 0 and ends[0] >= _END) if second else starts[0] == 0
    return node.inputs[0] if is_right else None
