"""Fuse the embedding layer of models like BERT: lookups, sum and normalization become one operator."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtool.graph.edit import attribute, is_weight, producer, replace_and_erase, scalar
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, fill_types, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, rewrite_each

# Operators between a size as a scalar and the same size as a vector of one element.
_WRAPPERS = ("Cast", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class _Lookup:
    """A Gather of rows of a table.

    Attributes:
        table: float [V, D].
        ids: int [B, S] or [1, S].
        sized_by: nodes that read batch size or length from the shape of the result, which the ids have as well.
    """

    table: ir.Value
    ids: ir.Value
    sized_by: list[ir.Node]


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `LayerNormalization(Add(Add(Gather(W, ids), Gather(T, segments)), Gather(P, positions)), gamma, beta)`.

    The fused operator is `EmbedLayerNormalization`, whose ids are int32. Other nodes may read the tables; they stay one
    tensor. Ids below zero, which Gather counts from the end of a table, are an error of the fused operator.
    """
    found = [
        (node, lookups)
        for node in model.graph
        if not node.domain and node.op_type == "LayerNormalization" and (lookups := _match_lookups(node)) is not None
    ]
    if not found:
        return Outcome(model, 0)
    fill_types(model)
    shapes = find_shapes(model)
    casts: dict[ir.Value, ir.Value] = {}
    return rewrite_each(model, found, lambda match: _fuse(*match, shapes, casts))


def _match_lookups(node: ir.Node) -> list[_Lookup] | None:
    """Return the two or three lookups whose sum `node` normalizes, where nothing else reads a partial sum."""
    lookups: list[_Lookup] = []
    waiting = [(node.inputs[0], node)]
    while waiting:
        value, reader = waiting.pop()
        maker = producer(value, "Add", "Gather")
        if value is None or maker is None or value.is_graph_output():
            return None
        others = [other for other, _ in value.uses() if other is not reader]
        if maker.op_type == "Add" and not others:
            waiting.extend((one, maker) for one in maker.inputs)
            continue
        table, ids = maker.inputs
        if maker.op_type == "Add" or not all(_reads_size_of_ids(other) for other in others):
            return None
        if table is None or ids is None or not is_weight(table, 2) or attribute(maker, "axis", 0) != 0:
            return None
        lookups.append(_Lookup(table, ids, others))
    return lookups if len(lookups) in (2, 3) else None


def _reads_size_of_ids(node: ir.Node) -> bool:
    """Whether `node` reads only those axes of the shape of a lookup that its ids have."""
    return (
        node.op_type == "Shape"
        and not node.domain
        and not {"start", "end"} & set(node.attributes)
        and not node.outputs[0].is_graph_output()
        and all(
            reader.op_type == "Gather" and not reader.domain and place == 0 and scalar(reader.inputs[1]) in (0, 1)
            for reader, place in node.outputs[0].uses()
        )
    )


def _fuse(node: ir.Node, lookups: list[_Lookup], shapes: Shapes, casts: dict[ir.Value, ir.Value]) -> str:
    """Write one EmbedLayerNormalization; return why not where a precondition does not hold."""
    reason = _objection(node, lookups, shapes)
    embedding = None if reason else _assign(lookups, shapes)
    if embedding is None:
        return reason or "words and positions cannot be told apart by the shapes of their ids"
    for lookup in lookups:
        for reader in lookup.sized_by:
            reader.replace_input_with(0, lookup.ids)
            reader.outputs[0].shape = None
    replace_and_erase(node.outputs[0], _write(node, embedding, casts))
    return ""


