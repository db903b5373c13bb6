"""Quantize linear layers to int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import drop_unused, only_consumer, producer, replace_and_erase, tensor_of
from onnxtool.graph.operators import MICROSOFT, named_inputs
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals
from onnxtool.optimize.quantization.arithmetic import PLAIN, ActivationGrid, Adjustment, Floats, quantize_weight
from onnxtool.optimize.quantization.linear_layers import (
    LinearLayer,
    find_linear_layers,
    scalable_normalization,
    shared_initializer,
    unfuse_linear_layers,
)

_FIRST_OPSET = 11  # of DynamicQuantizeLinear
# Inputs of a MultiHeadAttention which leave its values those of one linear layer.
_PLAIN_INPUTS = frozenset({"query", "key", "value", "key_padding_mask", "attention_bias"})


def quantize_int8(fallbacks: frozenset[str] = frozenset(), adjustments: Mapping[str, Adjustment] | None = None) -> Pass:
    """Return the pass that quantizes all linear layers to int8 but `fallbacks`.

    Args:
        fallbacks: names of weights that stay float32.
        adjustments: changes that reduce the rounding error, by the name of the weight; layers that read the same
            activations with the same smoothing scale share one division.
    """

    def apply(model: ir.Model, _context: Context) -> Outcome:
        return _apply(model, fallbacks, adjustments or {})

    return Pass("quantize_int8", apply)


def _apply(model: ir.Model, fallbacks: frozenset[str], adjustments: Mapping[str, Adjustment]) -> Outcome:
    """Replace `Add(MatMul(x, W), b)` by `DynamicQuantizeMatMul(x, int8 W, scale, , b)`, with a scale per column of W.

    Where several layers read x, or the adjustment has a grid for x, a node in front quantizes x and they become
    `MatMulIntegerToFloat`. A packed `Attention` is unfused first; a weight that is also an embedding is copied.
    """
    if model.opset_imports.get("", 0) < _FIRST_OPSET:
        return Outcome(model, 0, f"opset below {_FIRST_OPSET}")
    reasons = unfuse_linear_layers(model, fallbacks, find_shapes(model))
    layers, others = find_linear_layers(model)
    wanted = [layer for layer in layers if layer.name not in fallbacks]
    folded, adjustments = _fold_smoothing_scales(wanted, adjustments)
    keys = [_key(layer, adjustments.get(layer.name, PLAIN)) for layer in wanted]
    given: dict[_Key, _Activations] = {}
    for layer, key in zip(wanted, keys, strict=True):
        adjustment, writer = adjustments.get(layer.name, PLAIN), Writer(layer.node)
        if key not in given:
            smoothing_scale = None if key[0] in folded else adjustment.smoothing_scale
            given[key] = _prepare(layer, smoothing_scale, adjustment, writer, is_shared=keys.count(key) > 1)
        replace_and_erase(layer.result, _write(layer, given[key], adjustment, writer))
    drop_unused(one for layer in wanted for one in (layer.weight, layer.bias) if one is not None)
    return Outcome(model, len(wanted), refusals([*reasons, *others]))


_Key = tuple["ir.Value", bytes, ActivationGrid | None]


def _key(layer: LinearLayer, adjustment: Adjustment) -> _Key:
    """Return a key that is equal for layers that can share their quantized activations."""
    smoothing_scale = b"" if adjustment.smoothing_scale is None else adjustment.smoothing_scale.tobytes()
    return layer.value, smoothing_scale, adjustment.activations


def find_free_smoothing(layers: Sequence[LinearLayer]) -> frozenset[str]:
    """Return the names of activations whose division by a smoothing scale needs no node of its own."""
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

    The output of an attention is a weighted mean of its values in each channel, so the layer of the values can.
    """
    if len(value.uses()) != len(group) or value.is_graph_output():
        return None
    attention = producer(value, "MultiHeadAttention", domain=MICROSOFT)
    if attention is None:
        return scalable_normalization(value)
    inputs = named_inputs(MICROSOFT, "MultiHeadAttention", attention.inputs)
    given = {name for name, one in inputs.items() if one is not None}
    if len(attention.outputs) > 1 or not given <= _PLAIN_INPUTS or "value" not in given:
        return None
    made = [layer for layer in layers if layer.result is inputs["value"]]
    if not made or only_consumer(made[0].result, domain=MICROSOFT) is not attention:
        return None
    # A weight that is used several times has one scale for all its uses.
    return made[0] if [layer.name for layer in layers].count(made[0].name) == 1 else None


