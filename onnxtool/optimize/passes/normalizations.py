"""Fuse normalizations from elementary operators, and with preceding residuals and embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtool.graph.edit import (
    attribute,
    is_closed,
    is_float,
    is_weight,
    only_consumer,
    operands,
    producer,
    replace_and_erase,
    scalar,
)
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.patterns import Normalized, match_normalized, mean_of, scaled
from onnxtool.graph.shapes import Shapes, fill_types
from onnxtool.graph.writer import Writer, without_omitted
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals, rewrite_each

_FIRST_OPSET = 17
_GONE = "another normalization took a part of it"


def _fuse_layer_normalizations(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Add(Mul(Div(d, Sqrt(Add(ReduceMean(Pow(d, 2)), epsilon))), gamma), beta)`, `d = Sub(x, ReduceMean(x))`.

    The fused operator is `LayerNormalization(x, gamma, beta)`; beta may be missing, and Reciprocal may stand for Div.
    """
    matches = [(node,) for node in model.graph if _match_centred(node) is not None]
    if default_opset(model.opset_imports) < _FIRST_OPSET:
        return Outcome(model, 0, refusals([f"LayerNormalization needs opset {_FIRST_OPSET}"] * len(matches)))
    return rewrite_each(model, matches, _fuse_centred)


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


def _fuse_centred(node: ir.Node, shapes: Shapes) -> str:
    """Write one LayerNormalization, or return the precondition that does not hold."""
    centred = _match_centred(node)  # anew: what is normalized may be the result of the one before
    if centred is None:
        return _GONE
    match, value = centred
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
    """Return the input of `node` other than `other`, if it is a weight as long as the last axis of `value`."""
    vector = node.inputs[1] if node.inputs[0] is other else node.inputs[0]
    if vector is None or not is_weight(vector, 1) or shapes.fixed(vector, 0) != shapes.fixed(value, -1):
        return None
    return None if shapes.fixed(vector, 0) is None else vector


layer_normalization = Pass("layer_normalization", _fuse_layer_normalizations)


def _fuse_rms_normalizations(model: ir.Model, _context: Context) -> Outcome:
    """Replace `x / Sqrt(ReduceMean(x ** 2) + epsilon) * w` by `SimplifiedLayerNormalization(x, w)`.

    The operator is onnxruntime's, in the default domain. Also matches the reciprocal of the root, and a Cast of x to
    float32 and back. Gemma's scale of 1 + w is an ordinary vector here.
    """
    matches = [(node,) for node in model.graph if _match_uncentred(node) is not None]
    if matches:
        fill_types(model)
    return rewrite_each(model, matches, _fuse_uncentred)


def _match_uncentred(node: ir.Node) -> Normalized | None:
    match = match_normalized(node)
    if match is None:
        return None
    subtract = producer(match.value, "Sub")
    # A layer normalization subtracts the mean first.
    return match if subtract is None or mean_of(producer(subtract.inputs[1])) is None else None


def _fuse_uncentred(node: ir.Node, shapes: Shapes) -> str:
    """Write one SimplifiedLayerNormalization, or return the precondition that does not hold."""
    match = _match_uncentred(node)  # anew: what is normalized may be the result of the one before
    if match is None:
        return _GONE
    source, normalized, nodes = _widen_over_casts(node, match)
    scaling = scaled(normalized)
    if scaling is None:
        return "no scale follows, or something else reads the normalized value"
    scale, result = scaling
    multiply = producer(result)
    length = shapes.fixed(scale, -1)
    if shapes.rank(scale) != 1 or length is None or length != shapes.fixed(source, -1):
        return "the scale is no vector as long as the last axis"
    if not is_float(source):
        return "neither float32 nor float16"
    if multiply is None or not is_closed([*nodes, multiply], result):
        return "an inner value is read elsewhere"
    attributes = {"axis": -1, "epsilon": match.epsilon, "stash_type": 1}
    fused = Writer(multiply).node("SimplifiedLayerNormalization", [source, scale], attributes, like=result)
    replace_and_erase(result, fused)
    return ""