def _objection(node: ir.Node, lookups: list[_Lookup], shapes: Shapes) -> str:
    """Return which precondition does not hold; empty where all do."""
    vectors = [one for one in node.inputs[1:] if one is not None]
    width = shapes.fixed(lookups[0].table, 1)
    if attribute(node, "axis", -1) not in (-1, 2):
        return "not over the last axis"
    if len(vectors) != 2 or not all(is_weight(one, 1) and shapes.fixed(one, 0) == width for one in vectors):
        return "scale or shift is no vector as long as the last axis"
    if any(shapes.fixed(lookup.table, 1) != width for lookup in lookups):
        return "the tables are of different widths"
    if {value.dtype for value in (*vectors, *(lookup.table for lookup in lookups))} not in (
        {ir.DataType.FLOAT},
        {ir.DataType.FLOAT16},
    ):
        return "neither float32 nor float16"
    if any(shapes.rank(lookup.ids) != 2 for lookup in lookups):
        return "ids that are not [B, S]"
    if any(lookup.ids.dtype not in (ir.DataType.INT32, ir.DataType.INT64) for lookup in lookups):
        return "ids that are no integers"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "its mean or deviation is read"
    return ""


def _assign(lookups: list[_Lookup], shapes: Shapes) -> tuple[_Lookup, _Lookup, _Lookup | None] | None:
    """Return the lookups of words, positions and segments, which some models lack; None where they are not told apart.

    Any assignment gives the same sum, but only positions may be [1, S]; words and segments are [B, S].
    """
    by_size = sorted(lookups, key=lambda lookup: -(shapes.fixed(lookup.table, 0) or 0))
    batched = [one for one in by_size if shapes.of(one.ids) is not None and shapes.fixed(one.ids, 0) != 1]
    positions = [lookup for lookup in by_size if lookup not in batched]
    if not positions:  # RoBERTa computes them from the words
        positions = [lookup for lookup in by_size if not lookup.ids.is_graph_input()]
    if len(positions) != 1:
        return None
    words, *others = [lookup for lookup in by_size if lookup is not positions[0]]
    if not all(shapes.same(lookup.ids, words.ids) for lookup in (words, *others)):
        return None
    ids = positions[0].ids
    if not shapes.same(ids, words.ids) and not _is_row_of(ids, words.ids, shapes):
        return None
    return words, positions[0], others[0] if others else None


def _is_row_of(ids: ir.Value, words: ir.Value, shapes: Shapes) -> bool:
    """Whether `ids` is int [1, S] where `words` is int [B, S]."""
    row, whole = shapes.shape(ids), shapes.shape(words)
    return row is not None and whole is not None and row == (1, whole[1])


def _write(
    node: ir.Node, embedding: tuple[_Lookup, _Lookup, _Lookup | None], casts: dict[ir.Value, ir.Value]
) -> ir.Value:
    words, positions, segments = embedding
    segment_ids = None if segments is None else _as_int32(segments.ids, node, casts)
    inputs = [
        *(_as_int32(words.ids, node, casts), segment_ids),
        *(words.table, positions.table, None if segments is None else segments.table),
        *(node.inputs[1], node.inputs[2], None, _as_int32(positions.ids, node, casts)),
    ]
    # The second output is the number of tokens of a row by the mask, which is no input here.
    attributes = {"epsilon": float(attribute(node, "epsilon", 1e-5))}
    fused = ir.node("EmbedLayerNormalization", inputs, attributes, domain=MICROSOFT, num_outputs=2)
    normalized, num_tokens = Writer(node).add(fused)
    normalized.type, normalized.shape = node.outputs[0].type, node.outputs[0].shape
    num_tokens.dtype = ir.DataType.INT32
    return normalized


def _as_int32(ids: ir.Value, node: ir.Node, casts: dict[ir.Value, ir.Value]) -> ir.Value:
    """Return `ids` as int32; one Cast in front of `node` serves all readers."""
    if ids.dtype == ir.DataType.INT32:
        return ids
    if ids not in casts:
        casts[ids] = Writer(node).node("Cast", [ids], {"to": ir.DataType.INT32.value})
        casts[ids].dtype, casts[ids].shape = ir.DataType.INT32, ids.shape
    return casts[ids]


embed_layer_normalization = Pass("embed_layer_normalization", _apply)
