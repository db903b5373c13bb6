"""Quantize a model to int8, weights and activations, within a bound on its error.

Shape letters: K input width of a layer, N output width, V rows of a table, H row width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtool.errors import PassError
from onnxtool.graph.edit import (
    attribute,
    constant,
    drop_unused,
    is_weight,
    only_consumer,
    producer,
    replace_and_erase,
    required,
    scalar,
    tensor_of,
)
from onnxtool.graph.operators import MICROSOFT, named_inputs
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.kept import patterns_of
from onnxtool.optimize.options import MIXED, PER_ROW
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals
from onnxtool.optimize.quantization.activations import Feeds, Recording
from onnxtool.optimize.quantization.adjustments import AdjustmentChoice, GroupAdjustments, choose_adjustments
from onnxtool.optimize.quantization.arithmetic import (
    PLAIN,
    SMALLEST,
    ActivationGrid,
    Adjustment,
    Codes,
    Floats,
    RowGrid,
    each_in_parallel,
)
from onnxtool.optimize.quantization.bounded import (
    DEFAULT_SETTING,
    Level,
    QuantizationConfig,
    QuantizationSetting,
    Quantized,
    quantize_within,
)
from onnxtool.optimize.quantization.cpu_arithmetic import INT8_WEIGHTS, extreme
from onnxtool.optimize.quantization.linear_layers import (
    LinearLayer,
    find_linear_layers,
    scalable_normalization,
    shared_initializer,
    unfuse_linear_layers,
)
from onnxtool.optimize.quantization.written import made_from
from onnxtool.optimize.report import FallbackLayer

_FIRST_OPSET = 11  # of DynamicQuantizeLinear
_BLOCKED_OPSET = 21  # since which QuantizeLinear takes a scale per row
# Lower bounds of activations, whose minimum need not be computed in each run.
_LOWEST = {"Relu": 0.0, "Gelu": -0.1701, "FastGelu": -0.1701, "QuickGelu": -0.1701, "BiasGelu": -0.1701, "Sigmoid": 0.0}
# Inputs of a MultiHeadAttention with which its values still come from a single linear layer.
_PLAIN_INPUTS = frozenset({"query", "key", "value", "key_padding_mask", "attention_bias"})


def require_opset(model: ir.Model) -> None:
    """Refuse a model whose opset lacks the operators that quantize activations.

    Raises:
        PassError: its opset is too low, or it declares none.
    """
    opset = default_opset(model.opset_imports)
    if opset < _FIRST_OPSET:
        raise PassError(
            f"int8 needs opset {_FIRST_OPSET} or later, and the model "
            + (f"is of opset {opset}" if opset else "declares no opset of ONNX's own operators"),
            "export it again with a later opset, or pass --precision int4; without int8, the note of the pass "
            "convert_opset says why it could not be converted",
        )


def quantize_int8(
    fallbacks: frozenset[str] = frozenset(),
    adjustments: Mapping[str, Adjustment] | None = None,
    *,
    every: Adjustment = PLAIN,
    exact: bool = False,
) -> Pass:
    """Return the pass that quantizes all linear layers except `fallbacks` to int8.

    Args:
        fallbacks: names of weights that stay float32.
        adjustments: changes that reduce the rounding error, by weight name; layers that read the same activations with
            the same smoothing scale share one division.
        every: the changes of layers that `adjustments` does not name.
        exact: whether the result is only for CPUs on which no product saturates.
    """

    def apply(model: ir.Model, _context: Context) -> Outcome:
        return _apply(model, fallbacks, adjustments or {}, every, exact=exact)

    return Pass("quantize_int8", apply)


def _apply(
    model: ir.Model, fallbacks: frozenset[str], adjustments: Mapping[str, Adjustment], every: Adjustment, *, exact: bool
) -> Outcome:
    """Replace `Add(MatMul(x, W), b)` by `DynamicQuantizeMatMul(x, int8 W, scale, 0, b)`, with a scale per column of W.

    Where several layers read x, or the adjustment has a grid for x, nodes in front quantize x and they become
    `MatMulIntegerToFloat`. A packed `Attention` is unfused first; a weight that is also an embedding is copied.
    """
    if default_opset(model.opset_imports) < _FIRST_OPSET:
        return Outcome(model, 0, f"opset below {_FIRST_OPSET}")
    reasons = unfuse_linear_layers(model, fallbacks, find_shapes(model))
    layers, refused = find_linear_layers(model)
    wanted = [layer for layer in layers if layer.name not in fallbacks]
    names = [layer.stored_name for layer in wanted]
    if exact and len(set(names)) < len(names):
        raise PassError("layers share a weight, which no session can make exact on CPUs that need it", "pass --cpu any")
    folded, adjustments = _fold_smoothing_scales(wanted, adjustments)
    keys = [_key(layer, adjustments.get(layer.name, every)) for layer in wanted]
    prepared: dict[_Key, _Activations] = {}
    for layer, key in zip(wanted, keys, strict=True):
        adjustment, writer = adjustments.get(layer.name, every), Writer(layer.node)
        if key not in prepared:
            smoothing_scale = None if key[0] in folded else adjustment.smoothing_scale
            prepared[key] = _prepare(layer, smoothing_scale, adjustment, writer, is_shared=keys.count(key) > 1)
        replace_and_erase(layer.result, _write(layer, prepared[key], adjustment, writer, exact=exact))
    drop_unused(list(model.graph.initializers.values()))  # of normalizations that were smoothed as well
    return Outcome(model, len(wanted), refusals([*reasons, *refused]))


_MOST_STEPS = 64  # from an expert's layer back to the choice of its tokens
_Key = tuple["ir.Value", bytes, ActivationGrid | RowGrid | None]


def _key(layer: LinearLayer, adjustment: Adjustment) -> _Key:
    """Return a key that is equal for layers that can share quantized activations."""
    smoothing_scale = b"" if adjustment.smoothing_scale is None else adjustment.smoothing_scale.tobytes()
    return layer.value, smoothing_scale, adjustment.activations


def find_free_smoothing(layers: Sequence[LinearLayer]) -> frozenset[str]:
    """Return the names of activations whose division by a smoothing scale needs no extra node."""
    readers = _readers(layers)
    return frozenset(
        str(value.name) for value, group in readers.items() if _find_absorber(value, group, layers) is not None
    )


def _readers(layers: Sequence[LinearLayer]) -> dict[ir.Value, list[LinearLayer]]:
    readers: dict[ir.Value, list[LinearLayer]] = {}
    for layer in layers:
        readers.setdefault(layer.value, []).append(layer)
    return readers


def _find_absorber(
    value: ir.Value, group: Sequence[LinearLayer], layers: Sequence[LinearLayer]
) -> ir.Node | LinearLayer | None:
    """Return the normalization or layer that can absorb the division of `value`; None unless only `group` reads it.

    An attention's output is, in each channel, a weighted mean of its values, so the layer of the values can absorb it.
    """
    if len(value.uses()) != len(group) or value.is_graph_output():
        return None
    attention = producer(value, "MultiHeadAttention", domain=MICROSOFT)
    if attention is None:
        return scalable_normalization(value)
    inputs = named_inputs(MICROSOFT, "MultiHeadAttention", attention.inputs)
    names = {name for name, value in inputs.items() if value is not None}
    if len(attention.outputs) > 1 or not names <= _PLAIN_INPUTS or "value" not in names:
        return None
    sources = [layer for layer in layers if layer.result is inputs["value"]]
    if not sources or only_consumer(sources[0].result, domain=MICROSOFT) is not attention:
        return None
    # A weight that is used several times has one scale for all its uses.
    return sources[0] if [layer.name for layer in layers].count(sources[0].name) == 1 else None


def _fold_smoothing_scales(
    layers: Sequence[LinearLayer], adjustments: Mapping[str, Adjustment]
) -> tuple[set[ir.Value], Mapping[str, Adjustment]]:
    """Fold divisions into the preceding normalizations and layers, if all consumers have the same smoothing scale.

    Returns their outputs, and the adjustments with the result scales of the layers.
    """
    folded, changed = set(), dict(adjustments)
    for value, group in _readers(layers).items():
        scales = [adjustments.get(layer.name, PLAIN).smoothing_scale for layer in group]
        scale = scales[0]
        if scale is None or any(other is None or not np.array_equal(other, scale) for other in scales):
            continue
        absorber = _find_absorber(value, group, layers)
        if absorber is None:
            continue
        if isinstance(absorber, LinearLayer):
            changed[absorber.name] = replace(changed.get(absorber.name, PLAIN), result_smoothing_scale=scale)
        else:
            _smooth(absorber, scale)
        folded.add(value)
    return folded, changed


def _smooth(normalization: ir.Node, smoothing_scale: Floats) -> None:
    """Divide scale and shift of a normalization by the smoothing scale."""
    for place, vector in enumerate(normalization.inputs[1:], start=1):
        if vector is not None:
            scaled = (tensor_of(vector).numpy() / smoothing_scale).astype(smoothing_scale.dtype)
            normalization.replace_input_with(place, Writer(normalization).constant(scaled, f"{vector.name}_divided"))


@dataclass(frozen=True)
class _Activations:
    """The input of a quantized layer.

    Attributes:
        value: float32 activations, or uint8 with `zero`, uint8 [], and one of the scales.
        scale: scale of all activations, float32 [].
        row_scale: scale of each row, float32 [..., 1].
    """

    value: ir.Value
    scale: ir.Value | None = None
    zero: ir.Value | None = None
    row_scale: ir.Value | None = None


def write_adjusted(
    layer: LinearLayer, adjustment: Adjustment, writer: Writer, label: str, *, exact: bool = False
) -> ir.Value:
    """Write a layer in int8 that quantizes its activations itself, and return its result.

    The names of its weights end in `label`: the same layer may be written again with another adjustment.
    """
    activations = _prepare(layer, adjustment.smoothing_scale, adjustment, writer, is_shared=False)
    return _write(layer, activations, adjustment, writer, label, exact=exact)


def _prepare(
    layer: LinearLayer, smoothing_scale: Floats | None, adjustment: Adjustment, writer: Writer, *, is_shared: bool
) -> _Activations:
    """Write the input of a layer: its activations divided by a Mul, and quantized unless the operator does that.

    An operator for dynamic ranges quantizes its own input; an input shared by several is quantized once.
    """
    value, grid = layer.value, adjustment.activations
    if smoothing_scale is not None:
        factor = writer.constant(1 / smoothing_scale, f"{layer.name}_factor")
        value = writer.node("Mul", [value, factor], like=value)
    if isinstance(grid, RowGrid):
        return _quantize_rows(value, grid, layer, writer)
    if grid is not None:
        scale = writer.constant(np.array(grid.scale, np.float32), f"{layer.name}_input_scale")
        zero = writer.constant(np.array(grid.zero, np.uint8), f"{layer.name}_input_zero")
        return _Activations(writer.node("QuantizeLinear", [value, scale, zero]), scale, zero)
    if is_shared:
        return _Activations(*writer.ops("DynamicQuantizeLinear", value, outputs=3))
    return _Activations(value)


def _quantize_rows(value: ir.Value, grid: RowGrid, layer: LinearLayer, writer: Writer) -> _Activations:
    """Write nodes that quantize each row of `value` with its own scale; onnxruntime has no operator for that."""
    opset = 0 if layer.node.graph is None else default_opset(layer.node.graph.opset_imports)
    empty, value = _zeroed_rows(value)
    reach = _row_reach(value, grid, opset, writer)
    zero = writer.constant(np.array(grid.zero, np.uint8), f"onnxtool.zero_{grid.zero}")
    step = writer.constant(np.array(grid.step, np.float32), f"onnxtool.step_{grid.zero}")
    if opset < _BLOCKED_OPSET:  # rows of the same reach, so that all have the same step
        codes = writer.op("QuantizeLinear", writer.op("Div", value, reach), step, zero)
    else:  # This needs no second pass over the activations: each row is a block.
        reach, step = writer.op("Mul", reach, step), writer.constant(np.array(1, np.float32), "onnxtool.one")
        zeros = writer.op("Expand", zero, writer.op("Shape", reach))
        codes = writer.op("QuantizeLinear", value, reach, zeros, axis=-1, block_size=layer.size[0])
    if empty is not None:
        reach = writer.op("Where", empty, writer.constant(np.array(0, np.float32), "onnxtool.nothing"), reach)
    return _Activations(codes, step, zero, reach)


def _zeroed_rows(value: ir.Value) -> tuple[ir.Value | None, ir.Value]:
    """Return the rows of `value` that a Where sets to zero, bool [..., 1], and the value before it.

    The product of such a row is zero as well, so that one number for each row can be set to zero instead.
    """
    zeroing = producer(value, "Where")
    if zeroing is None or scalar(zeroing.inputs[1]) != 0.0:
        return None, value
    empty, kept = required(zeroing, 0), required(zeroing, 2)
    unsqueezed = producer(empty, "Unsqueeze")
    axes = None if unsqueezed is None or len(unsqueezed.inputs) < 2 else constant(unsqueezed.inputs[1])
    return (empty, kept) if axes is not None and axes.tolist() == [-1] else (None, value)


def _row_reach(value: ir.Value, grid: RowGrid, opset: int, writer: Writer) -> ir.Value:
    """Write the reach of each row of `value`, as `RowGrid.reach` computes it: float32 [..., 1]."""
    bounds = [extreme("ReduceMax", value, opset, writer)]
    made_by = value.producer()
    # Operators in other domains are excluded, such as a model-local function with the same name.
    lowest = _LOWEST.get(made_by.op_type) if made_by is not None and made_by.domain in ("", MICROSOFT) else None
    if lowest is None:
        mirrored = writer.constant(np.array(grid.mirror, np.float32), f"onnxtool.mirror_{grid.zero}")
        bounds.append(writer.op("Mul", extreme("ReduceMin", value, opset, writer), mirrored))
    # Never zero: activations are divided by it.
    least = max(SMALLEST, np.float32((lowest or 0.0) * grid.mirror))
    reach = writer.op("Max", *bounds, writer.constant(np.array(least, np.float32), f"onnxtool.least_{grid.zero}"))
    if not _may_have_no_rows(value):
        return reach
    # On zero rows, ReduceMax keeps all columns, at least up to onnxruntime 1.31.
    first, second = (writer.constant(np.array([place], np.int64), f"onnxtool.place_{place}") for place in (0, 1))
    return writer.op("Slice", reach, first, second, writer.constant(np.array([-1], np.int64), "onnxtool.last_axis"))


def _may_have_no_rows(value: ir.Value) -> bool:
    """Whether rows were chosen from computed values, like an expert's tokens: there may be none."""
    current: ir.Value | None = value
    for _ in range(_MOST_STEPS):
        node = None if current is None else current.producer()
        if node is None or node.op_type.startswith("Scatter"):
            return False
        sizes = node.inputs[1] if node.op_type == "Split" and len(node.inputs) > 1 else None
        is_computed = sizes is not None and ir.convenience.get_const_tensor(sizes) is None
        if is_computed or node.op_type in ("Compress", "NonZero"):
            return True
        current = node.inputs[1 if node.op_type in ("Gather", "GatherND") else 0] if node.inputs else None
    return False