def _widen_over_casts(node: ir.Node, match: Normalized) -> tuple[ir.Value, ir.Value, tuple[ir.Node, ...]]:
    """Return input, result and nodes, including a Cast of x to float32 and the Cast back if both exist."""
    narrow = match.value, node.outputs[0], match.nodes
    before, after = producer(match.value, "Cast"), only_consumer(node.outputs[0], "Cast")
    source = None if before is None else before.inputs[0]
    if before is None or after is None or source is None or attribute(before, "to") != ir.DataType.FLOAT:
        return narrow
    # The operator computes in float32 and rounds before the scale, as the two casts do.
    if source.dtype is None or attribute(after, "to") != source.dtype:
        return narrow
    return source, after.outputs[0], (*match.nodes, before, after)


rms_normalization = Pass("rms_normalization", _fuse_rms_normalizations)


_WITH_SKIP = {
    "LayerNormalization": "SkipLayerNormalization",
    "SimplifiedLayerNormalization": "SkipSimplifiedLayerNormalization",
}
_Terms = tuple[ir.Value, ir.Value, ir.Value | None]
_EPSILON = 1e-5  # LayerNormalization's default; the fused operators have another one


def _fuse_residuals(model: ir.Model, _context: Context) -> Outcome:
    """Replace `LayerNormalization(Add(a, b), gamma, beta)` by `SkipLayerNormalization(a, b, gamma, beta)`.

    A MatMul bias, `Add(MatMul(x, W), c)` as a or b, becomes the input `bias`; if other nodes read the sum, it becomes
    the fourth output. `SimplifiedLayerNormalization` becomes `SkipSimplifiedLayerNormalization`, without beta.
    """
    matches = [
        (node, add)
        for node in model.graph
        if not node.domain
        and node.op_type in _WITH_SKIP
        and (add := producer(node.inputs[0], "Add")) is not None
        and operands(add, is_weight) is None
    ]
    return rewrite_each(model, matches, _fuse_residual)


def _fuse_residual(node: ir.Node, add: ir.Node, shapes: Shapes) -> str:
    """Write one operator for both, or return the precondition that does not hold."""
    reason = _objection_to_residual(node, add, shapes)
    terms = None if reason else _split(add, shapes)
    if terms is None:
        return reason or "the bias does not fit"
    read_elsewhere = only_consumer(add.outputs[0], node.op_type) is None
    outputs = _write_skip(node, add, terms, with_sum=read_elsewhere)
    replace_and_erase(node.outputs[0], outputs[0])
    if read_elsewhere:
        replace_and_erase(add.outputs[0], outputs[3])
    return ""


def _objection_to_residual(node: ir.Node, add: ir.Node, shapes: Shapes) -> str:
    """Return the precondition that does not hold; empty if all do."""
    if producer(node.inputs[0], "Add") is not add:
        return "another normalization has fused the sum"
    first, second = add.inputs
    scales = [operand for operand in node.inputs[1:] if operand is not None]
    if shapes.rank(first) != 3 or not shapes.same(first, second):
        return "the two are not known to be of the same shape [B, S, D]"
    if attribute(node, "axis", -1) not in (-1, 2):
        return "not over the last axis"
    width = shapes.fixed(first, -1)
    if width is None or not all(is_weight(scale, 1) and shapes.fixed(scale, 0) == width for scale in scales):
        return "scale or shift is no vector as long as the last axis"
    if not is_float(scales[0]):
        return "neither float32 nor float16"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "its mean or deviation is read"
    return ""


def _split(add: ir.Node, shapes: Shapes) -> _Terms | None:
    """Return the two terms of a sum, and a linear layer's bias if only this sum reads the layer."""
    first, second = add.inputs
    if first is None or second is None:
        return None
    for term, other in ((first, second), (second, first)):
        inner = producer(term, "Add")
        parts = None if inner is None else operands(inner, lambda value: is_weight(value, 1))
        if parts is None or only_consumer(term, "Add") is not add or producer(parts[1], "MatMul") is None:
            continue
        if shapes.same(parts[1], term) and shapes.fixed(parts[0], 0) == shapes.fixed(term, -1):
            return parts[1], other, parts[0]
    return first, second, None


