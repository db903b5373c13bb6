"""Passes of onnxoptimizer, each on the nodes that it rewrites.

docs/onnxoptimizer.md lists all its passes. Those here are never wrong there, apart from graphs that are not passed to
them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import onnx_ir as ir

from onnxtool.graph.edit import attribute, is_weight, only_consumer, operands, producer, reduced_axes, scalar
from onnxtool.optimize.onnxoptimizer_child import DeadPassError
from onnxtool.optimize.onnxoptimizer_region import Forms, InexactError, rewrite
from onnxtool.optimize.pipeline import Context, Outcome, Pass, count_changes, inventory, refusals

_DEAD = "onnxtool.dead_passes"  # key under which a model keeps why passes died on it
_SWAP = [1, 0]


def _apply(name: str, match: Callable[[ir.Node], Forms | str], model: ir.Model, _context: Context) -> Outcome:
    """Run the pass `name` on each match; instead of one, `match` may return a reason, or an empty text."""
    dead = model.meta.setdefault(_DEAD, {})
    before, reasons = None, []
    for node in list(model.graph):
        found = "" if name in dead or node.graph is None or node.domain else match(node)
        if not isinstance(found, str):
            before = before or inventory(model)
            found = _rewrite(name, found, dead)
        reasons.append(found)
    num_changes = count_changes(before, inventory(model)) if before else 0
    return Outcome(model, num_changes, dead.get(name) or refusals([*filter(None, reasons)]), left_out=name in dead)


def _rewrite(name: str, forms: Forms, dead: dict[str, str]) -> str:
    """Rewrite a match, or return why it is left alone; a pass that dies is added to `dead`."""
    try:
        return "" if rewrite(name, forms) else "onnxoptimizer does not rewrite it"
    except InexactError:
        return "a weight would lose digits, or not be finite"
    except DeadPassError as error:
        dead[name] = f"left out: onnxoptimizer's pass {error}"
        return ""


def _pad_before_conv(conv: ir.Node) -> Forms | str:
    """Match `Conv(Pad(x, pads), W)`, which becomes a Conv with these pads."""
    pad = producer(conv.inputs[0], "Pad") if conv.op_type == "Conv" else None
    if pad is None:
        return ""
    # onnxoptimizer does not read axes, nor the value of each dtype and opset.
    padding = attribute(pad, "value", 0.0) if len(pad.inputs) < 3 or pad.inputs[2] is None else scalar(pad.inputs[2])
    if padding != 0 or any(pad.inputs[3:]):
        return "the padding is not known to be zeros on each axis"
    return {pad: pad.inputs[:2], conv: conv.inputs}


def _bias_after_conv(add: ir.Node) -> Forms | str:
    """Match `Add(Conv(x, W), B)`, which becomes `Conv(x, W, B)`."""
    parts = operands(add, lambda value: producer(value, "Conv") is not None) if add.op_type == "Add" else None
    conv = None if parts is None else parts[0].producer()
    if parts is None or conv is None or not is_weight(parts[1]):
        return ""
    return {conv: conv.inputs, add: parts}  # onnxoptimizer knows the Conv only as the first operand


def _normalization_after_conv(node: ir.Node) -> Forms | str:
    """Match `BatchNormalization(Conv(x, W, b), scale, B, mean, var)`, which becomes a Conv with other weights."""
    conv = producer(node.inputs[0], "Conv") if node.op_type == "BatchNormalization" else None
    if conv is None:
        return ""
    if only_consumer(conv.outputs[0]) is None:
        return "the output of the Conv is read elsewhere"
    if attribute(node, "training_mode", 0) or any(output.name for output in node.outputs[1:]):
        return "the normalization is in training mode"
    if not all(is_weight(value) for value in (*conv.inputs[1:], *node.inputs[1:]) if value is not None):
        return "weights or statistics are not constant"
    return {conv: conv.inputs, node: node.inputs}


def _transposed_operand(gemm: ir.Node) -> Forms | str:
    """Match `Gemm(Transpose(a), Transpose(b))`, which becomes `Gemm<transA=1, transB=1>(a, b)`."""
    moved = [producer(value, "Transpose") for value in gemm.inputs[:2]] if gemm.op_type == "Gemm" else []
    moved = [node if node is None or attribute(node, "perm", _SWAP) == _SWAP else None for node in moved]
    if moved and moved[0] is not None and is_weight(gemm.inputs[1] if moved[1] is None else moved[1].inputs[0]):
        moved[0] = None  # neither int8 nor int4 takes a layer with a transposed input
    found = {node: node.inputs for node in moved if node is not None}
    for node in found:
        node.attributes["perm"] = ir.AttrInt64s("perm", _SWAP)  # onnxoptimizer fails without
    return {**found, gemm: gemm.inputs} if found else ""


def _unsqueezed_reduction(node: ir.Node) -> Forms | str:
    """Match `Unsqueeze(ReduceMean<keepdims=0>(x, axes), axes)`, which becomes `ReduceMean<keepdims=1>(x, axes)`."""
    reduction = producer(node.inputs[0]) if node.op_type == "Unsqueeze" else None
    # Without axes, a reduction is over all of them, and Unsqueeze adds none.
    if reduction is None or not reduction.op_type.startswith("Reduce") or not reduced_axes(reduction):
        return ""
    return {reduction: reduction.inputs, node: node.inputs}


_MATCHES: dict[str, Callable[[ir.Node], Forms | str]] = {
    # In this order: padding and biases belong to the Conv that a normalization changes.
    "fuse_pad_into_conv": _pad_before_conv,
    "fuse_add_bias_into_conv": _bias_after_conv,
    "fuse_bn_into_conv": _normalization_after_conv,
    "fuse_transpose_into_gemm": _transposed_operand,
    "fuse_consecutive_reduce_unsqueeze": _unsqueezed_reduction,
}


def onnxoptimizer_pass(name: str) -> Pass:
    """Return a pass of onnxoptimizer; one that is not in the presets gets the whole main graph."""

    def every_node(node: ir.Node) -> Forms | str:
        graph: Any = node.graph
        return {one: one.inputs for one in graph} if node is graph[0] else ""

    return Pass(name, partial(_apply, name, _MATCHES.get(name, every_node)))


ALLOWED = tuple(map(onnxoptimizer_pass, _MATCHES))
