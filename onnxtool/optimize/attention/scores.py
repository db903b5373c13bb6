"""Find attentions: a Softmax over query-key scores that weights values, or an Attention operator.

Shape letters: B batch, S queries, L keys, H heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.edit import (
    attribute,
    constant,
    is_weight,
    only_consumer,
    producer,
    reduced_axes,
    scalar,
    tensor_of,
    value_graph,
)
from onnxtool.graph.shapes import Shapes

_LONGEST_CHAIN = 16
_LOWEST = -1e4  # adding this number masks a score; a larger one is a bias
_CAPPED = "scores that are capped by a Tanh, for which the nodes take less time than the operators"
SINKS = "scores with sinks beside them"
"""The reason of a RefusedError."""
_SAME_ELEMENTS = ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Dropout")


class RefusedError(Exception):
    """A Softmax that cannot be written as a fused attention, with the reason."""


@dataclass(frozen=True)
class Term:
    """A term added to the scores: `scale * value`.

    Attributes:
        is_merged: whether it broadcasts to [B * H, S, L] instead of [B, H, S, L].
    """

    value: ir.Value
    scale: float
    is_merged: bool


@dataclass(frozen=True)
class MaskedFill:
    """Scores that a Where replaces by a very low number.

    Attributes:
        condition: bool, broadcasts to [B, H, S, L].
        keeps: the value of the condition that keeps a score.
        number: the largest number that replaces a score.
    """

    condition: ir.Value
    keeps: bool
    number: float = -np.inf

    @property
    def is_infinite(self) -> bool:
        """Whether the number is -inf: the Softmax of an all -inf row is NaN."""
        return self.number == -np.inf


@dataclass(frozen=True)
class ZeroedRows:
    """The queries that get a row of zeros because they may attend to nothing, in one of four forms.

    Attributes:
        unattended: bool, broadcasts to [B, H, S, 1]: the condition of a Where after the attention.
        counted: the summands of `unattended` along L, broadcasts to [B, H, S, L]: 1 for keys that may be attended to.
        conditions: conditions of the masked fills that also set probabilities to zero.
        if_nan: whether NaN probabilities are set to zero.
        if_lowest: whether a query whose keys all have the lowest number or less in the mask gets zeros, as in the
            `Attention` of ai.onnx.
    """

    unattended: ir.Value | None = None
    counted: ir.Value | None = None
    conditions: tuple[MaskedFill, ...] = ()
    if_nan: bool = False
    if_lowest: bool = False


@dataclass(frozen=True)
class Masking:
    """All operations on the scores between MatMul and Softmax.

    Attributes:
        is_floored: whether a Max keeps the added terms finite.
    """

    terms: tuple[Term, ...] = ()
    masked_fills: tuple[MaskedFill, ...] = ()
    is_floored: bool = False

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """The values of the terms, then the conditions of the masked fills."""
        return (*(term.value for term in self.terms), *(masked_fill.condition for masked_fill in self.masked_fills))


@dataclass(frozen=True)
class MatchedAttention:
    """An attention in a graph: `softmax(masking(scale * queries @ keys)) @ values`.

    Attributes:
        queries: [B, H, S, D] or [B * H, S, D].
        keys: [B, H, D, L] or [B * H, D, L] where `is_transposed`, otherwise [B, H, L, D].
        values: [B, H, L, D] or [B * H, L, D].
        scale: the factor of `queries @ keys`.
        is_causal: whether the operator itself masks later keys.
        result: [B, H, S, D] or [B * H, S, D].
        is_flat: whether queries, keys, values and result are [B, S or L, H * D] instead.
        zeroed_rows: the rows of `result` that are set to zero; None if there are none.
        sinks: [1, H, 1, 1], an extra score per head that weights no value; None if there are none.
    """

    queries: ir.Value
    keys: ir.Value
    is_transposed: bool
    values: ir.Value
    num_heads: int
    scale: float
    masking: Masking
    is_causal: bool
    result: ir.Value
    is_flat: bool = False
    zeroed_rows: ZeroedRows | None = None
    sinks: ir.Value | None = None


def match_roots(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the match root of each attention in a graph that is not yet an onnxruntime operator.

    It is the Softmax whose probabilities weight values, or the `Attention` of ai.onnx.
    """
    for node in graph:
        is_weighting = node.op_type == "Softmax" and _weights_something(node.outputs[0])
        if node.domain == "" and (is_weighting or node.op_type == "Attention"):
            yield node