def _write(
    layer: LinearLayer,
    activations: _Activations,
    adjustment: Adjustment,
    writer: Writer,
    label: str = "",
    *,
    exact: bool,
) -> ir.Value:
    """Write a layer in int8 on activations from `_prepare`, and return its result."""
    tensor, scales = _lazy_weights(layer, adjustment, exact=exact)
    weight = shared_initializer(tensor, f"{layer.stored_name}_int8{label}", writer)
    scale = shared_initializer(scales, f"{layer.stored_name}_scale{label}", writer)
    # Without it, onnxruntime's option for CPUs on which products saturate ignores the weight or ends the process; if
    # layers share it, onnxruntime does not load the model.
    zero = writer.constant(np.array(0, np.int8), f"{layer.stored_name}_zero{label}")
    bias = _bias(layer, adjustment, writer)
    inputs: list[ir.Value | None] = [activations.value, weight, scale, zero]
    operator = "DynamicQuantizeMatMul"
    if activations.scale is not None:
        inputs = [activations.value, weight, activations.scale, scale, activations.zero, zero]
        operator = "MatMulIntegerToFloat"
    if bias is not None and activations.row_scale is None:
        inputs.append(bias)
    result = writer.node(operator, inputs, domain=MICROSOFT, like=layer.result)
    if activations.row_scale is None:
        return result
    result = writer.node("Mul", [result, activations.row_scale], like=layer.result)
    return result if bias is None else writer.node("Add", [result, bias], like=layer.result)