def _write_skip(node: ir.Node, add: ir.Node, terms: _Terms, *, with_sum: bool) -> list[ir.Value]:
    """Write the operator in front of the sum, which other nodes may read; return its outputs."""
    first, second, bias = terms
    inputs = [first, second, node.inputs[1]]
    if node.op_type == "LayerNormalization":
        inputs.append(node.inputs[2] if len(node.inputs) > 2 else None)
    if bias is not None:
        inputs.append(bias)
    # An output without a name is not computed: these are the mean and the deviation.
    outputs = [ir.Value(), *([ir.Value(name=""), ir.Value(name=""), ir.Value()] if with_sum else [])]
    fused = ir.node(
        _WITH_SKIP[node.op_type],
        without_omitted(inputs),
        {"epsilon": float(attribute(node, "epsilon", _EPSILON))},
        domain=MICROSOFT,
        outputs=outputs,
    )
    Writer(add).add(fused)
    for new, old in zip(outputs[::3], (node.outputs[0], add.outputs[0]), strict=False):
        new.type, new.shape = old.type, old.shape
    return outputs


skip_layer_normalization = Pass("skip_layer_normalization", _fuse_residuals)


@dataclass(frozen=True)
class _Lookup:
    """A Gather of rows of a table.

    Attributes:
        table: float [V, D].
        ids: int [B, S] or [1, S].
        sized_by: nodes that read batch size or length from the shape of the result, which the ids share.
    """

    table: ir.Value
    ids: ir.Value
    sized_by: list[ir.Node]


def _fuse_embeddings(model: ir.Model, _context: Context) -> Outcome:
    """Replace `LayerNormalization(Add(Add(Gather(W, ids), Gather(T, segments)), Gather(P, positions)), gamma, beta)`.

    The fused operator is `EmbedLayerNormalization`, whose ids are int32. Other nodes may read the tables, which stay
    one tensor. Negative ids, which Gather counts from the end of a table, are an error in the fused operator.
    """
    matches = [
        (node, lookups)
        for node in model.graph
        if not node.domain and node.op_type == "LayerNormalization" and (lookups := _match_lookups(node)) is not None
    ]
    if matches:
        fill_types(model)
    casts: dict[ir.Value, ir.Value] = {}
    return rewrite_each(model, matches, _fuse_lookups, casts)


def _match_lookups(node: ir.Node) -> list[_Lookup] | None:
    """Return the two or three lookups whose sum `node` normalizes, if nothing else reads a partial sum."""
    lookups: list[_Lookup] = []
    waiting = [(node.inputs[0], node)]
    while waiting:
        value, reader = waiting.pop()
        maker = producer(value, "Add", "Gather")
        if value is None or maker is None or value.is_graph_output():
            return None
        other_readers = [other for other, _ in value.uses() if other is not reader]
        if maker.op_type == "Add" and not other_readers:
            waiting.extend((operand, maker) for operand in maker.inputs)
            continue
        table, ids = maker.inputs
        if maker.op_type == "Add" or not all(_reads_size_of_ids(other) for other in other_readers):
            return None
        if table is None or ids is None or not is_weight(table, 2) or attribute(maker, "axis", 0) != 0:
            return None
        lookups.append(_Lookup(table, ids, other_readers))
    return lookups if len(lookups) in (2, 3) else None


def _reads_size_of_ids(node: ir.Node) -> bool:
    """Whether `node` reads only the axes of a lookup's shape that its ids share."""
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


def _fuse_lookups(node: ir.Node, lookups: list[_Lookup], shapes: Shapes, casts: dict[ir.Value, ir.Value]) -> str:
    """Write one EmbedLayerNormalization, or return the precondition that does not hold."""
    reason = _objection_to_lookups(node, lookups, shapes)
    embedding = None if reason else _assign(lookups, shapes)
    if embedding is None:
        return reason or "words and positions cannot be told apart by the shapes of their ids"
    for lookup in lookups:
        for reader in lookup.sized_by:
            reader.replace_input_with(0, lookup.ids)
            reader.outputs[0].shape = None
    replace_and_erase(node.outputs[0], _write_embedding(node, embedding, casts))
    return ""


def _objection_to_lookups(node: ir.Node, lookups: list[_Lookup], shapes: Shapes) -> str:
    """Return the precondition that does not hold; empty if all do."""
    vectors = [operand for operand in node.inputs[1:] if operand is not None]
    width = shapes.fixed(lookups[0].table, 1)
    if attribute(node, "axis", -1) not in (-1, 2):
        return "not over the last axis"
    if len(vectors) != 2 or not all(is_weight(vector, 1) and shapes.fixed(vector, 0) == width for vector in vectors):
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
        return "ids that are not integers"
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return "its mean or deviation is read"
    return ""


