"""Fuse the rotary embedding of queries and keys into one onnxruntime operator.

Shape letters: B batch, S sequence, H heads, D size of a head, R rows of the table of angles.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import attribute, is_weight, operands, producer, replace_and_erase, scalar, tensor_of
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.patterns import Rotation, match_rotation
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.attention.views import HeadLayout, Heads, find_heads
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `x * cos + concat(-x[D/2:], x[:D/2]) * sin` by `RotaryEmbedding(x, positions, cos, sin)`.

    The angles that the model computes from positions become the operator's table, one row per position.
    """
    shapes: Shapes | None = None
    tables: dict[ir.Value, ir.Value] = {}
    places: dict[ir.Value, ir.Value] = {}
    num_changes, reasons = 0, []
    for node in list(model.graph):
        rotation = match_rotation(node)
        if rotation is None:
            continue
        shapes = shapes or find_shapes(model)
        reason = _objection(rotation, shapes)
        if reason:
            reasons.append(reason)
            continue
        _write(rotation, shapes, tables, places)
        num_changes += 1
    return Outcome(model, num_changes, refusals(reasons))


def _objection(rotation: Rotation, shapes: Shapes) -> str:
    """Return the precondition that does not hold; empty if all hold."""
    size, concat = shapes.fixed(rotation.value, -1), producer(rotation.turned, "Concat")
    if shapes.rank(rotation.value) != 4 or size is None or size % 2:
        return "the rotated value is not known to be [B, H, S, D]"
    halves = [] if concat is None else concat.inputs
    if any(shapes.fixed(half, -1) != size // 2 for half in halves):
        return "the rotated value is not cut into halves"
    shape, angles = shapes.shape(rotation.value), shapes.shape(rotation.cosine)
    if shape is None or angles not in [(batch, 1, *shape[2:]) for batch in (1, shape[0])]:
        return "the cosines are not known to be [B, 1, S, D]"
    if shapes.shape(rotation.sine) != angles:
        return "cosines and sines are of different shapes"
    if shapes.dtype(rotation.value) not in (np.float32, np.float16):
        return "neither float32 nor float16"
    if not all(_repeats(table, shapes, size) for table in (rotation.cosine, rotation.sine)):
        return "the cosines or sines are not known to have two equal halves"
    return ""


def _repeats(value: ir.Value | None, shapes: Shapes, size: int) -> bool:
    """Whether the two halves of the last axis of `value`, of `size` elements, are equal by construction."""
    while value is not None and shapes.fixed(value, -1) == size:
        if is_weight(value):
            array = tensor_of(value).numpy()
            return np.array_equal(array[..., : size // 2], array[..., size // 2 :])
        node = producer(value, "Concat", "Gather", *_KEEP_HALVES, "Mul")
        if node is None:
            return False
        if node.op_type == "Concat":
            last = (shapes.rank(value) or 0) - 1
            return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1] and attribute(node, "axis") in (-1, last)
        if node.op_type == "Mul":
            parts = operands(node, lambda operand: scalar(operand) is not None)
            value = None if parts is None else parts[1]
        elif node.op_type == "Gather" and (attribute(node, "axis", 0) != 0 or (shapes.rank(node.inputs[0]) or 0) < 2):
            return False  # not whole rows
        else:
            value = node.inputs[0]
    return False


# These compute each element by itself, or move whole rows.
_KEEP_HALVES = ("Cos", "Sin", "Cast", "Unsqueeze", "Squeeze", "Identity", "Expand")


def _write(
    rotation: Rotation, shapes: Shapes, tables: dict[ir.Value, ir.Value], places: dict[ir.Value, ir.Value]
) -> None:
    """Write the operator, directly on a linear layer's result if only reshapes and a transposition follow it."""
    writer = Writer(rotation.node)
    size, num_heads = shapes.fixed(rotation.value, -1) or 0, shapes.fixed(rotation.value, 1)
    angles = [_table(values, size, writer, tables) for values in (rotation.cosine, rotation.sine)]
    positions = _positions(rotation.cosine, shapes, writer, places)
    heads = None if num_heads is None else find_heads(rotation.value, shapes, num_heads)
    flat = None if heads is None else _flat(heads, writer)
    source = rotation.value if flat is None else flat
    result = writer.node("RotaryEmbedding", [source, positions, *angles], domain=MICROSOFT, like=source)
    if flat is not None:
        shape = writer.constant(np.array([0, 0, num_heads, size]), "onnxtool.heads")
        inside = writer.node("Reshape", [result, shape])
        result = writer.node("Transpose", [inside], {"perm": [0, 2, 1, 3]}, like=rotation.node.outputs[0])
    replace_and_erase(rotation.node.outputs[0], result)


def _flat(heads: Heads, writer: Writer) -> ir.Value | None:
    """Return the heads as [B, S, H * D]; None if that would move them in memory."""
    if heads.scale != 1 or heads.layout is HeadLayout.HEADS_OUTSIDE:
        return None
    if heads.layout is HeadLayout.FLAT:
        return heads.source
    return writer.node("Reshape", [heads.source, writer.constant(np.array([0, 0, -1]), "onnxtool.flat")])


def _table(angles: ir.Value, size: int, writer: Writer, tables: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return the first half of cosines or sines, [1 or B, 1, S, D], as a table [R, D / 2]."""
    if angles not in tables:
        bounds = [writer.constant(np.array([bound]), f"onnxtool.{bound}") for bound in (0, size // 2, -1)]
        half = writer.node("Slice", [angles, *bounds])
        rows = writer.constant(np.array([-1, size // 2]), f"onnxtool.rows_of_{size // 2}")
        tables[angles] = writer.node("Reshape", [half, rows])
        tables[angles].type = angles.type
    return tables[angles]


def _positions(cosine: ir.Value, shapes: Shapes, writer: Writer, places: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return the table rows of the tokens: only the first, int64 [1], or all, int64 [B, S]."""
    if cosine not in places:
        places[cosine] = (
            writer.constant(np.array([0]), "onnxtool.0") if shapes.fixed(cosine, 0) == 1 else _count_up(cosine, writer)
        )
    return places[cosine]


def _count_up(cosine: ir.Value, writer: Writer) -> ir.Value:
    """Return 0, 1, 2, … as int64 [B, S]: each row of the batch has its own part of the table."""
    shape = writer.node("Shape", [cosine])
    sizes = writer.node("Gather", [shape, writer.constant(np.array([0, 2]), "onnxtool.batch_and_sequence")])
    number = writer.node("ReduceProd", [sizes], {"keepdims": 0})
    first, step = (writer.constant(np.array(value), f"onnxtool.scalar_{value}") for value in (0, 1))
    return writer.node("Reshape", [writer.node("Range", [first, number, step]), sizes])


rotary_embedding = Pass("rotary_embedding", _apply)