def keeps_probabilities(root: ir.Node) -> bool:
    """Whether any node other than the MatMul that weights values reads the probabilities of a match root."""
    return root.op_type == "Softmax" and _weighting(root.outputs[0]) is None


def find_attention(root: ir.Node, shapes: Shapes) -> MatchedAttention:
    """Match the attention around a Softmax, or an `Attention` of ai.onnx.

    Raises:
        RefusedError: its form is unknown.
    """
    return _of_operator(root, shapes) if root.op_type == "Attention" else _of_softmax(root, shapes)


def _of_softmax(softmax: ir.Node, shapes: Shapes) -> MatchedAttention:
    scores = softmax.inputs[0]
    rank = shapes.rank(scores)
    if scores is None or rank is None or rank < 3:
        raise RefusedError(f"scores of rank {rank}")
    _check_one_product(scores)
    if rank > 4:
        raise RefusedError(f"scores of rank {rank}, for which the nodes take less time than an operator of rank 4")
    if attribute(softmax, "axis", -1) not in (-1, rank - 1):
        raise RefusedError("a Softmax over another axis than the last")
    scores, sinks = _without_sinks(scores, shapes)
    above, num_heads, scale, masking = _take_apart(scores, shapes)
    weighting = _weighting(_of_keys(softmax.outputs[0]) if sinks is not None else softmax.outputs[0])
    if weighting is None:
        raise RefusedError(f"probabilities that {_how_read(softmax.outputs[0])}")
    product, conditions = weighting
    result, zeroed_rows = _zeroed_rows(product.outputs[0], conditions, masking)
    queries, keys = above.inputs[:2]
    values = product.inputs[1]
    if queries is None or keys is None or values is None or num_heads is None:
        raise RefusedError("a number of heads that is not known")
    return MatchedAttention(
        queries=queries,
        keys=keys,
        is_transposed=True,
        values=values,
        num_heads=num_heads,
        scale=scale,
        masking=masking,
        is_causal=False,
        result=result,
        zeroed_rows=zeroed_rows,
        sinks=sinks,
    )


def _how_read(probabilities: ir.Value) -> str:
    """Describe the readers of probabilities that are read by more than one product."""
    readers = {(node.op_type, index) for node, index in probabilities.uses()}
    if readers == {("MatMul", 0)} and not probabilities.is_graph_output():
        return "weight several tensors of values"
    if readers == {("Einsum", 0)}:
        return "are read by an Einsum that is not a product of two matrices"
    return "are read elsewhere as well"


def _without_sinks(scores: ir.Value, shapes: Shapes) -> tuple[ir.Value, ir.Value | None]:
    """Return the scores of the keys, and the sinks next to them; None without sinks."""
    concat = producer(scores, "Concat")
    if concat is None or len(concat.inputs) != 2 or attribute(concat, "axis") not in (-1, 3):
        return scores, None
    first, sinks = concat.inputs
    num_heads = shapes.fixed(scores, 1)
    node = producer(sinks, "Expand")
    if node is not None and shapes.fixed(sinks, -1) == 1:
        sinks = node.inputs[0]
    if first is None or sinks is None or num_heads is None:
        raise RefusedError(SINKS)
    if shapes.shape(sinks) != (1, num_heads, 1, 1):
        raise RefusedError(f"{SINKS}, which are not one number a head")
    return first, sinks


def _check_one_product(scores: ir.Value) -> None:
    """Refuse scores that are concatenated from several products, as in BigBird."""
    concat = producer(scores, "Concat")
    if concat is not None and sum(side is not None and _leads_to_matmul(side) for side in concat.inputs) > 1:
        raise RefusedError("scores of several products side by side, which are block-sparse")