def _bias(layer: LinearLayer, adjustment: Adjustment, writer: Writer) -> ir.Value | None:
    """Return bias and shift, divided by the result scale; None without both."""
    terms = [term for term in (layer.read_bias(), adjustment.shift) if term is not None]
    if not terms or (adjustment.shift is None and adjustment.result_smoothing_scale is None):
        return layer.bias
    total = sum(terms[1:], start=terms[0])
    if adjustment.result_smoothing_scale is not None:
        total = total / adjustment.result_smoothing_scale
    return writer.constant(total, f"{layer.name}_int8_bias")


def _lazy_weights(
    layer: LinearLayer, adjustment: Adjustment, *, exact: bool
) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return int8 [K, N] and its scale, float32 [N], computed when their bytes are read."""
    read = layer.weight_reader()

    def quantized() -> tuple[Codes, Floats]:
        codes, scale = adjustment.quantize(read(), exact=exact)
        divisor = adjustment.result_smoothing_scale
        return codes, scale if divisor is None else scale / divisor

    def floats() -> Floats:
        factor = 1 if adjustment.smoothing_scale is None else adjustment.smoothing_scale
        divisor = 1 if adjustment.result_smoothing_scale is None else adjustment.result_smoothing_scale[:, None]
        columns: Floats = read().T * factor / divisor
        return columns

    tensor, scale = _lazy(quantized, layer.size, layer.size[1:])
    return made_from(tensor, floats), scale


def _lazy(
    quantized: Callable[[], tuple[Codes, Floats]], size: Sequence[int], scale_size: Sequence[int]
) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    return (
        ir.LazyTensor(lambda: ir.tensor(quantized()[0]), ir.DataType.INT8, ir.Shape(size)),
        # Cached: it is small, and every conversion of the graph to a protobuf reads it.
        ir.LazyTensor(lambda: ir.tensor(quantized()[1]), ir.DataType.FLOAT, ir.Shape(scale_size), cache=True),
    )


# Smaller tables (positions, segments) hardly affect the size.
_FEWEST_ROWS = 1024
_NARROWEST = 8
_NORMALIZATION_OPSET = 17  # of LayerNormalization
_DEFAULT_EPSILON = 1e-12  # of EmbedLayerNormalization


def _quantize_tables(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Gather(table, ids)` by `Mul(Cast(Gather(int8 table, ids)), Gather(scale, ids))`, with a scale per row.

    `EmbedLayerNormalization` is unfused first if it has position ids.
    """
    written: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    return rewrite_lookups(model, lambda node, table: _write_lookup(node, table, written))


