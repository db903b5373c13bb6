"""Fuse the residual, and the bias in front of it, into the normalization behind them."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import attribute, is_float, is_weight, only_consumer, operands, producer, replace_and_erase
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each

_WITH_SKIP = {
    "LayerNormalization": "SkipLayerNormalization",
    "SimplifiedLayerNormalization": "SkipSimplifiedLayerNormalization",
}
_Terms = tuple[ir.Value, ir.Value, ir.Value | None]
_DEFAULT_EPSILON = 1e-5  # of LayerNormalization; that of the fused operators is another


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `LayerNormalization(Add(a, b), gamma, beta)` by `SkipLayerNormalization(a, b, gamma, beta)`.

    A bias of a MatMul, `Add(MatMul(x, W), c)` as a or b, becomes the input `bias`; where other nodes read the sum, it
    becomes the fourth output. `SimplifiedLayerNormalization` becomes `SkipSimplifiedLayerNormalization`, without beta.
    """
    found = [
        (node, add)
        for node in model.graph
        if not node.domain
        and node.op_type in _WITH_SKIP
        and (add := producer(node.inputs[0], "Add")) is not None
        and operands(add, is_weight) is None
    ]
    if not found:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    return rewrite_each(model, found, lambda match: _fuse(*match, shapes))


def _fuse(node: ir.Node, add: ir.Node, shapes: Shapes) -> str:
    """Write one operator for both; return why not where a precondition does not hold."""
    reason = _objection(node, add, shapes)
    terms = None if reason else _split(add, shapes)
    if terms is None:
        return reason or "the bias does not fit"
    read_elsewhere = only_consumer(add.outputs[0], node.op_type) is None
    outputs = _write(node, add, terms, with_sum=read_elsewhere)
    replace_and_erase(node.outputs[0], outputs[0])
    if read_elsewhere:
        replace_and_erase(add.outputs[0], outputs[3])
    return ""


def _objection(node: ir.Node, add: ir.Node, shapes: Shapes) -> str:
    """Return which precondition does not hold; empty where all do."""
    if producer(node.inputs[0], "Add") is not add:
        return "another normalization has fused the sum"
    first, second = add.inputs
    scales = [one for one in node.inputs[1:] if one is not None]
    if shapes.rank(first) != 3 or not shapes.same(first, second):
        return "the two are not known to be of the same shape [B, S, D]"
    if attribute(node, "axis", -1) not in (-1, 2):
        return "not over the last axis"
    width = shapes.fixed(first, -1)
    if width is None or not all(is_weight(one, 1) and shapes.fixed(one, 0) == width for one in scales):
        return "scale or shift is no vector as long as the last axis"
    if not is_float(scales[0]):
        return "neither float32 nor float16"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "its mean or deviation is read"
    return ""


def _split(add: ir.Node, shapes: Shapes) -> _Terms | None:
    """Return the two terms of a sum, and the bias of a linear layer where only this sum reads the layer."""
    first, second = add.inputs
    if first is None or second is None:
        return None
    for one, other in ((first, second), (second, first)):
        inner = producer(one, "Add")
        parts = None if inner is None else operands(inner, lambda value: is_weight(value, 1))
        if parts is None or only_consumer(one, "Add") is not add or producer(parts[1], "MatMul") is None:
            continue
        if shapes.same(parts[1], one) and shapes.fixed(parts[0], 0) == shapes.fixed(one, -1):
            return parts[1], other, parts[0]
    return first, second, None


def _write(node: ir.Node, add: ir.Node, terms: _Terms, *, with_sum: bool) -> list[ir.Value]:
    """Write the operator in front of the sum, which other nodes may read; return its outputs."""
    first, second, bias = terms
    inputs = [first, second, node.inputs[1]]
    if node.op_type == "LayerNormalization":
        inputs.append(node.inputs[2] if len(node.inputs) > 2 else None)
    if bias is not None:
        inputs.append(bias)
    while inputs[-1] is None:
        inputs.pop()
    # An output without a name is not computed: these are the mean and the deviation.
    outputs = [ir.Value(), *([ir.Value(name=""), ir.Value(name=""), ir.Value()] if with_sum else [])]
    fused = ir.node(
        _WITH_SKIP[node.op_type],
        inputs,
        {"epsilon": float(attribute(node, "epsilon", _DEFAULT_EPSILON))},
        domain=MICROSOFT,
        outputs=outputs,
    )
    Writer(add).add(fused)
    for new, old in zip(outputs[::3], (node.outputs[0], add.outputs[0]), strict=False):
        new.type, new.shape = old.type, old.shape
    return outputs


skip_layer_normalization = Pass("skip_layer_normalization", _apply)
