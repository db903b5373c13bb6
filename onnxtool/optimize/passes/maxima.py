"""Remove maxima over scores and tokens, take them earlier, or take them in blocks.

Shape letters: B batch, S sequence, K hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import (
    attribute,
    constant,
    drop_unused,
    is_made_on_saving,
    is_weight,
    only_consumer,
    operands,
    producer,
    reduced_axes,
    remove_unused,
    replace_and_erase,
    required,
    scalar,
    tensor_of,
)
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each


def _leave_out(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Softmax(x - ReduceMax(x))`, as in gpt-oss, by `Softmax(x)`: two fewer passes over the scores."""
    num_changes = 0
    for node in list(model.graph):
        if node.domain or node.op_type not in ("Softmax", "LogSoftmax"):
            continue
        sub = producer(node.inputs[0], "Sub")
        maximum = None if sub is None else producer(sub.inputs[1], "ReduceMax")
        if sub is None or maximum is None or maximum.inputs[0] is not sub.inputs[0]:
            continue
        # Axis 1 of old ReduceMax and Softmax is not treated as the last: their ranks are not looked up here.
        if reduced_axes(maximum) == [-1] and attribute(node, "axis", -1) == -1 and attribute(maximum, "keepdims", 1):
            node.replace_input_with(0, sub.inputs[0])
            remove_unused(model.graph, [sub])
            num_changes += 1
    return Outcome(model, num_changes)


softmax_maximum = Pass("softmax_maximum", _leave_out)


_FIRST_OPSET = 13  # Unsqueeze takes its axes as an input, and GatherND has batch_dims
_FLAGS = (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)


@dataclass
class _MaximumChain:
    """The nodes between a product [B, S, V] and the maximum over S.

    Attributes:
        steps: the nodes, last one first, without the product with the mask.
        mask: the tensor [B, S, 1] in a product between them, 0 for padding and 1 for tokens.
        masked: how many of `steps` follow that product.
        product: the MatMul of states [B, S, K] and a weight, before all steps.
    """

    steps: list[ir.Node] = field(default_factory=list)
    mask: ir.Value | None = None
    masked: int = 0
    product: ir.Node | None = None


def _take_first(model: ir.Model, _context: Context) -> Outcome:
    """Replace `ReduceMax(f(x @ W + b) * mask)` by `f(ReduceMax(x' @ W) + b)`, for nondecreasing functions f.

    In x', padding takes the hidden state of the first token, which does not change the maximum. Each function, the bias
    and the mask used to be a pass over [B, S, V], the largest tensor in such a model, and is now one over [B, V]. The
    numbers are the same: rounding is nondecreasing too. A mask is assumed to be 0 or 1, as in attention.
    """
    matches = []
    for node in model.graph:
        if not node.domain and node.op_type == "ReduceMax" and reduced_axes(node) == [1]:
            chain = _follow(node)
            if chain.product is not None and (chain.steps or chain.mask is not None):
                matches.append((node, chain, chain.product))
    if default_opset(model.opset_imports) < _FIRST_OPSET:
        return Outcome(model, 0)
    return rewrite_each(model, matches, _rewrite)


def _follow(reduce: ir.Node) -> _MaximumChain:
    """Go up from a maximum as long as each value has a single reader."""
    chain, reader = _MaximumChain(), reduce
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
    """Return the inputs of a binary operator, the one computed per token first."""
    pair = operands(node, lambda operand: _is_mask(operand) or constant(operand) is not None or is_weight(operand))
    return (node.inputs[0], None) if pair is None else (pair[1], pair[0])


def _never_falls(node: ir.Node) -> bool:
    """Whether a node is elementwise and nondecreasing."""
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
    """Return the mask [B, S, 1] of a product with one; None for any other node."""
    pair = operands(node, _is_mask) if node.op_type == "Mul" else None
    return None if pair is None else pair[0]


def _is_mask(value: ir.Value) -> bool:
    return _flags(value) is not None


def _flags(value: ir.Value) -> ir.Value | None:
    """Return the graph input [B, S] whose numbers a value [B, S, 1] holds; None if there is none."""
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
    """Return a lower bound of the results of `steps`, last one first, for all inputs."""
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


def _rewrite(reduce: ir.Node, chain: _MaximumChain, product: ir.Node, shapes: Shapes) -> str:
    """Write the maximum first, or return the precondition that does not hold."""
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
        inputs = [result if operand is above else operand for operand in node.inputs]
        result = writer.node(node.op_type, inputs, node.attributes)
    if chain.mask is not None:  # a text without tokens has zeros
        some = writer.node("ReduceMax", [chain.mask, *reduce.inputs[1:]], reduce.attributes)
        result = writer.node("Mul", [result, some])
    replace_and_erase(reduce.outputs[0], result)
    return ""


def _without_padding(states: ir.Value, mask: ir.Value, writer: Writer) -> ir.Value:
    """Write states [B, S, K] in which padding takes the state of the first real token."""
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


token_maximum = Pass("token_maximum", _take_first)


