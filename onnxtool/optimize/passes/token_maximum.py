"""Take the maximum over tokens, as SPLADE does, before what each number of the vocabulary goes through.

Letters of shapes: B batch, S sequence, K hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import (
    attribute,
    constant,
    is_weight,
    only_consumer,
    operands,
    producer,
    reduced_axes,
    replace_and_erase,
    scalar,
)
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each

_FIRST_OPSET = 13  # Unsqueeze takes its axes as an input, and GatherND has batch_dims
_FLAGS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)


@dataclass
class _Chain:
    """What lies between a product [B, S, V] and the maximum over S.

    Attributes:
        steps: the nodes, the last one first, without the product with the mask.
        mask: the tensor [B, S, 1] that a product between them has, 0 for padding and 1 for all else.
        masked: how many of `steps` follow that product.
        product: the MatMul of states [B, S, K] and a weight, in front of all.
    """

    steps: list[ir.Node] = field(default_factory=list)
    mask: ir.Value | None = None
    masked: int = 0
    product: ir.Node | None = None


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `ReduceMax(f(x @ W + b) * mask)` by `f(ReduceMax(x' @ W) + b)`, for functions f that never fall.

    In x', padding has the state of the first token, which does not move the maximum. Each of the functions, the bias
    and the mask was a pass over [B, S, V], the largest tensor that such a model has, and is one over [B, V] now. The
    numbers are the same: rounding never falls either. A mask is taken to be 0 or 1, as in attention.
    """
    found = []
    for node in model.graph:
        if not node.domain and node.op_type == "ReduceMax" and reduced_axes(node) == [1]:
            chain = _follow(node)
            if chain.product is not None and (chain.steps or chain.mask is not None):
                found.append((node, chain, chain.product))
    if not found or default_opset(model.opset_imports) < _FIRST_OPSET:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    return rewrite_each(model, found, lambda match: _rewrite(*match, shapes))


def _follow(reduce: ir.Node) -> _Chain:
    """Go up from a maximum, as far as each value is read there alone."""
    chain, reader = _Chain(), reduce
    while True:
        value = reader.inputs[0]
        if reader is not reduce and len(reader.inputs) == 2:
            value = _operands(reader)[0]
        above = None if value is None or only_consumer(value) is not reader else value.producer()
        if above is None:
            return chain
        if above.op_type in ("MatMul", "FusedMatMul") and above.domain in ("", MICROSOFT):
            plain = not attribute(above, "transA", 0) and attribute(above, "alpha", 1.0) > 0
            if is_weight(above.inputs[1], 2) and plain:
                chain.product = above
            return chain
        if above.domain:
            return chain
        mask = _mask(above)
        if mask is not None and chain.mask is None:
            chain.mask, chain.masked = mask, len(chain.steps)
        elif _never_falls(above):
            chain.steps.append(above)
        else:
            return chain
        reader = above