def rewrite_lookups(model: ir.Model, rewrite: Callable[[ir.Node, ir.Value], str]) -> Outcome:
    """Rewrite each lookup of rows in a large table by `rewrite`, and drop tables that are no longer read.

    `rewrite` returns the reason if a precondition does not hold. `EmbedLayerNormalization` is unfused first.
    """
    reasons = _unfuse_embeddings(model)
    num_unfused = len(reasons)
    gathers = [node for node in model.graph if node.op_type == "Gather" and not node.domain and not patterns_of(node)]
    lookups = [(node, table) for node in gathers if (table := node.inputs[0]) is not None and _is_large_table(table)]
    for node, table in lookups:
        is_of_rows = attribute(node, "axis", 0) == 0
        reason = rewrite(node, table) if is_of_rows else "the lookup is not one of rows"
        reasons += [reason] if reason else []
    drop_unused(dict.fromkeys(table for _, table in lookups))
    return Outcome(model, len(lookups) - (len(reasons) - num_unfused), refusals(reasons))


def _is_large_table(table: ir.Value | None) -> bool:
    """Whether `table` is a float32 matrix that is large enough to be quantized and only read by lookups."""
    if table is None or not is_weight(table, 2) or table.is_graph_output():
        return False
    # If another node reads it (a head that stays in float32), a quantized copy would only add to the size.
    if any(reader.op_type not in ("Gather", "EmbedLayerNormalization") for reader, _ in table.uses()):
        return False
    tensor = tensor_of(table)
    rows, columns = tensor.shape.numpy()
    return bool(tensor.dtype == ir.DataType.FLOAT and rows >= _FEWEST_ROWS and columns >= _NARROWEST)