# Columns per block. Scores of 8 texts of 128 tokens then take 16 MB, which stay in the CPU cache until they are
# reduced, and a large batch needs an eighth of the memory. Narrower blocks cost more time per query than they save.
_WIDTH = 4096


@dataclass(frozen=True)
class _WideMaximum:
    """A wide product [B, S, V] whose only use is the maximum over S.

    Attributes:
        scaled: the Mul after it with a number per token; None if there is none.
        bias: the number per column that is then added; None if there is none.
    """

    product: ir.Node
    scaled: ir.Node | None
    bias: ir.Value | None
    reduce: ir.Node


def _take_in_blocks(model: ir.Model, _context: Context) -> Outcome:
    """Replace `ReduceMax(x @ W)` over S by successive maxima for blocks of W's columns.

    The scores [B, S, V] then need not be in memory at once. A Mul with a number per token may lie in between, and a
    bias, which is added to the maxima. A weight with other readers is not split: it would be stored twice.
    """
    matches = [match for node in model.graph if (match := _match(node)) is not None]
    shapes = find_shapes(model) if any(match.scaled is not None for match in matches) else None
    num_changes = 0
    for match in matches:
        if match.scaled is None or (shapes is not None and shapes.fixed(match.scaled.inputs[1], -1) == 1):
            _cut(match)
            num_changes += 1
    return Outcome(model, num_changes)


def _match(reduce: ir.Node) -> _WideMaximum | None:
    if reduce.domain or reduce.op_type != "ReduceMax" or reduced_axes(reduce) != [1]:
        return None
    scores, scaled, bias = _only(reduce.inputs[0]), None, None
    added = (
        None
        if scores is None or scores.op_type != "Add" or scores.domain
        else operands(scores, lambda value: is_weight(value, 1))
    )
    if added is not None:
        bias, scores = added[0], _only(added[1])
    if scores is not None and scores.op_type == "Mul" and not scores.domain:
        scaled, scores = scores, _only(scores.inputs[0])
    if scores is None or (scores.domain, scores.op_type) not in (("", "MatMul"), (MICROSOFT, "MatMulIntegerToFloat")):
        return None
    weight = scores.inputs[1]
    if weight is None or not is_weight(weight, 2) or len(weight.uses()) > 1 or _columns(weight) < 2 * _WIDTH:
        return None
    return _WideMaximum(scores, scaled, bias, reduce)


def _only(value: ir.Value | None) -> ir.Node | None:
    """Return the producer of a value that is read once."""
    return None if value is None or len(value.uses()) != 1 or value.is_graph_output() else value.producer()


def _columns(weight: ir.Value) -> int:
    return int(tensor_of(weight).shape.numpy()[-1])


def _cut(match: _WideMaximum) -> None:
    """Write product and maximum for each block, join the maxima, and add the bias."""
    product, reduce = match.product, match.reduce
    writer, columns = Writer(reduce), _columns(required(product, 1))
    whole = [operand for operand in product.inputs if operand is not None and is_weight(operand)]
    sources = {weight: _source(tensor_of(weight)) for weight in whole}
    maxima = []
    for start in range(0, columns, _WIDTH):
        part = slice(start, min(start + _WIDTH, columns))
        inputs = [
            _part(operand, sources[operand], part, columns, writer) if operand in sources else operand
            for operand in product.inputs
        ]
        result = writer.node(product.op_type, inputs, product.attributes, domain=product.domain)
        if match.scaled is not None:
            result = writer.node("Mul", [result, match.scaled.inputs[1]])
        maxima.append(writer.node("ReduceMax", [result, *reduce.inputs[1:]], reduce.attributes))
    result = writer.op("Concat", *maxima, axis=-1)
    if match.bias is not None:
        result = writer.op("Add", result, match.bias)
    replace_and_erase(reduce.outputs[0], result)
    drop_unused(whole)


def _source(tensor: ir.TensorProtocol) -> Callable[[], NDArray[Any]]:
    """Return a reader for a tensor; computed ones, such as int8 weights, are computed once for all blocks."""
    return cache(tensor.numpy) if is_made_on_saving(tensor) else tensor.numpy


def _part(whole: ir.Value, read: Callable[[], NDArray[Any]], part: slice, columns: int, writer: Writer) -> ir.Value:
    """Write the columns `part` of a weight or of a tensor with one number per column; single numbers are repeated.

    Each product needs its own zero point, without which onnxruntime does not load an exact session.
    """
    tensor, name = tensor_of(whole), f"{whole.name}_{part.start}"
    before = tensor.shape.numpy()
    if not before or before[-1] != columns:
        return writer.constant(read(), name)
    sizes = ir.Shape([*before[:-1], part.stop - part.start])
    cut = ir.LazyTensor(lambda: ir.tensor(np.ascontiguousarray(read()[..., part])), tensor.dtype, sizes)
    return writer.initializer(cut, name)


blocked_maximum = Pass("blocked_maximum", _take_in_blocks)