def _operands(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """Return the inputs of an operator of two, the one that is computed for each token first."""
    found = operands(node, lambda one: _is_mask(one) or constant(one) is not None or is_weight(one))
    return (node.inputs[0], None) if found is None else (found[1], found[0])


def _never_falls(node: ir.Node) -> bool:
    """Whether a node computes each number from one number, a larger one from no smaller one."""
    if node.op_type in ("Relu", "Log", "Exp", "Sqrt", "Sigmoid", "Tanh", "Softplus", "Identity"):
        return True
    by = _operands(node)[1] if len(node.inputs) == 2 else None
    if node.op_type == "Add":
        return scalar(by) is not None or is_weight(by, 1)
    factor = scalar(by)
    return (
        factor is not None
        and factor > 0
        and (node.op_type == "Mul" or (node.op_type == "Div" and node.inputs[1] is by))
    )


def _mask(node: ir.Node) -> ir.Value | None:
    """Return the mask [B, S, 1] that a product is with; None for any other node."""
    found = operands(node, _is_mask) if node.op_type == "Mul" else None
    return None if found is None else found[0]


def _is_mask(value: ir.Value) -> bool:
    return _flags(value) is not None


def _flags(value: ir.Value) -> ir.Value | None:
    """Return the input of the graph [B, S] of which a value [B, S, 1] holds the numbers; None without one."""
    seen = 0
    while (node := producer(value, "Cast", "Unsqueeze", "Expand")) is not None:
        if node.op_type == "Unsqueeze":
            axes = constant(node.inputs[1]) if len(node.inputs) > 1 else None
            if axes is None or axes.reshape(-1).tolist() not in ([-1], [2]):
                return None
            seen += 1
        if node.inputs[0] is None:
            return None
        value = node.inputs[0]
    return value if seen == 1 and value.is_graph_input() and value.dtype in _FLAGS else None


def _lowest(steps: list[ir.Node]) -> float:
    """Return what the results of `steps`, the last one first, are not below, whatever goes in."""
    bound = -math.inf
    for node in reversed(steps):
        by = scalar(_operands(node)[1]) if len(node.inputs) == 2 else None
        match node.op_type:
            case "Relu" | "Sqrt" | "Exp" | "Sigmoid" | "Softplus":
                bound = max(bound, 0.0) if node.op_type == "Relu" else 0.0
            case "Tanh":
                bound = max(math.tanh(bound), -1.0)
            case "Log":
                bound = math.log(bound) if bound > 0 else -math.inf
            case "Add":
                bound = -math.inf if by is None else bound + by
            case "Mul" | "Div" if by is not None:
                bound = bound * by if node.op_type == "Mul" else bound / by
    return bound


def _rewrite(reduce: ir.Node, chain: _Chain, product: ir.Node, shapes: Shapes) -> str:
    """Write the maximum first; return why not where a precondition does not hold."""
    states, weight = product.inputs
    if states is None or shapes.rank(states) != 3:
        return "the rank of the states is not 3"
    writer = Writer(reduce)
    if chain.mask is not None:
        readers = [reader for reader, _ in reduce.outputs[0].uses()]
        bounded = _lowest(chain.steps[chain.masked :]) >= 0 or (
            bool(readers)
            and not reduce.outputs[0].is_graph_output()
            and all(not reader.domain and reader.op_type == "Relu" for reader in readers)
        )
        if not bounded:
            return "what is masked may be negative, so that padding counts"
        states = _without_padding(states, chain.mask, writer)
    scores = writer.node(product.op_type, [states, weight], product.attributes, domain=product.domain)
    scores.type = product.outputs[0].type
    result = writer.node("ReduceMax", [scores, *reduce.inputs[1:]], reduce.attributes)
    for node in reversed(chain.steps):
        above = _operands(node)[0] if len(node.inputs) == 2 else node.inputs[0]
        inputs = [result if one is above else one for one in node.inputs]
        result = writer.node(node.op_type, inputs, node.attributes)
    if chain.mask is not None:  # a text without tokens has zeros
        some = writer.node("ReduceMax", [chain.mask, *reduce.inputs[1:]], reduce.attributes)
        result = writer.node("Mul", [result, some])
    replace_and_erase(reduce.outputs[0], result)
    return ""


def _without_padding(states: ir.Value, mask: ir.Value, writer: Writer) -> ir.Value:
    """Write states [B, S, K] in which padding has the state of the first token that is none."""
    flags = _flags(mask)
    assert flags is not None  # noqa: S101  it is what made this value a mask
    one, last = (
        writer.constant(np.array([axis], np.int64), f"onnxtool.axis_{name}") for axis, name in ((1, "1"), (-1, "last"))
    )
    real = writer.op("Unsqueeze", writer.op("Cast", flags, to=ir.DataType.BOOL.value), last)
    numbers = writer.op("Cast", flags, to=ir.DataType.INT32.value)
    place = writer.op("ArgMax", numbers, axis=1, keepdims=1)
    first = writer.op("Unsqueeze", writer.op("GatherND", states, place, batch_dims=1), one)
    return writer.node("Where", [real, states, first], like=states)


token_maximum = Pass("token_maximum", _apply)