def _of_keys(probabilities: ir.Value) -> ir.Value:
    """Return the probabilities without the sinks."""
    node = only_consumer(probabilities, "Slice")
    bounds = [] if node is None else [scalar(value) for value in node.inputs[1:]]
    if node is None or bounds[:2] != [0.0, -1.0] or bounds[2:] not in ([3.0], [-1.0], [3.0, 1.0], [-1.0, 1.0]):
        raise RefusedError(SINKS)
    return node.outputs[0]


def _of_operator(node: ir.Node, shapes: Shapes) -> MatchedAttention:
    """Take apart an `Attention` of ai.onnx, opset 23 and later, that has no cache."""
    queries, keys, values = node.inputs[:3]
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if any(value is not None for value in node.inputs[4:]) or any(map(_is_read, node.outputs[1:])):
        raise RefusedError("an Attention with a cache, or whose scores are read elsewhere as well")
    if attribute(node, "softcap", 0.0):
        raise RefusedError(_CAPPED)
    is_flat = shapes.rank(queries) == 3
    num_heads = attribute(node, "q_num_heads") if is_flat else shapes.fixed(queries, 1)
    num_key_heads = attribute(node, "kv_num_heads") if is_flat else shapes.fixed(keys, 1)
    width = shapes.fixed(queries, -1)
    if queries is None or keys is None or values is None or not num_heads or not width or shapes.rank(queries) is None:
        raise RefusedError("a number of heads that is not known")
    if num_key_heads != num_heads:
        raise RefusedError("keys with fewer heads than the queries")
    if attribute(node, "is_causal", 0) and not shapes.same(queries, keys):
        # ONNX aligns query positions with the first key, onnxruntime's operators with the last.
        raise RefusedError("a causal Attention without as many queries as keys")
    masking = Masking()
    if mask is not None and shapes.dtype(mask) == np.bool_:
        masking = Masking(masked_fills=(MaskedFill(mask, keeps=True),))
    elif mask is not None:
        masking = Masking(terms=(Term(mask, 1.0, is_merged=False),))
    return MatchedAttention(
        queries=queries,
        keys=keys,
        is_transposed=False,
        values=values,
        num_heads=num_heads,
        scale=attribute(node, "scale", (width // num_heads if is_flat else width) ** -0.5),
        masking=masking,
        is_causal=bool(attribute(node, "is_causal", 0)),
        result=node.outputs[0],
        is_flat=is_flat,
        zeroed_rows=None if mask is None else ZeroedRows(if_lowest=True),
    )


def _is_read(value: ir.Value) -> bool:
    return value.is_graph_output() or bool(value.uses())


def _take_apart(value: ir.Value, shapes: Shapes) -> tuple[ir.Node, int | None, float, Masking]:
    """Walk from the scores up to the MatMul of queries and keys; return it with number of heads, scale and masking."""
    scale, current = 1.0, value
    terms: list[Term] = []
    masked_fills: list[MaskedFill] = []
    num_heads: int | None = None
    node: ir.Node | None = None
    is_floored = False
    for _ in range(_LONGEST_CHAIN):
        if shapes.rank(current) == 4 and num_heads is None:
            num_heads = shapes.fixed(current, 1)
        node = producer(current)
        if node is None:
            break
        if node.op_type == "MatMul":
            return node, num_heads, scale, Masking(tuple(terms), tuple(masked_fills), is_floored)
        above, factor = _step(node, shapes, terms, masked_fills, scale)
        is_floored |= node.op_type == "Max"
        scale, current = scale * factor, above
    name = "nothing" if node is None else node.op_type
    raise RefusedError(f"scores that are made by {name}, not by queries and keys")


def _step(
    node: ir.Node, shapes: Shapes, terms: list[Term], masked_fills: list[MaskedFill], scale: float
) -> tuple[ir.Value, float]:
    """Go up one operator, and record the term or masked fill it adds; return the scores above it and its factor."""
    first = node.inputs[0]
    if first is None:
        raise RefusedError(f"{node.op_type} without an input")
    if node.op_type in _SAME_ELEMENTS:
        return first, 1.0
    if node.op_type == "Cast" and first.dtype is not None and first.dtype == node.outputs[0].dtype:
        return first, 1.0
    if node.op_type in ("Mul", "Div"):
        factor, other = scalar(node.inputs[1]), first
        if factor is None and node.op_type == "Mul":
            factor, other = scalar(first), node.inputs[1] or first
        if factor:
            return other, factor if node.op_type == "Mul" else 1.0 / factor
        for kept, scores in ((node.inputs[1], first), (first, node.inputs[1])):
            if scores is not None and any(_is_low_where_zero(term, kept) for term in terms):
                return scores, 1.0
    if node.op_type == "Max" and len(node.inputs) == 2:  # keeps the sum of two lowest numbers finite
        floor = scalar(node.inputs[1])
        if floor is not None and floor <= _LOWEST:
            return first, 1.0
    if node.op_type in ("Add", "Sub"):
        scores, added = _sides(node, shapes)
        is_merged = shapes.rank(node.outputs[0]) == 3
        terms.append(Term(added, scale if node.op_type == "Add" else -scale, is_merged))
        return scores, 1.0
    if node.op_type == "Where":
        condition, yes, no = node.inputs
        if shapes.rank(node.outputs[0]) != 4:
            raise RefusedError("a mask over heads and batch in one")
        for kept, blocked, keeps in ((no, yes, False), (yes, no, True)):
            if condition is not None and kept is not None and (number := _fill_of(blocked)) is not None:
                masked_fills.append(MaskedFill(condition, keeps, number))
                return kept, 1.0
    if node.op_type == "Tanh":
        raise RefusedError(_CAPPED)
    if node.op_type == "Concat":
        _check_one_product(node.outputs[0])
        raise RefusedError(SINKS)
    raise RefusedError(f"scores that are changed by {node.op_type}")


def _is_low_where_zero(term: Term, kept: ir.Value | None) -> bool:
    """Whether a term is `(1 - kept) * lowest`, so that scores multiplied by `kept`, zeros and ones, are dropped at 0.

    As in OpenAI's first GPT: `scores * kept + -1e4 * (1 - kept)`.
    """
    product = producer(term.value, "Mul")
    sides = [] if product is None else [(product.inputs[0], product.inputs[1]), (product.inputs[1], product.inputs[0])]
    for inverted, factor in sides:
        sub, lowest = producer(inverted, "Sub"), scalar(factor)
        if sub is None or lowest is None or scalar(sub.inputs[0]) != 1.0 or sub.inputs[1] is not kept:
            continue
        table = _table_of(kept)
        return table is not None and bool(np.isin(table, (0, 1)).all()) and lowest * term.scale <= _LOWEST
    return False


def _table_of(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the initializer that a value is part of; None if there is none."""
    for _ in range(_LONGEST_CHAIN):
        node = producer(value, "Slice", "Cast", *_SAME_ELEMENTS)
        if node is None:
            break
        value = node.inputs[0]
    return tensor_of(value).numpy() if value is not None and is_weight(value) else None


def _sides(node: ir.Node, shapes: Shapes) -> tuple[ir.Value, ir.Value]:
    """Return the input of an Add that leads to the scores, and the other input."""
    first, second = node.inputs[0], node.inputs[1]
    if first is None or second is None:
        raise RefusedError("an Add without an input")
    candidates = [(first, second)] if node.op_type == "Sub" else [(first, second), (second, first)]
    for scores, added in candidates:
        if shapes.same(scores, node.outputs[0]) and _leads_to_matmul(scores):
            return scores, added
    if any(_leads_to_matmul(side, "Tanh") and not _leads_to_matmul(side) for side in (first, second)):
        raise RefusedError(_CAPPED)
    raise RefusedError("a sum of which no side comes from queries and keys")


def _leads_to_matmul(value: ir.Value, *further: str) -> bool:
    """Whether `value` comes from a MatMul of two computed tensors through operators on scores or in `further`."""
    waiting = [value]
    for _ in range(2 * _LONGEST_CHAIN):
        if not waiting:
            return False
        node = producer(waiting.pop())
        if node is None:
            continue
        if node.op_type == "MatMul":
            if all(operand is not None and operand.const_value is None for operand in node.inputs):
                return True
        elif node.op_type in (*_SAME_ELEMENTS, "Cast", "Mul", "Div", "Add", "Sub", "Max", "Where", *further):
            waiting.extend(operand for operand in node.inputs if operand is not None)
    return False


def _weights_something(probabilities: ir.Value) -> bool:
    """Whether a MatMul reads `probabilities`, directly or through views, masks and slices."""
    waiting = [probabilities]
    for _ in range(_LONGEST_CHAIN):
        if not waiting:
            break
        for node, index in waiting.pop().uses():
            if node.op_type in ("MatMul", "Einsum") and index == 0:
                return True
            if node.op_type in (*_SAME_ELEMENTS, "Cast", "Slice", "Where"):
                waiting.append(node.outputs[0])
    return False


def _weighting(probabilities: ir.Value) -> tuple[ir.Node, list[ir.Value]] | None:
    """Return the MatMul that weights values with `probabilities`, and the mask conditions on the way to it."""
    conditions: list[ir.Value] = []
    current = probabilities
    for _ in range(_LONGEST_CHAIN):
        readers = [(node, index) for node, index in current.uses() if node.op_type not in ("IsNaN", "Shape")]
        if len(readers) != 1 or current.is_graph_output():
            return None
        node, index = readers[0]
        if node.graph is not value_graph(current):
            return None
        if node.op_type == "MatMul" and index == 0:
            return node, conditions
        if node.op_type == "Where" and index in (1, 2) and scalar(node.inputs[3 - index]) == 0.0:
            if (condition := node.inputs[0]) is not None:
                conditions.append(condition)
        elif node.op_type not in (*_SAME_ELEMENTS, "Cast"):
            return None
        current = node.outputs[0]
    return None


def _zeroed_rows(
    result: ir.Value, conditions: Sequence[ir.Value], masking: Masking
) -> tuple[ir.Value, ZeroedRows | None]:
    """Return the result after the operators that set rows to zero, and these rows.

    Args:
        result: the weighted values.
        conditions: conditions that set probabilities to zero.
        masking: the masking of the scores.
    """
    fills = []
    for condition in conditions:
        fill = next((masked_fill for masked_fill in masking.masked_fills if masked_fill.condition is condition), None)
        if fill is not None:
            fills.append(fill)
        elif producer(condition, "IsNaN") is None:  # the result of a Softmax over a row of infinities
            raise RefusedError("probabilities that are masked otherwise than the scores")
    unattended = counted = None
    uses = list(result.uses())
    if len(uses) == 1 and not result.is_graph_output():
        node, index = uses[0]
        is_fill = node.op_type == "Where" and index == 2 and node.graph is value_graph(result)
        if is_fill and scalar(node.inputs[1]) == 0.0 and (counted := _counted_keys(node.inputs[0])) is not None:
            result, unattended = node.outputs[0], node.inputs[0]
    if unattended is None and not conditions:
        return result, None
    return result, ZeroedRows(unattended, counted, tuple(fills), len(fills) < len(conditions))


def _counted_keys(condition: ir.Value | None) -> ir.Value | None:
    """Return the summand of a condition `sum over keys that a query may attend to < 1`; None for any other."""
    less = producer(condition, "Less")
    total = None if less is None else producer(less.inputs[0], "ReduceSum")
    if less is None or total is None or scalar(less.inputs[1]) != 1.0 or reduced_axes(total) not in ([-1], [3]):
        return None
    return total.inputs[0]


def _fill_of(value: ir.Value | None) -> float | None:
    """Return the largest number of a constant that is low enough to remove a score from a Softmax; else None."""
    array = constant(value)
    if array is None or array.dtype.kind != "f" or not array.size or array.max() > _LOWEST:
        return None
    return float(array.max())
