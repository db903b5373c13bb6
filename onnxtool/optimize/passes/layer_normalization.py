"""Fuse layer normalization written as elementary operators."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import is_closed, is_float, is_weight, only_consumer, producer, replace_and_erase
from onnxtool.graph.rewrites.rms_normalization import Normalized, match_normalized, mean_of
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals, rewrite_each

_FIRST_OPSET = 17


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Add(Mul(Div(d, Sqrt(Add(ReduceMean(Pow(d, 2)), epsilon))), gamma), beta)`, `d = Sub(x, ReduceMean(x))`.

    The fused operator is `LayerNormalization(x, gamma, beta)`; beta may be missing, and Reciprocal may stand for Div.
    """
    found = [(node, match) for node in model.graph if (match := _match_centred(node)) is not None]
    if not found:
        return Outcome(model, 0)
    if default_opset(model.opset_imports) < _FIRST_OPSET:
        return Outcome(model, 0, refusals([f"LayerNormalization needs opset {_FIRST_OPSET}"] * len(found)))
    shapes = find_shapes(model)
    return rewrite_each(model, found, lambda match: _fuse(*match, shapes))


def _match_centred(node: ir.Node) -> tuple[Normalized, ir.Value] | None:
    """Match `d / Sqrt(ReduceMean(d ** 2) + epsilon)`; return it, all its nodes, and x."""
    match = match_normalized(node)
    subtract = None if match is None else producer(match.value, "Sub")
    if match is None or subtract is None:
        return None
    value, mean = subtract.inputs
    average = producer(mean, "ReduceMean")
    if value is None or average is None or mean_of(average) is not value:
        return None
    return Normalized(match.value, match.epsilon, (*match.nodes, subtract, average)), value


def _fuse(node: ir.Node, found: tuple[Normalized, ir.Value], shapes: Shapes) -> str:
    """Write one LayerNormalization; return why not where a precondition does not hold."""
    match, value = found
    scaled = only_consumer(node.outputs[0], "Mul")
    gamma = None if scaled is None else _vector(scaled, node.outputs[0], value, shapes)
    if scaled is None or gamma is None:
        return "the scale is no vector as long as the last axis"
    if not is_float(gamma):
        return "neither float32 nor float16"
    nodes, inputs, last = [*match.nodes, scaled], [value, gamma], scaled
    shifted = only_consumer(scaled.outputs[0], "Add")
    beta = None if shifted is None else _vector(shifted, scaled.outputs[0], value, shapes)
    if shifted is not None and beta is not None:
        nodes, inputs, last = [*nodes, shifted], [*inputs, beta], shifted
    if not is_closed(nodes, last.outputs[0]):
        return "an inner value is read elsewhere"
    attributes = {"axis": -1, "epsilon": match.epsilon, "stash_type": 1}
    fused = Writer(last).node("LayerNormalization", inputs, attributes, like=last.outputs[0])
    replace_and_erase(last.outputs[0], fused)
    return ""


def _vector(node: ir.Node, other: ir.Value, value: ir.Value, shapes: Shapes) -> ir.Value | None:
    """Return the input of `node` beside `other`, where it is a weight as long as the last axis of `value`."""
    vector = node.inputs[1] if node.inputs[0] is other else node.inputs[0]
    if vector is None or not is_weight(vector, 1) or shapes.fixed(vector, 0) != shapes.fixed(value, -1):
        return None
    return None if shapes.fixed(vector, 0) is None else vector


layer_normalization = Pass("layer_normalization", _apply)