def _write_lookup(node: ir.Node, table: ir.Value, tables: dict[ir.Value, tuple[ir.Value, ir.Value]]) -> str:
    writer = Writer(node)
    if table not in tables:
        rounded, scale = _lazy_table(tensor_of(table))
        tables[table] = (
            writer.initializer(rounded, f"{table.name}_rows_int8"),
            writer.initializer(scale, f"{table.name}_rows_scale"),
        )
    rounded_rows, scales = (writer.node("Gather", [stored, node.inputs[1]]) for stored in tables[table])
    rows = writer.node("Cast", [rounded_rows], {"to": ir.DataType.FLOAT})
    replace_and_erase(node.outputs[0], writer.node("Mul", [rows, scales], like=node.outputs[0]))
    return ""


def _lazy_table(tensor: ir.TensorProtocol) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return int8 [V, H] and its scale, float32 [V, 1], computed when their bytes are read."""

    def quantized() -> tuple[Codes, Floats]:
        columns, scale = PLAIN.quantize(tensor.numpy().T, exact=True)  # looked up, not multiplied in int8
        return np.ascontiguousarray(columns.T), scale[:, None]

    rows, columns = (int(size) for size in tensor.shape.numpy())
    codes, scale = _lazy(quantized, (rows, columns), (rows, 1))
    return made_from(codes, tensor.numpy), scale


def _unfuse_embeddings(model: ir.Model) -> list[str]:
    """Replace `EmbedLayerNormalization` by lookups, sums and `LayerNormalization`; return the reason if it stays."""
    reasons = []
    for node in model.graph:
        if (node.domain, node.op_type) != (MICROSOFT, "EmbedLayerNormalization") or patterns_of(node):
            continue
        inputs: dict[str, Any] = named_inputs(node.domain, node.op_type, node.inputs)
        if not _is_large_table(inputs["word_embedding"]):
            continue
        if default_opset(model.opset_imports) < _NORMALIZATION_OPSET:
            reasons.append(f"opset below {_NORMALIZATION_OPSET}")
        elif inputs["position_ids"] is None:
            reasons.append("the embedding has no input of position ids")
        elif any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            reasons.append("the mask or the sum of the embedding is read")
        else:
            _unfuse_embedding(node, inputs)
    return reasons


def _unfuse_embedding(node: ir.Node, inputs: dict[str, Any]) -> None:
    writer = Writer(node)
    total = writer.node("Gather", [inputs["word_embedding"], inputs["input_ids"]], like=node.outputs[0])
    for table, ids in (("position_embedding", "position_ids"), ("segment_embedding", "segment_ids")):
        if inputs[table] is not None and inputs[ids] is not None:
            rows = writer.node("Gather", [inputs[table], inputs[ids]])
            total = writer.node("Add", [total, rows], like=node.outputs[0])
    normalized = writer.node(
        "LayerNormalization",
        [total, inputs["gamma"], inputs["beta"]],
        {"axis": -1, "epsilon": float(attribute(node, "epsilon", _DEFAULT_EPSILON))},
        like=node.outputs[0],
    )
    replace_and_erase(node.outputs[0], normalized)


int8_embeddings = Pass("int8_embeddings", _quantize_tables)


def _to_unsigned(model: ir.Model, _context: Context) -> Outcome:
    """Store the weights of products and their zero points as uint8, 128 larger: the products are the same numbers."""
    products = (node for node in model.graph if (node.domain, node.op_type) in INT8_WEIGHTS)
    named = (named_inputs(node.domain, node.op_type, node.inputs) for node in products)
    pairs = [(inputs.get("B"), inputs.get("b_zero_point")) for inputs in named]
    changed = dict.fromkeys(value for pair in pairs if None not in pair for value in pair if value is not None)
    for value in changed:
        tensor = tensor_of(value)
        unsigned = ir.LazyTensor(partial(_unsigned, tensor), ir.DataType.UINT8, ir.Shape(tensor.shape.numpy()))
        unsigned.meta.update(tensor.meta)
        value.const_value, value.type = unsigned, ir.TensorType(ir.DataType.UINT8)
    return Outcome(model, len(changed))


def _unsigned(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().view(np.uint8) ^ np.uint8(128))


unsigned_weights = Pass("unsigned_weights", _to_unsigned)


_INT8 = "int8"
_DIVISION_COST = 1.1  # of a layer with a Mul in front, compared with one without


def to_int8(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    activations: str = MIXED,
    exact: bool = False,
    setting: QuantizationSetting = DEFAULT_SETTING,
) -> Quantized:
    """Quantize the linear layers of a float32 model to int8, within `max_error`.

    Weights are rounded so that the errors of channels cancel on `feeds`, and the average rounding error is added to the
    bias. Channels with outliers are scaled down before a layer if that needs no extra node. If the error on `feeds` is
    then not below `max_error` with a margin, a Mul scales them down before more and more layers, and finally layers
    stay in float32, those with the largest error per weight first.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, arrays by input name, on which the error is measured.
        max_error: see `quantize_within`; with None, channels are scaled down wherever that is worth the time.
        activations: how activations are rounded: `per_row`, with a scale for each row; `dynamic`, with one range per
            run; `static`, with ranges measured on `feeds`; or `mixed`, `static` after normalizations where that costs
            little, and `per_row` elsewhere.
        exact: whether the result is only for CPUs on which no product of uint8 and int8 saturates. Without it, products
            are exact on every CPU, and weights have slightly coarser steps.
        setting: see `quantize_within`.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """
    require_opset(model)

    def choose(layers: Sequence[LinearLayer], recording: Recording) -> QuantizationConfig:
        choices = choose_adjustments(
            layers, recording, activations, exact=exact, free_smoothing=find_free_smoothing(layers)
        )
        # Rows get separate scales also if nothing is known about them.
        default = Adjustment(activations=RowGrid.middle()) if activations in (MIXED, PER_ROW) else PLAIN
        defaults = {layer.name: default for layer in layers}
        return _config(choices, defaults, is_bounded=max_error is not None, is_exact=exact)

    return quantize_within(model, feeds, max_error, choose, setting)


def _config(
    choices: Mapping[str, AdjustmentChoice], defaults: Mapping[str, Adjustment], *, is_bounded: bool, is_exact: bool
) -> QuantizationConfig:
    """Return how layers are quantized: with a bound, activations are divided only where the error requires it."""

    def adjustments(names: Mapping[str, bool]) -> dict[str, Adjustment]:
        """Return the adjustments of layers, given whether each has to be free; those of a group are rounded at once."""

        def group(name: str) -> GroupAdjustments:
            return choices[name].free if names[name] and is_bounded else choices[name].best

        known = [name for name in names if name in choices]
        first = {(choices[name].group, names[name]): name for name in known}
        for _ in each_in_parallel(lambda name: group(name).by_name, list(first.values()), "rounding layers, group"):
            pass
        return {name: group(name).by_name[name] if name in choices else defaults[name] for name in names}

    def level(label: str, *, is_free: bool) -> Level:
        adjusted = adjustments(dict.fromkeys(defaults, is_free))

        def write(layer: LinearLayer, writer: Writer) -> ir.Value:
            return write_adjusted(layer, adjusted[layer.name], writer, label, exact=is_exact)

        return Level(_INT8, write, cost=1.0 if is_free else _DIVISION_COST)

    def convert(fallbacks: Sequence[FallbackLayer]) -> Pass:
        exact = frozenset(layer.name for layer in fallbacks if layer.precision != _INT8)
        divided = {
            choices[fallback.name].group for fallback in fallbacks if fallback.name in choices and not fallback.by_name
        }
        wanted = {
            name: name not in choices or choices[name].group not in divided for name in defaults if name not in exact
        }
        return quantize_int8(exact, adjustments(wanted), exact=is_exact)

    @cache
    def levels() -> Sequence[Level]:
        best = level("_best", is_free=False)
        has_divisions = is_bounded and any(choice.free is not choice.best for choice in choices.values())
        return (level("_free", is_free=True), best) if has_divisions else (best,)

    return QuantizationConfig(_INT8, levels, convert, ((_INT8, int8_embeddings),))
