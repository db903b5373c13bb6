"""Compute a product with a large vocabulary in blocks, where only the maximum over tokens of each number is read.

Letters of shapes: B batch, S sequence, K hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import (
    drop_unused,
    is_made_on_saving,
    is_weight,
    operands,
    reduced_axes,
    replace_and_erase,
    required,
    tensor_of,
)
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass

# Columns of a block. Scores of 8 texts of 128 tokens are then 16 MB, which stay in the cache of a CPU until they are
# reduced, and a large batch needs an eighth of the memory. Narrower blocks cost a query more than they give.
_WIDTH = 4096


@dataclass(frozen=True)
class _Match:
    """A wide product [B, S, V] of which only the maximum over S is read.

    Attributes:
        scaled: the Mul behind it by a number for each token; None without one.
        bias: the number for each column that is added then; None without one.
    """

    product: ir.Node
    scaled: ir.Node | None
    bias: ir.Value | None
    reduce: ir.Node


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `ReduceMax(x @ W)` over S by the maxima for blocks of the columns of W, one after the other.

    So the scores [B, S, V] need not be in memory together. A Mul by a number for each token may lie between, and a
    bias, which is added to the maxima. A weight that others read as well is not cut: it would be stored twice.
    """
    found = [match for node in model.graph if (match := _match(node)) is not None]
    shapes = find_shapes(model) if any(match.scaled is not None for match in found) else None
    num_changes = 0
    for match in found:
        if match.scaled is None or (shapes is not None and shapes.fixed(match.scaled.inputs[1], -1) == 1):
            _cut(match)
            num_changes += 1
    return Outcome(model, num_changes)


def _match(reduce: ir.Node) -> _Match | None:
    if reduce.domain or reduce.op_type != "ReduceMax" or reduced_axes(reduce) != [1]:
        return None
    scores, scaled, bias = _only(reduce.inputs[0]), None, None
    added = None if scores is None or scores.op_type != "Add" or scores.domain else operands(scores, _by_column)
    if added is not None:
        bias, scores = added[0], _only(added[1])
    if scores is not None and scores.op_type == "Mul" and not scores.domain:
        scaled, scores = scores, _only(scores.inputs[0])
    if scores is None or (scores.domain, scores.op_type) not in (("", "MatMul"), (MICROSOFT, "MatMulIntegerToFloat")):
        return None
    weight = scores.inputs[1]
    if weight is None or not is_weight(weight, 2) or len(weight.uses()) > 1 or _columns(weight) < 2 * _WIDTH:
        return None
    return _Match(scores, scaled, bias, reduce)


def _only(value: ir.Value | None) -> ir.Node | None:
    """Return what computes a value that is read once."""
    return None if value is None or len(value.uses()) != 1 or value.is_graph_output() else value.producer()


def _by_column(value: ir.Value) -> bool:
    return is_weight(value, 1)


def _columns(weight: ir.Value) -> int:
    columns = tensor_of(weight).shape[-1]
    return columns if isinstance(columns, int) else 0


def _cut(match: _Match) -> None:
    """Write product and maximum for each block, join the maxima, and add the bias."""
    product, reduce = match.product, match.reduce
    writer, columns = Writer(reduce), _columns(required(product, 1))
    whole = [one for one in product.inputs if one is not None and is_weight(one)]
    sources = {one: _source(tensor_of(one)) for one in whole}
    maxima = []
    for start in range(0, columns, _WIDTH):
        part = slice(start, min(start + _WIDTH, columns))
        inputs = [_part(one, sources[one], part, columns, writer) if one in sources else one for one in product.inputs]
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
    """Return what reads a tensor; one that is computed, as weights of int8 are, is so once for all blocks."""
    return cache(tensor.numpy) if is_made_on_saving(tensor) else tensor.numpy


def _part(whole: ir.Value, read: Callable[[], NDArray[Any]], part: slice, columns: int, writer: Writer) -> ir.Value:
    """Write the columns `part` of a weight, or of what it has a number for each column of, or a number again.

    Each product has a zero point of its own, without which onnxruntime does not load an exact session.
    """
    tensor, name = tensor_of(whole), f"{whole.name}_{part.start}"
    before = tensor.shape.numpy()
    if not before or before[-1] != columns:
        return writer.constant(read(), name)
    sizes = ir.Shape([*before[:-1], part.stop - part.start])
    cut = ir.LazyTensor(lambda: ir.tensor(np.ascontiguousarray(read()[..., part])), tensor.dtype, sizes)
    return writer.initializer(cut, name)


blocked_maximum = Pass("blocked_maximum", _apply)
