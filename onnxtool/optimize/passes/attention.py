"""Fuse attention into one onnxruntime operator.

Shape letters: B batch, S queries, L keys, H heads, D size of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import remove_unused, replace, tensor_of
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer, without_omitted
from onnxtool.model_file.weights import read_once
from onnxtool.optimize.attention.masks import DEFAULT_FILL, MaskKind, find_mask_kind
from onnxtool.optimize.attention.scores import (
    SINKS,
    Masking,
    MatchedAttention,
    RefusedError,
    Term,
    ZeroedRows,
    find_attention,
    match_roots,
)
from onnxtool.optimize.attention.views import VIEWS, HeadLayout, Heads, Linear, find_heads, find_joined, find_linear
from onnxtool.optimize.kept import PARTS, patterns_of
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals

_BLOCK = 8  # GroupQueryAttention requires a head size that is a multiple of this


@dataclass(frozen=True)
class _AttentionParts:
    """An attention in the form the fused operator needs.

    If several query heads share one key and value head, the operator uses the key heads, and one sequence for each
    query head that shares one: keys and values need not be repeated. With a cache, that saves most of a step's time.

    Attributes:
        joined: the value [B, S, H * D] that the operator replaces; None if the heads are not joined.
    """

    found: MatchedAttention
    queries: Heads
    keys: Heads
    values: Heads
    mask_kind: MaskKind
    joined: ir.Value | None

    @property
    def repeats(self) -> int:
        """The number of query heads that share one key and value head."""
        return self.keys.repeats

    @property
    def scale(self) -> float:
        """The factor of `queries @ keys`."""
        return self.found.scale * self.queries.scale * self.keys.scale


@dataclass
class _SharedValues:
    """Values shared by a graph's attentions: masks in the form that the fused operators take."""

    model: ir.Model
    shapes: Shapes
    provider: str
    mask_kinds: dict[tuple[Masking, ir.Value | None], MaskKind] = field(default_factory=dict)
    values: dict[Hashable, ir.Value] = field(default_factory=dict)


def _apply(model: ir.Model, context: Context) -> Outcome:
    """Replace `MatMul(Softmax(scale * q @ k + mask), v)` by `Attention(x, qkv)` or `MultiHeadAttention(q, k, v)`.

    With sinks next to the scores it becomes `GroupQueryAttention(q, k, v, …, sinks)`.
    """
    nodes = list(match_roots(model.graph))
    if not nodes:
        return Outcome(model, 0)
    shared = _SharedValues(model, find_shapes(model), context.provider)
    reasons: list[str] = []
    for node in nodes:
        try:
            _fuse(_find_parts(node, shared), shared)
        except RefusedError as refusal:
            reasons.append(str(refusal))
    return Outcome(model, len(nodes) - len(reasons), refusals(reasons))


