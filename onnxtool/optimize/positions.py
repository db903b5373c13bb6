"""Recognize position ids that are cut from a table to the length of the input.

ONNX's shape inference does not follow a Slice to a size that is itself computed, so their shape is proven here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.graph.edit import attribute, constant, is_weight, producer

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.graph.shapes import Shapes

# Between a size as a number and the same as a list of one.
_WRAPPERS = ("Cast", "Reshape", "Squeeze", "Unsqueeze")


def is_row_of(ids: ir.Value, words: ir.Value, shapes: Shapes) -> bool:
    """Whether `ids` is int [1, S] where `words` is int [B, S]."""
    pairs = [(shapes.of(ids, probe), shapes.of(words, probe)) for probe in range(len(shapes.found))]
    if all(one is not None and other is not None and one == (1, other[1]) for one, other in pairs):
        return True
    return _is_cut_to_length(producer(ids, "Slice"), words, shapes)


def _is_cut_to_length(cut: ir.Node | None, words: ir.Value, shapes: Shapes) -> bool:
    """Whether `cut` is `Slice(table, starts=[0], ends=[S], axes=[1])` of a table int [1, P]."""
    if cut is None or len(cut.inputs) < 4 or not is_weight(cut.inputs[0], 2):
        return False
    # A table of one position would be broadcast, to whatever length.
    if shapes.fixed(cut.inputs[0], 0) != 1 or shapes.fixed(cut.inputs[0], 1) == 1:
        return False
    start, axis = constant(cut.inputs[1]), constant(cut.inputs[3])
    steps = [constant(value) for value in cut.inputs[4:]]
    if start is None or axis is None or start.tolist() != [0] or axis.tolist() not in ([1], [-1]):
        return False
    if any(step is None or step.tolist() != [1] for step in steps):
        return False
    return _is_length_of(cut.inputs[2], words, shapes)


def _is_length_of(size: ir.Value | None, words: ir.Value, shapes: Shapes) -> bool:
    """Whether `size` is read from the shape of a value whose second axis is as long as that of `words`."""
    while (wrapper := producer(size, *_WRAPPERS)) is not None:
        size = wrapper.inputs[0]
    picked = producer(size, "Gather")
    shape = producer(size if picked is None else picked.inputs[0], "Shape")
    if shape is None:
        return False
    start, end = attribute(shape, "start", 0), attribute(shape, "end")
    if picked is None:
        axis = start if end == start + 1 else None
    else:
        index = constant(picked.inputs[1])
        axis = int(index.reshape(-1)[0]) if index is not None and index.size == 1 and start == 0 else None
    if axis != 1:
        return False
    pairs = [(shapes.of(shape.inputs[0], probe), shapes.of(words, probe)) for probe in range(len(shapes.found))]
    return all(one is not None and other is not None and len(one) > 1 and one[1] == other[1] for one, other in pairs)