def _fold_smoothing_scales(
    layers: Sequence[LinearLayer], adjustments: Mapping[str, Adjustment]
) -> tuple[set[ir.Value], Mapping[str, Adjustment]]:
    """Fold divisions into the normalizations and layers in front, where all consumers have one smoothing scale.

    Returns the outputs of these, and the adjustments with the result scales of the layers.
    """
    folded, changed = set(), dict(adjustments)
    for value, group in _readers(layers).items():
        scales = [adjustments.get(layer.name, PLAIN).smoothing_scale for layer in group]
        scale = scales[0]
        if scale is None or any(one is None or not np.array_equal(one, scale) for one in scales):
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
    for place, one in enumerate(normalization.inputs[1:], start=1):
        if one is not None:
            scaled = (tensor_of(one).numpy() / smoothing_scale).astype(smoothing_scale.dtype)
            normalization.replace_input_with(place, Writer(normalization).constant(scaled, f"{one.name}_divided"))


@dataclass(frozen=True)
class _Activations:
    """The input of a quantized layer.

    Attributes:
        value: float32 activations, or uint8 with `scale`, float32 [], and `zero`, uint8 [].
    """

    value: ir.Value
    scale: ir.Value | None = None
    zero: ir.Value | None = None


def write_adjusted(layer: LinearLayer, adjustment: Adjustment, writer: Writer, label: str) -> ir.Value:
    """Write a layer in int8, which quantizes its activations itself, and return its result.

    The names of its weights end in `label`: the same layer may be written again with another adjustment.
    """
    activations = _prepare(layer, adjustment.smoothing_scale, adjustment, writer, is_shared=False)
    return _write(layer, activations, adjustment, writer, label)


def _prepare(
    layer: LinearLayer, smoothing_scale: Floats | None, adjustment: Adjustment, writer: Writer, *, is_shared: bool
) -> _Activations:
    """Write the input of a layer: its activations divided by a Mul, and quantized unless the operator does that.

    An operator for dynamic ranges quantizes its own input; where it is shared by several, that is done once.
    """
    value, grid = layer.value, adjustment.activations
    if smoothing_scale is not None:
        factor = writer.constant(1 / smoothing_scale, f"{layer.name}_factor")
        value = writer.node("Mul", [value, factor], like=value)
    if grid is not None:
        scale = writer.constant(np.array(grid.scale, np.float32), f"{layer.name}_input_scale")
        zero = writer.constant(np.array(grid.zero, np.uint8), f"{layer.name}_input_zero")
        return _Activations(writer.node("QuantizeLinear", [value, scale, zero]), scale, zero)
    if is_shared:
        return _Activations(*writer.ops("DynamicQuantizeLinear", value, outputs=3))
    return _Activations(value)


def _write(
    layer: LinearLayer, activations: _Activations, adjustment: Adjustment, writer: Writer, label: str = ""
) -> ir.Value:
    """Write a layer in int8 on activations from `_prepare`, and return its result."""
    tensor, scales = _lazy_weights(layer, adjustment)
    weight = shared_initializer(tensor, f"{layer.stored_name}_int8{label}", writer)
    scale = shared_initializer(scales, f"{layer.stored_name}_scale{label}", writer)
    bias = _bias(layer, adjustment, writer)
    inputs: list[ir.Value | None] = [activations.value, weight, scale]
    operator = "DynamicQuantizeMatMul"
    if activations.scale is not None:
        inputs = [activations.value, weight, activations.scale, scale, activations.zero]
        operator = "MatMulIntegerToFloat"
    if bias is not None:
        inputs += [None, bias]  # no zero point of the weight: its grid is symmetric
    return writer.node(operator, inputs, domain=MICROSOFT, like=layer.result)


def _bias(layer: LinearLayer, adjustment: Adjustment, writer: Writer) -> ir.Value | None:
    """Return bias and shift, divided by the result scale; None without both."""
    terms = [one for one in (layer.read_bias(), adjustment.shift) if one is not None]
    if not terms or (adjustment.shift is None and adjustment.result_smoothing_scale is None):
        return layer.bias
    total = sum(terms[1:], start=terms[0])
    if adjustment.result_smoothing_scale is not None:
        total = total / adjustment.result_smoothing_scale
    return writer.constant(total, f"{layer.name}_int8_bias")


def _lazy_weights(layer: LinearLayer, adjustment: Adjustment) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return int8 [K, N] and its scale, float32 [N], computed when their bytes are read."""
    smoothing_scale, result_smoothing_scale = adjustment.smoothing_scale, adjustment.result_smoothing_scale
    read = layer.weight_reader()

    def quantized(index: int) -> ir.TensorProtocol:
        weight = read()
        found = quantize_weight(weight if smoothing_scale is None else weight * smoothing_scale[:, None])[index]
        return ir.tensor(found / result_smoothing_scale if index and result_smoothing_scale is not None else found)

    rows, columns = layer.size
    return (
        ir.LazyTensor(lambda: quantized(0), ir.DataType.INT8, ir.Shape([rows, columns])),
        # Cached: it is small, and every conversion of the graph to a protobuf reads it.
        ir.LazyTensor(lambda: quantized(1), ir.DataType.FLOAT, ir.Shape([columns]), cache=True),
    )