def _find_parts(root: ir.Node, shared: _SharedValues) -> _AttentionParts:
    """Match an attention and check its preconditions before changing anything."""
    shapes = shared.shapes
    matched = find_attention(root, shapes)
    terms = matched.masking.terms
    find = _flat_heads if matched.is_flat else find_heads
    queries = find(matched.queries, shapes, matched.num_heads)
    if queries is None:
        raise RefusedError("queries whose heads cannot be told apart")
    if (dtype := shapes.dtype(queries.source)) not in (np.float32, np.float16):
        raise RefusedError(f"queries of dtype {dtype}")
    for operand, value in (("keys", matched.keys), ("values", matched.values), *(("a mask", t.value) for t in terms)):
        if shapes.dtype(value) != dtype:
            raise RefusedError(f"{operand} of dtype {shapes.dtype(value)}, and queries of dtype {dtype}")
    joined = matched.result if matched.is_flat else find_joined(matched.result, shapes, matched.num_heads)
    if matched.zeroed_rows is not None and shapes.rank(matched.zeroed_rows.unattended) not in (None, 4):
        raise RefusedError("rows of zeros for heads that are merged with the batch")
    counted = None if matched.zeroed_rows is None else matched.zeroed_rows.counted
    if (matched.masking, counted) not in shared.mask_kinds:
        shared.mask_kinds[matched.masking, counted] = find_mask_kind(shared.model, matched.masking, shapes, counted)
    matched, mask_kind = _settled(matched, shared.mask_kinds[matched.masking, counted])
    if mask_kind.sees_later:
        raise RefusedError("two masks, by which queries that may attend to nothing see later keys")
    # The operator counts query positions, so queries have to be one sequence if it masks later keys.
    is_one_sequence = (
        mask_kind.is_causal or matched.is_causal or (mask_kind.is_bias and not _heads_of_bias(matched, shapes))
    )
    if is_one_sequence and not matched.is_causal and _is_broadcast(matched.keys, matched.num_heads, shapes):
        # A bias masks later keys just as well, and the single head need not be repeated.
        mask_kind, is_one_sequence = MaskKind(is_bias=True, hides_later=mask_kind.hides_later), False
    keys, values = _keys_and_values(matched, shapes, are_shared=matched.sinks is not None or not is_one_sequence)
    if queries.head_size != keys.head_size or values.scale != 1.0:
        raise RefusedError("queries and keys of different sizes, or scaled values")
    parts = _AttentionParts(matched, queries, keys, values, mask_kind, joined)
    if matched.sinks is not None:
        _check_sinks(parts, shared)
    return parts


def _settled(matched: MatchedAttention, mask_kind: MaskKind) -> tuple[MatchedAttention, MaskKind]:
    """Return an attention without zeroed rows if its mask makes none, and with its mask as a bias if necessary.

    For a known kind of mask, `fill` determines the result of a query that may attend to nothing: the mean of all values
    for the lowest number, NaN for infinities.
    """
    zeroed_rows, masking = matched.zeroed_rows, matched.masking
    bias = MaskKind(is_bias=True, hides_later=mask_kind.hides_later)
    if mask_kind.is_bias or mask_kind.padding is None:
        return matched, mask_kind
    if zeroed_rows is None:
        # The operator masks later keys with the lowest number, so that padding before a text is not NaN.
        is_mixed = mask_kind.fill == -np.inf and (mask_kind.is_causal or matched.is_causal)
        return matched, bias if is_mixed else mask_kind
    if zeroed_rows.conditions and (zeroed_rows.if_nan or len(zeroed_rows.conditions) < len(masking.values)):
        return matched, bias
    lowest = float(np.finfo(np.float32).min)
    if (zeroed_rows.if_nan and mask_kind.fill > -np.inf) or (zeroed_rows.if_lowest and mask_kind.fill > lowest):
        return replace_fields(matched, zeroed_rows=None), mask_kind
    return matched, replace_fields(mask_kind, fill=max(mask_kind.fill, lowest))


def _check_sinks(parts: _AttentionParts, shared: _SharedValues) -> None:
    """Check that GroupQueryAttention can compute an attention with sinks, and faster than the nodes.

    With a cache, on the CPU, one step takes 1.3 to 2.3 times as long as the nodes that `repeated_heads` leaves, and
    several tokens in several rows are an error. On CUDA it only has kernels for float16 and bfloat16.

    Raises:
        RefusedError: either condition fails.
    """
    if shared.provider != "cpu" or shared.shapes.dtype(parts.queries.source) != np.float32:
        raise RefusedError(f"{SINKS}, for which there is an operator for float32 on the CPU alone")
    if not _is_own(parts, shared.shapes):
        raise RefusedError(f"{SINKS}, and a cache, with which the nodes take less time than the operator")
    if not parts.mask_kind.hides_later:
        raise RefusedError(f"{SINKS}, and queries that see later keys, which the operator masks")
    if parts.keys.head_size % _BLOCK or parts.values.head_size != parts.keys.head_size:
        sizes = f"{parts.keys.head_size} and {parts.values.head_size}"
        raise RefusedError(f"{SINKS}, and heads of {sizes}: the operator takes a multiple of {_BLOCK} for both")


def _is_own(parts: _AttentionParts, shapes: Shapes) -> bool:
    """Whether there are as many keys as queries for all inputs."""
    queries, keys = (_size_of_length(heads, shapes) for heads in (parts.queries, parts.keys))
    return queries is not None and queries == keys