def _assign(lookups: list[_Lookup], shapes: Shapes) -> tuple[_Lookup, _Lookup, _Lookup | None] | None:
    """Return the lookups of words, positions and segments, if any; None if they cannot be told apart.

    Any assignment gives the same sum, but only positions may be [1, S]; words and segments are [B, S].
    """
    by_size = sorted(lookups, key=lambda lookup: -(shapes.fixed(lookup.table, 0) or 0))
    batched = [
        lookup for lookup in by_size if shapes.prime_shape(lookup.ids) is not None and shapes.fixed(lookup.ids, 0) != 1
    ]
    positions = [lookup for lookup in by_size if lookup not in batched]
    if not positions:  # RoBERTa computes them from the words
        positions = [lookup for lookup in by_size if not lookup.ids.is_graph_input()]
    if len(positions) != 1:
        return None
    words, *segments = [lookup for lookup in by_size if lookup is not positions[0]]
    if not all(shapes.same(lookup.ids, words.ids) for lookup in (words, *segments)):
        return None
    ids = positions[0].ids
    row, whole = shapes.shape(ids), shapes.shape(words.ids)
    is_one_row = row is not None and whole is not None and row == (1, whole[1])
    if not shapes.same(ids, words.ids) and not is_one_row:
        return None
    return words, positions[0], segments[0] if segments else None


def _write_embedding(
    node: ir.Node, embedding: tuple[_Lookup, _Lookup, _Lookup | None], casts: dict[ir.Value, ir.Value]
) -> ir.Value:
    words, positions, segments = embedding
    segment_ids = None if segments is None else _as_int32(segments.ids, node, casts)
    inputs = [
        *(_as_int32(words.ids, node, casts), segment_ids),
        *(words.table, positions.table, None if segments is None else segments.table),
        *(node.inputs[1], node.inputs[2], None, _as_int32(positions.ids, node, casts)),
    ]
    # The second output is the number of tokens per row according to the mask, which is not an input here.
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


embed_layer_normalization = Pass("embed_layer_normalization", _fuse_embeddings)


_NORMALIZATIONS = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")


def _write_sums(model: ir.Model, _context: Context) -> Outcome:
    """Replace `LayerNormalization(Add(a, b), …)` by `LayerNormalization(Sum(a, b), …)`, and `BiasGelu` likewise.

    `Add(Add(a, bias), b)` becomes `Sum(a, bias, b)`, and `BiasGelu(x, b)` becomes `Gelu(Sum(x, b))`. When loading a
    file, onnxruntime by default fuses an Add in front of these into SkipLayerNormalization and BiasGelu. On the CPU the
    first takes several times as long, the second a third longer. It does not fuse a Sum, which adds the same numbers in
    the same order.
    """
    num_changes = 0
    for node in list(model.graph):
        if (node.domain, node.op_type) == (MICROSOFT, "BiasGelu"):
            num_changes += _write_gelu(node)
        elif not node.domain and node.op_type in _NORMALIZATIONS:
            num_changes += _write_residual(node)
    return Outcome(model, num_changes)


def _write_gelu(node: ir.Node) -> bool:
    """Write bias and Gelu in sequence; return whether that was done."""
    bias, result = node.inputs[1], node.outputs[0]
    if bias is None or bias.dtype != ir.DataType.FLOAT:  # the CPU has no Sum of float16
        return False
    writer = Writer(node)
    total = writer.node("Sum", node.inputs, like=result)
    replace_and_erase(result, writer.node("Gelu", [total], domain=MICROSOFT, like=result))
    return True


def _write_residual(node: ir.Node) -> bool:
    """Write the residual in front of a normalization as a Sum; return whether there is one."""
    add = producer(node.inputs[0], "Add")
    if add is None or operands(add, is_weight):
        return False
    scale = node.inputs[1] if len(node.inputs) > 1 else None
    if scale is None or scale.dtype != ir.DataType.FLOAT:  # the CPU has no Sum of float16
        return False
    replace_and_erase(add.outputs[0], Writer(add).node("Sum", _terms(add), like=add.outputs[0]))
    return True


def _terms(add: ir.Node) -> list[ir.Value | None]:
    """Return the terms in order, including the bias of a linear layer that only this sum reads."""
    first, second = add.inputs
    for term, other in ((first, second), (second, first)):
        inner = producer(term, "Add")
        if inner is not None and term is not None and operands(inner, is_weight) and only_consumer(term, "Add") is add:
            return [*inner.inputs, other]
    return [first, second]


sums = Pass("sums", _write_sums)
