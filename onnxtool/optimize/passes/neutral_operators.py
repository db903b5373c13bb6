"""Remove operators with a neutral operand, join Transpose and Unsqueeze nodes, and transpose before repeating."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import attribute, bypass, constant, only_consumer, producer, remove_unused, replace_and_erase
from onnxtool.graph.shapes import infer_values
from onnxtool.graph.writer import Writer
from onnxtool.model_file.weights import to_light_proto
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_ShapeOf: TypeAlias = Callable[[ir.Value], "tuple[int | str | None, ...] | None"]
# Operators with their neutral element and its allowed input positions.
_NEUTRAL = {
    "Add": (0, (1, 0)),
    "Sub": (0, (1,)),
    "Mul": (1, (1, 0)),
    "Div": (1, (1,)),
    "And": (1, (1, 0)),
    "Or": (0, (1, 0)),
}
_LARGEST = 1 << 20  # elements of a constant that is compared: a bias has one for each word of a vocabulary


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Add(x, 0)`, `Mul(x, 1)`, `And(x, True)` … by x, `Transpose(Transpose(x))` by one; drop unread nodes.

    A constant qualifies if it is exactly neutral and does not broadcast x to a larger shape. A -0.0 in x keeps its
    sign, where adding 0 would make it 0.0, which equals it.
    """
    graph = model.graph
    inferred = functools.cache(lambda: infer_values(to_light_proto(model)).values)  # few graphs need it

    def shape_of(value: ir.Value) -> tuple[int | str | None, ...] | None:
        known = inferred().get(str(value.name))
        return None if known is None else known.shape

    num_changes = 0
    for node in list(graph):
        if node.graph is not graph or node.domain:
            continue
        if node.op_type in _NEUTRAL:
            num_changes += _remove_neutral(node, shape_of)
        elif node.op_type == "Transpose":
            num_changes += _join_transposes(node) or _transpose_before_tile(node, shape_of)
        elif node.op_type == "Unsqueeze":
            num_changes += _join_unsqueezes(node, shape_of)
    return Outcome(model, num_changes + remove_unused(graph, list(graph)))


def _remove_neutral(node: ir.Node, shape_of: _ShapeOf) -> bool:
    number, places = _NEUTRAL[node.op_type]
    for place in places:
        array, value = constant(node.inputs[place], _LARGEST), node.inputs[1 - place]
        if (
            array is not None
            and value is not None
            and (array.reshape(-1)[:1] == number).all()  # of nearly all others, no more is read
            and (array == number).all()
            and (array.ndim == 0 or _broadcasts_to(shape_of(value), array))
        ):
            return bypass(node, value)
    return False


def _broadcasts_to(shape: tuple[int | str | None, ...] | None, array: NDArray[np.generic]) -> bool:
    """Whether broadcasting `array` to `shape` leaves the shape unchanged."""
    if array.size == 0 or shape is None or len(shape) < array.ndim:
        return False
    pairs = zip(shape[-array.ndim :], array.shape, strict=True)
    return all(wanted == 1 or size == wanted for size, wanted in pairs)


def _join_transposes(node: ir.Node) -> bool:
    """Transpose the input of an earlier Transpose; both disappear if they cancel out."""
    inner = producer(node.inputs[0], "Transpose")
    order, first = attribute(node, "perm"), None if inner is None else attribute(inner, "perm")
    if inner is not None and order and first:
        order = [first[axis] for axis in order]
        node.replace_input_with(0, inner.inputs[0])
        node.attributes["perm"] = ir.AttrInt64s("perm", order)
        if order == sorted(order):
            bypass(node, node.inputs[0])
        return True
    return bool(order) and order == sorted(order) and bypass(node, node.inputs[0])


def _transpose_before_tile(node: ir.Node, shape_of: _ShapeOf) -> bool:
    """Transpose what a Tile repeats, if the moved axes are repeated equally often (DeBERTa's keys of positions).

    Of a weight, sessions compute the result as they load.
    """
    order, tile = attribute(node, "perm"), producer(node.inputs[0], "Tile")
    if tile is None or not order or only_consumer(tile.outputs[0]) is not node:
        return False
    concat = producer(tile.inputs[1], "Concat")
    parts = [tile.inputs[1]] if concat is None else concat.inputs
    repeats: list[object] = []
    for part in parts:
        known = constant(part)
        if known is not None:
            repeats += known.reshape(-1).tolist()
        elif part is None or shape_of(part) != (1,):
            return False
        else:
            repeats.append(part)
    if len(repeats) != len(order) or any(repeats[axis] != repeats[place] for place, axis in enumerate(order)):
        return False
    writer = Writer(node)
    moved = writer.node("Transpose", [tile.inputs[0]], {"perm": order})
    replace_and_erase(node.outputs[0], writer.node("Tile", [moved, tile.inputs[1]]))
    return True


def _join_unsqueezes(node: ir.Node, shape_of: _ShapeOf) -> bool:
    """Insert the axes of two Unsqueeze nodes with only the second one."""
    inner = producer(node.inputs[0], "Unsqueeze")
    if inner is None or len(node.inputs) < 2:  # an attribute until opset 12
        return False
    axes, first, value = constant(node.inputs[1]), constant(inner.inputs[1]), inner.inputs[0]
    if axes is None or first is None or value is None:
        return False
    # Axes refer to the result of their node: the second node's axes shift the first node's.
    shape = shape_of(value) if min(*axes, *first) < 0 else ()
    if shape is None:
        return False
    rank = len(shape)
    added = {int(axis) % (rank + len(first) + len(axes)) if axis < 0 else int(axis) for axis in axes}
    earlier = {int(axis) % (rank + len(first)) if axis < 0 else int(axis) for axis in first}
    free_axes = [axis for axis in range(len(added) + max(earlier) + 1) if axis not in added]
    joined = sorted(added | {free_axes[axis] for axis in earlier})
    node.replace_input_with(0, value)
    name = f"onnxtool.axes_{'_'.join(map(str, joined))}"
    node.replace_input_with(1, Writer(node).constant(np.array(joined), name))
    return True


neutral_operators = Pass("neutral_operators", _apply)