def _keys_and_values(matched: MatchedAttention, shapes: Shapes, *, are_shared: bool) -> tuple[Heads, Heads]:
    """Find the heads of keys and values; with `are_shared`, the shared ones if there are any."""
    if are_shared:
        keys, values = (_heads(matched, shapes, is_keys=is_keys, are_shared=True) for is_keys in (True, False))
        if keys is not None and values is not None and keys.repeats == values.repeats and values.scale == 1.0:
            return keys, values
    keys, values = (_heads(matched, shapes, is_keys=is_keys, are_shared=False) for is_keys in (True, False))
    if keys is None or values is None:
        raise RefusedError(f"{'keys' if keys is None else 'values'} whose heads cannot be told apart")
    return keys, values


def _heads(matched: MatchedAttention, shapes: Shapes, *, is_keys: bool, are_shared: bool) -> Heads | None:
    """Find the heads of keys or values; shared heads are repeated, or one head broadcast by the MatMul (Falcon)."""
    value, is_transposed = (matched.keys, matched.is_transposed) if is_keys else (matched.values, False)
    if matched.is_flat:
        return _flat_heads(value, shapes, matched.num_heads)
    is_broadcast = are_shared and _is_broadcast(value, matched.num_heads, shapes)
    num_heads = 1 if is_broadcast else matched.num_heads
    heads = find_heads(value, shapes, num_heads, transposed=is_transposed, repeated=are_shared, in_columns=is_keys)
    return replace_fields(heads, repeats=matched.num_heads) if heads is not None and is_broadcast else heads


