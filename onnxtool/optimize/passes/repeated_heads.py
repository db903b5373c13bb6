"""Multiply once with key and value heads that several query heads share.

Shape letters: B batch, S queries, L keys, H heads, D size of a head, R query heads that share one key head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import only_consumer, producer, remove_unused, replace, required, scalar
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.attention.views import VIEWS, HeadLayout, Heads, find_heads
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_LONGEST_CHAIN = 10
_RANK = 4


@dataclass(frozen=True)
class _RepeatedProduct:
    """A MatMul of heads, [B, H, S, X], with heads that are repeated.

    Attributes:
        heads: the repeated heads, [B, H / R, X, Y] or, if `is_transposed`, [B, H / R, Y, X].
        last: the result after subsequent scaling, [B, H, S, Y].
        scale: the total factor of the result.
    """

    node: ir.Node
    heads: Heads
    is_transposed: bool
    last: ir.Value
    scale: float


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `a @ repeat(b)` by `reshape(reshape(a) @ b)`: the rows of R heads of a become rows of one head.

    This is for attentions without a fused operator; in others there is no MatMul left. Otherwise a step with a cache
    spends most of its time copying keys and values.
    """
    candidates = [node for node in model.graph if node.domain == "" and node.op_type == "MatMul" and _expands(node)]
    if not candidates:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    products = [product for node in candidates if (product := _match(node, shapes)) is not None]
    for product in products:
        _write(product, model.graph)
    return Outcome(model, len(products))


def _expands(node: ir.Node) -> bool:
    """Whether the second factor of a MatMul is a view with an Expand in it."""
    return any(above.op_type == "Expand" for above in _chain_above(node.inputs[1]))


def _chain_above(value: ir.Value | None) -> Iterator[ir.Node]:
    for _ in range(_LONGEST_CHAIN):
        node = producer(value, *VIEWS)
        if node is None:
            return
        yield node
        value = node.inputs[0]


def _match(node: ir.Node, shapes: Shapes) -> _RepeatedProduct | None:
    first, second = required(node, 0), required(node, 1)
    num_heads = shapes.fixed(first, 1)
    if shapes.rank(first) != _RANK or shapes.rank(second) != _RANK or num_heads is None:
        return None
    if shapes.fixed(second, 1) != num_heads or shapes.dtype(first) not in (np.float32, np.float16):
        return None
    for is_transposed in (True, False):
        heads = find_heads(second, shapes, num_heads, transposed=is_transposed, repeated=True)
        if heads is not None and heads.repeats > 1:
            last, scale = _scaled(node.outputs[0])
            return _RepeatedProduct(node, heads, is_transposed, last, scale * heads.scale)
    return None


def _scaled(value: ir.Value) -> tuple[ir.Value, float]:
    """Return the last value that equals `value` times a number, and the number."""
    scale = 1.0
    for _ in range(_LONGEST_CHAIN):
        node = only_consumer(value, "Mul", "Div")
        factor = None if node is None or node.inputs[0] is not value else scalar(node.inputs[1])
        if node is None or not factor:
            break
        scale = scale * factor if node.op_type == "Mul" else scale / factor
        value = node.outputs[0]
    return value, scale


def _write(product: _RepeatedProduct, graph: ir.Graph) -> None:
    last = product.last.producer()
    if last is None:
        raise ValueError(f"nothing computes {product.last.name}")
    writer = Writer(last)
    num_heads, heads = product.heads.num_heads, product.heads
    rows = writer.node("Reshape", [product.node.inputs[0], _rows(num_heads, writer)])
    factors = [rows, _heads_outside(heads, writer)]
    if product.is_transposed or product.scale != 1.0:
        attributes = {"alpha": float(product.scale), "transB": int(product.is_transposed)}
        result = writer.node("FusedMatMul", factors, attributes, domain=MICROSOFT)
    else:
        result = writer.node("MatMul", factors)
    by_heads = writer.node("Reshape", [result, _rows(num_heads * heads.repeats, writer)], like=product.last)
    replace(product.last, by_heads)
    remove_unused(graph, [last])


def _rows(num_heads: int, writer: Writer) -> ir.Value:
    """Return the shape that splits heads and rows, [B, _, _, X], into `num_heads` and rows per head."""
    return writer.constant(np.array([0, num_heads, -1, 0], np.int64), f"onnxtool.rows_of_{num_heads}_heads")


def _heads_outside(heads: Heads, writer: Writer) -> ir.Value:
    """Return the heads as [B, H, L, D]."""
    value = heads.source
    if heads.layout is HeadLayout.FLAT:
        shape = writer.constant(np.array([0, 0, heads.num_heads, heads.head_size]), f"onnxtool.{heads.num_heads}_heads")
        value = writer.node("Reshape", [value, shape])
    return (
        value if heads.layout is HeadLayout.HEADS_OUTSIDE else writer.node("Transpose", [value], {"perm": [0, 2, 1, 3]})
    )


repeated_heads = Pass("repeated_heads", _apply)
