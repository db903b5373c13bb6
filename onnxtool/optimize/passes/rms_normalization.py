"""Fuse RMS normalization, of Llama, T5 and similar models, into one operator of onnxruntime."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import attribute, is_closed, is_float, only_consumer, producer, replace_and_erase
from onnxtool.graph.rewrites.rms_normalization import Normalized, match_normalized, mean_of, scaled
from onnxtool.graph.shapes import Shapes, fill_types, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `x / Sqrt(ReduceMean(x ** 2) + epsilon) * w` by `SimplifiedLayerNormalization(x, w)`.

    The operator is onnxruntime's, in the default domain. Also matches the reciprocal of the root, and a Cast of x to
    float32 and back. Gemma's scale of 1 + w is a vector like any other.
    """
    found = [(node, match) for node in model.graph if (match := _match_uncentred(node)) is not None]
    if not found:
        return Outcome(model, 0)
    fill_types(model)
    shapes = find_shapes(model)
    return rewrite_each(model, found, lambda match: _fuse(*match, shapes))


def _match_uncentred(node: ir.Node) -> Normalized | None:
    match = match_normalized(node)
    if match is None:
        return None
    subtract = producer(match.value, "Sub")
    # A layer normalization subtracts the mean first.
    return match if subtract is None or mean_of(producer(subtract.inputs[1])) is None else None


def _fuse(node: ir.Node, match: Normalized, shapes: Shapes) -> str:
    """Write one SimplifiedLayerNormalization; return the reason where a precondition does not hold."""
    source, normalized, nodes = _widen_over_casts(node, match)
    found = scaled(normalized)
    if found is None:
        return "no scale follows, or something else reads the normalized value"
    scale, result = found
    multiply = producer(result)
    length = shapes.fixed(scale, -1)
    if shapes.rank(scale) != 1 or length is None or length != shapes.fixed(source, -1):
        return "the scale is no vector as long as the last axis"
    if not is_float(source):
        return "neither float32 nor float16"
    if multiply is None or not is_closed([*nodes, multiply], result):
        return "an inner value is read elsewhere"
    attributes = {"axis": -1, "epsilon": match.epsilon, "stash_type": 1}
    fused = Writer(multiply).node("SimplifiedLayerNormalization", [source, scale], attributes, like=result)
    replace_and_erase(result, fused)
    return ""


def _widen_over_casts(node: ir.Node, match: Normalized) -> tuple[ir.Value, ir.Value, tuple[ir.Node, ...]]:
    """Return input, result and nodes, with a Cast of x to float32 and the Cast back where there are both."""
    narrow = match.value, node.outputs[0], match.nodes
    before, after = producer(match.value, "Cast"), only_consumer(node.outputs[0], "Cast")
    source = None if before is None else before.inputs[0]
    if before is None or after is None or source is None or attribute(before, "to") != ir.DataType.FLOAT:
        return narrow
    # The operator computes in float32 and rounds before the scale, as the two casts do.
    if source.dtype is None or attribute(after, "to") != source.dtype:
        return narrow
    return source, after.outputs[0], (*match.nodes, before, after)


rms_normalization = Pass("rms_normalization", _apply)