def _flat_heads(value: ir.Value, shapes: Shapes, num_heads: int) -> Heads | None:
    """Return the heads of `value`, [B, S, H * D]."""
    width = shapes.fixed(value, -1)
    return None if width is None else Heads(value, HeadLayout.FLAT, num_heads, width // num_heads, 1.0)


def _is_broadcast(value: ir.Value, num_heads: int, shapes: Shapes) -> bool:
    """Whether keys or values are one head that the MatMul broadcasts to all query heads."""
    return shapes.rank(value) == 4 and shapes.fixed(value, 1) == 1 < num_heads


def _heads_of_bias(matched: MatchedAttention, shapes: Shapes) -> int | None:
    """Return the size of the head axis of all masks together, 1 or the number of heads; None if it is dynamic."""
    sizes = {1}
    for number, value in enumerate(matched.masking.values):
        is_merged = number < len(matched.masking.terms) and matched.masking.terms[number].is_merged
        rank = shapes.rank(value)
        if rank is None:
            return None
        size = shapes.fixed(value, -3) if rank > 2 else 1
        sizes.add(matched.num_heads if is_merged and size != 1 else size or 0)
    return max(sizes) if sizes <= {1, matched.num_heads} else None


def _fuse(parts: _AttentionParts, shared: _SharedValues) -> None:
    """Replace the matched nodes by the fused operator."""
    last = (parts.joined or parts.found.result).producer()
    if last is None:
        raise RefusedError("a result that nothing makes")
    writer = Writer(last)
    if parts.found.sinks is not None:
        fused = _group_query_attention(parts, parts.found.sinks, shared, writer)
    else:
        fused = _attention(parts, shared, writer)
    if parts.found.zeroed_rows is not None and (parts.mask_kind.is_bias or parts.mask_kind.padding is not None):
        fused = _with_zeroed_rows(fused, parts.found.zeroed_rows, parts, shared, writer)
    if parts.joined is not None:
        replace(parts.joined, fused)
    else:
        _split_again(parts.found.result, fused, parts, shared.shapes, writer)
    remove_unused(shared.model.graph, [last])


def _attention(parts: _AttentionParts, shared: _SharedValues, writer: Writer) -> ir.Value:
    """Write `Attention` or `MultiHeadAttention`; return its result, [B, S, H * D]."""
    attributes, mask_kind = {"num_heads": parts.keys.num_heads, **_scale(parts)}, parts.mask_kind
    if mask_kind.is_causal or parts.found.is_causal:
        attributes["unidirectional"] = 1
    # The result of a query that may attend to nothing depends on it. CUDA's kernels compute it in float16 too.
    if mask_kind.padding is not None and shared.provider == "cpu" and mask_kind.fill != DEFAULT_FILL:
        attributes["mask_filter_value"] = mask_kind.fill
    mask, bias = _mask(parts, shared, writer), _bias(parts, shared, writer)
    packed = _packed(parts, shared.shapes)
    if packed is not None:
        inputs = [packed[0].x, *_joined_weights(packed, writer), mask, None, bias]
        return writer.node("Attention", without_omitted(inputs), attributes, domain=MICROSOFT)
    inputs = [_queries(parts, writer), *_written_keys_and_values(parts, writer), None, mask, bias]
    fused = writer.node("MultiHeadAttention", without_omitted(inputs), attributes, domain=MICROSOFT)
    return _in_one_sequence(fused, parts, writer)


def _group_query_attention(parts: _AttentionParts, sinks: ir.Value, shared: _SharedValues, writer: Writer) -> ir.Value:
    """Write `GroupQueryAttention` without a cache, which masks later keys itself; return its result, [B, S, H * D]."""
    attributes = {"num_heads": parts.queries.num_heads, "kv_num_heads": parts.keys.num_heads, **_scale(parts)}
    is_causal_alone = parts.mask_kind.is_causal and parts.mask_kind.padding is None
    bias = None if is_causal_alone else _shared_bias(parts, shared, writer)
    # All rows are as long as the longest: the bias marks the padding.
    length = writer.node("Cast", [_length(parts.queries, writer)], {"to": ir.DataType.INT32.value})
    before_last = writer.node("Sub", [length, writer.constant(np.array([1], np.int32), "onnxtool.one_int32")])
    batch = writer.sizes(parts.queries.source, range(1))
    lengths = [writer.node("Expand", [before_last, batch]), length]
    flat = [_flat(heads, writer) for heads in (parts.queries, parts.keys, parts.values)]
    inputs = [*flat, None, None, *lengths, None, None, None, bias]
    inputs.append(writer.node("Reshape", [sinks, _shape([parts.queries.num_heads], writer)]))
    # onnxruntime 1.24 also needs the cache outputs.
    node = ir.node("GroupQueryAttention", inputs, attributes, domain=MICROSOFT, num_outputs=3)
    return writer.add(node)[0]


def _scale(parts: _AttentionParts) -> dict[str, Any]:
    is_usual = np.isclose(parts.scale, parts.queries.head_size**-0.5, rtol=1e-6)
    return {} if is_usual else {"scale": float(parts.scale)}


def _packed(parts: _AttentionParts, shapes: Shapes) -> tuple[Linear, Linear, Linear] | None:
    """Return the three linear layers if q, k and v all come from one tensor, and nothing else reads them; else None.

    The operator would repeat the layers of queries and keys that position biases are computed from (DeBERTa).
    """
    if parts.repeats > 1 or _are_read_elsewhere(parts):
        return None
    linears = []
    for heads in (parts.queries, parts.keys, parts.values):
        linear = find_linear(heads.source, shapes) if heads.layout is HeadLayout.FLAT else None
        if linear is None:
            return None
        linears.append(linear)
    first, second, third = linears
    if not first.x is second.x is third.x or parts.values.head_size != parts.queries.head_size:
        return None
    thirds = [linear.part for linear in linears]
    if thirds == [0, 1, 2] and first.weight is second.weight is third.weight:
        return first, second, third
    return (first, second, third) if thirds == [None, None, None] else None


def _are_read_elsewhere(parts: _AttentionParts) -> bool:
    """Whether anything but the attention reads its queries, keys or values."""
    ends = {parts.found.queries, parts.found.keys, parts.found.values}
    waiting = [parts.queries.source, parts.keys.source, parts.values.source]
    while waiting:
        value = waiting.pop()
        readers = [node for node, _ in value.uses() if node.op_type != "Shape"]
        if value in ends:
            is_read = len(readers) > 1
        else:
            is_read = any(node.op_type not in VIEWS for node in readers)
            waiting += [output for node in readers for output in node.outputs]
        if is_read or value.is_graph_output():
            return True
    return False


def _joined_weights(linears: tuple[Linear, Linear, Linear], writer: Writer) -> list[ir.Value | None]:
    """Return the concatenated weight [I, 3 * O] and bias [3 * O] of q, k and v, computed when the model is saved.

    The bias is zeros if the layers have none: onnxruntime's CPU kernel requires one.
    """
    first = linears[0]
    name = str(first.weight.name)
    widths = [tensor_of(linear.weight).shape.numpy()[1] for linear in linears]
    if first.part is None:
        weight = _concatenated([linear.weight for linear in linears], widths, first.weight)
        weight.meta[PARTS] = [[p for node, _ in linear.weight.uses() for p in patterns_of(node)] for linear in linears]
        bias = _concatenated([linear.bias for linear in linears], widths, first.weight)
        return [writer.initializer(weight, f"{name}_qkv"), writer.initializer(bias, f"{name}_qkv_bias")]
    zeros = _concatenated([None], widths[:1], first.weight)
    return [first.weight, first.bias or writer.initializer(zeros, f"{name}_bias")]


def _concatenated(values: Sequence[ir.Value | None], widths: Sequence[int], like: ir.Value) -> ir.TensorProtocol:
    """Return the tensors of `values` concatenated along their last axis, with zeros for a missing one."""
    tensors = [None if value is None else tensor_of(value) for value in values]
    dtype = tensor_of(like).dtype
    outer = next((tensor.shape.numpy()[:-1] for tensor in tensors if tensor is not None), ())

    def join() -> ir.TensorProtocol:
        arrays = [
            np.zeros(width, dtype.numpy()) if tensor is None else read_once(tensor)
            for tensor, width in zip(tensors, widths, strict=True)
        ]
        return ir.tensor(np.concatenate(arrays, axis=-1))

    return ir.LazyTensor(join, dtype=dtype, shape=ir.Shape([*outer, sum(widths)]))


def _flat(heads: Heads, writer: Writer) -> ir.Value:
    """Return the heads as [B, S, H * D]."""
    value = heads.source
    if heads.layout is HeadLayout.FLAT:
        return value
    if heads.layout is HeadLayout.TIME_FIRST:
        return writer.node("Transpose", [value], {"perm": [1, 0, 2]})
    if heads.layout in (HeadLayout.HEADS_OUTSIDE, HeadLayout.COLUMNS):
        perm = [0, 2, 1, 3] if heads.layout is HeadLayout.HEADS_OUTSIDE else [0, 3, 1, 2]
        value = writer.node("Transpose", [value], {"perm": perm})
    return writer.node("Reshape", [value, _shape([0, 0, heads.num_heads * heads.head_size], writer)])


def _queries(parts: _AttentionParts, writer: Writer) -> ir.Value:
    """Return the queries as [B, S, H * D]; if R heads share one key head, as R sequences: [B, R * S, H / R * D]."""
    if parts.repeats == 1:
        return _flat(parts.queries, writer)
    num_heads, repeats, size = parts.keys.num_heads, parts.repeats, parts.queries.head_size
    if parts.queries.layout is HeadLayout.HEADS_OUTSIDE:
        source, shape, perm = parts.queries.source, [0, num_heads, repeats, -1, size], [0, 2, 3, 1, 4]
    else:
        source, shape, perm = _flat(parts.queries, writer), [0, 0, num_heads, repeats, size], [0, 3, 1, 2, 4]
    split = writer.node("Reshape", [source, _shape(shape, writer)])
    sequences = writer.node("Transpose", [split], {"perm": perm})
    return writer.node("Reshape", [sequences, _shape([0, -1, num_heads * size], writer)])


def _in_one_sequence(fused: ir.Value, parts: _AttentionParts, writer: Writer) -> ir.Value:
    """Return the result for queries that may be in R sequences, [B, R * S, H / R * D], as [B, S, H * D]."""
    if parts.repeats == 1:
        return fused
    num_heads, repeats, size = parts.keys.num_heads, parts.repeats, parts.values.head_size
    split = writer.node("Reshape", [fused, _shape([0, repeats, -1, num_heads, size], writer)])
    heads = writer.node("Transpose", [split], {"perm": [0, 2, 3, 1, 4]})
    return writer.node("Reshape", [heads, _shape([0, 0, num_heads * repeats * size], writer)])


def _shape(sizes: Sequence[int], writer: Writer) -> ir.Value:
    name = "_".join("any" if size < 0 else str(size) for size in sizes)
    return writer.constant(np.array(sizes, np.int64), f"onnxtool.shape_{name}")


def _written_keys_and_values(parts: _AttentionParts, writer: Writer) -> list[ir.Value]:
    """Return keys and values, both [B, L, H * D], or both [B, H, L, D] if they already have that layout.

    The operator accepts different sizes of values and keys, as in MiniCPM3, only in the first layout.
    """
    both = (parts.keys, parts.values)
    if (
        all(heads.layout is HeadLayout.HEADS_OUTSIDE for heads in both)
        and parts.keys.head_size == parts.values.head_size
    ):
        return [heads.source for heads in both]
    return [_flat(heads, writer) for heads in both]


def _mask(parts: _AttentionParts, shared: _SharedValues, writer: Writer) -> ir.Value | None:
    """Return the padding mask as int32 [B, L]."""
    value = parts.mask_kind.padding
    if value is None or value.dtype == ir.DataType.INT32:
        return value
    if value not in shared.values:
        mask = writer.node("Cast", [value], {"to": ir.DataType.INT32.value})
        mask.type, mask.shape = ir.TensorType(ir.DataType.INT32), value.shape
        shared.values[value] = mask
    return shared.values[value]


def _bias(parts: _AttentionParts, shared: _SharedValues, writer: Writer) -> ir.Value | None:
    """Return masks of unknown kind as float [1 or B, 1 or H, S, L], to be added.

    If R query heads share one key head, it is [1 or B, 1 or H / R, R * S, L].
    """
    if not parts.mask_kind.is_bias:
        return None
    masking, repeats = parts.found.masking, parts.repeats
    bias = _shared_bias(parts, shared, writer)
    if repeats == 1:
        return bias
    if (masking, repeats) not in shared.values:
        if _heads_of_bias(parts.found, shared.shapes) == 1:
            times = writer.constant(np.array([1, 1, repeats, 1], np.int64), f"onnxtool.{repeats}_times")
            shared.values[masking, repeats] = writer.node("Tile", [bias, times])
        else:
            shape = _shape([0, parts.keys.num_heads, -1, 0], writer)
            shared.values[masking, repeats] = writer.node("Reshape", [bias, shape])
    return shared.values[masking, repeats]


def _shared_bias(parts: _AttentionParts, shared: _SharedValues, writer: Writer) -> ir.Value:
    """Return all masks together as float [1 or B, 1 or H, S, L], to be added."""
    masking = parts.found.masking
    if masking not in shared.values:
        shared.values[masking] = _write_bias(parts, shared.shapes, writer)
    return shared.values[masking]


def _write_bias(parts: _AttentionParts, shapes: Shapes, writer: Writer) -> ir.Value:
    """Add the terms and masked fills of the scores, broadcast to the number of queries and keys."""
    dtype, masking = shapes.dtype(parts.queries.source) or np.dtype(np.float32), parts.found.masking
    total = _sum_of_masks(parts, dtype, shapes, writer)
    # Two lowest numbers add up to an infinity, and a row of these gives NaN: here as in the model, unless the model
    # prevents it. Rows that are set to zero afterwards are identified by the masks, not by NaN.
    if masking.is_floored or parts.found.zeroed_rows is not None or parts.found.sinks is not None:
        total = writer.node("Max", [total, _lowest(dtype, writer)])
    if any(_is_full(value, parts, shapes) for value in masking.values):
        return total
    # The operator broadcasts batch and heads, but not queries and keys.
    sizes = [_length(heads, writer) for heads in (parts.queries, parts.keys)]
    ones = writer.constant(np.array([1, 1], np.int64), "ones")
    return writer.node("Expand", [total, writer.node("Concat", [ones, *sizes], {"axis": 0})])


def _sum_of_masks(parts: _AttentionParts, dtype: np.dtype[Any], shapes: Shapes, writer: Writer) -> ir.Value:
    """Add the terms and masked fills of the scores, keeping infinities."""
    masking = parts.found.masking
    infinity = writer.constant(np.array(-np.inf, dtype), "infinity")
    total: ir.Value = writer.constant(np.array(0.0, dtype), "zero")
    for number, term in enumerate(masking.terms):
        value = _by_heads(term, parts.queries.num_heads, shapes, writer)
        if term.scale != 1.0:
            value = writer.node("Mul", [value, writer.constant(np.array(term.scale, dtype), "bias_scale")])
        total = writer.node("Add", [total, value]) if number else value
    for masked_fill in masking.masked_fills:
        filled = infinity if masked_fill.is_infinite else _lowest(dtype, writer)
        branches = [total, filled] if masked_fill.keeps else [filled, total]
        total = writer.node("Where", [masked_fill.condition, *branches])
    return total


def _lowest(dtype: np.dtype[Any], writer: Writer) -> ir.Value:
    return writer.constant(np.array(np.finfo(dtype).min, dtype), "lowest")


def _by_heads(term: Term, num_heads: int, shapes: Shapes, writer: Writer) -> ir.Value:
    """Return a term with batch and heads as two axes, [B or 1, H or 1, S or 1, L]."""
    shape = shapes.prime_shape(term.value)
    if not term.is_merged or shape is None or len(shape) < 3 or shape[0] == 1:
        return term.value
    outer = writer.constant(np.array([-1, num_heads], np.int64), f"by_{num_heads}_heads")
    inner = writer.sizes(term.value, range(1, len(shape)))
    return writer.node("Reshape", [term.value, writer.node("Concat", [outer, inner], {"axis": 0})])


def _is_full(value: ir.Value, parts: _AttentionParts, shapes: Shapes) -> bool:
    """Whether a value of rank 4 has the full number of queries and keys."""
    shape = shapes.shape(value)
    lengths = tuple(_size_of_length(heads, shapes) for heads in (parts.queries, parts.keys))
    return shape is not None and len(shape) == 4 and shape[2:] == lengths


def _length(heads: Heads, writer: Writer) -> ir.Value:
    """Return the number of queries or keys, int64 [1]."""
    axis = _axis_of_length(heads)
    return writer.sizes(heads.source, range(axis, axis + 1))


def _size_of_length(heads: Heads, shapes: Shapes) -> int | str | None:
    """Return the number of queries or keys as a size of `shapes`; None if unknown."""
    shape = shapes.shape(heads.source)
    return None if shape is None else shape[_axis_of_length(heads)]


def _axis_of_length(heads: Heads) -> int:
    return {HeadLayout.HEADS_OUTSIDE: 2, HeadLayout.COLUMNS: 3, HeadLayout.TIME_FIRST: 0}.get(heads.layout, 1)


def _with_zeroed_rows(
    fused: ir.Value, zeroed_rows: ZeroedRows, parts: _AttentionParts, shared: _SharedValues, writer: Writer
) -> ir.Value:
    """Set the same rows of `fused`, [B, S, H * D], to zero as the model does."""
    dtype = shared.shapes.dtype(parts.queries.source) or np.dtype(np.float32)
    zero = writer.constant(np.array(0.0, dtype), "zero")
    if not parts.mask_kind.is_bias:
        return writer.node("Where", [_unattended_by_kind(parts, shared, writer), zero, fused])
    if (zeroed_rows, parts.found.masking) not in shared.values:
        rows = _unattended(zeroed_rows, dtype, parts, shared.shapes, writer)
        rows = writer.node("Transpose", [rows], {"perm": [0, 2, 1, 3]})
        shared.values[zeroed_rows, parts.found.masking] = rows
    num_heads, head_size = parts.queries.num_heads, parts.values.head_size
    by_heads = writer.node("Reshape", [fused, _shape([0, 0, num_heads, head_size], writer)])
    heads = writer.node("Where", [shared.values[zeroed_rows, parts.found.masking], zero, by_heads])
    return writer.node("Reshape", [heads, _shape([0, 0, num_heads * head_size], writer)])


def _unattended_by_kind(parts: _AttentionParts, shared: _SharedValues, writer: Writer) -> ir.Value:
    """Return a mask of queries that see only padding, bool [B, 1 or S, 1]."""
    is_causal = parts.mask_kind.is_causal or parts.found.is_causal
    key = ("unattended", parts.mask_kind.padding, is_causal)
    if key not in shared.values:
        mask, last = _mask(parts, shared, writer), writer.constant(np.array([-1]), "onnxtool.last")
        if is_causal:
            seen = writer.node("CumSum", [mask, writer.constant(np.array(1), "onnxtool.second_axis")])
        else:
            seen = writer.node("ReduceSum", [mask, last], {"keepdims": 1})
        none = writer.node("Equal", [seen, writer.constant(np.array(0, np.int32), "onnxtool.zero_int32")])
        shared.values[key] = writer.node("Unsqueeze", [none, last])
    return shared.values[key]


def _unattended(
    zeroed_rows: ZeroedRows, dtype: np.dtype[Any], parts: _AttentionParts, shapes: Shapes, writer: Writer
) -> ir.Value:
    """Return a mask of queries with a row of zeros, bool [1 or B, 1 or H, 1 or S, 1]."""
    if zeroed_rows.unattended is not None:
        return zeroed_rows.unattended
    attended = []  # bool [1 or B, 1 or H, 1 or S, L]: a query without any of these keys has a row of zeros
    if zeroed_rows.conditions:
        kept = [
            condition.condition if condition.keeps else writer.node("Not", [condition.condition])
            for condition in zeroed_rows.conditions
        ]
        attended.append(functools.reduce(lambda first, second: writer.node("And", [first, second]), kept))
    if zeroed_rows.if_nan or zeroed_rows.if_lowest:
        total = _sum_of_masks(parts, dtype, shapes, writer)
        beyond = "Greater" if zeroed_rows.if_lowest else "GreaterOrEqual"
        attended.append(writer.node(beyond, [total, _lowest(dtype, writer)]))
    last, one = writer.constant(np.array([-1]), "onnxtool.last"), writer.constant(np.array(1.0, dtype), "one")
    floats = [writer.node("Cast", [value], {"to": ir.DataType.from_numpy(dtype).value}) for value in attended]
    if parts.found.is_causal:
        sizes = [_length(heads, writer) for heads in (parts.queries, parts.keys)]
        square = writer.node("Concat", sizes, {"axis": 0})
        floats = [writer.node("Trilu", [writer.node("Expand", [value, square])], {"upper": 0}) for value in floats]
    counts = [writer.node("ReduceSum", [value, last], {"keepdims": 1}) for value in floats]
    none = [writer.node("Less", [count, one]) for count in counts]
    # With it, masks with fewer axes have four too.
    four_axes = writer.constant(np.zeros((1, 1, 1, 1), np.bool_), "onnxtool.four_axes")
    return functools.reduce(lambda first, second: writer.node("Or", [first, second]), none, four_axes)


def _split_again(result: ir.Value, fused: ir.Value, parts: _AttentionParts, shapes: Shapes, writer: Writer) -> None:
    """Restore the layout of the result, [B, H, S, D] or [B * H, S, D]."""
    shape, perm = [0, 0, parts.queries.num_heads, parts.values.head_size], [0, 2, 1, 3]
    if shapes.rank(result) == 3:
        perm = [1, 0, 2]
        fused, shape = writer.node("Transpose", [fused], {"perm": perm}), [0, -1, parts.values.head_size]
    heads = writer.node("Reshape", [fused, _shape(shape, writer)])
    replace(result, writer.node("Transpose", [heads], {"perm": perm}))


attention = Pass("attention", _apply)
