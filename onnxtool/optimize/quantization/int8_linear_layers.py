"""Compute products with weights in int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from onnxtool.graph.edit import MICROSOFT, only_consumer, producer, replace_and_erase, tensor_of
from onnxtool.graph.operators import named_inputs
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.notes import refusals
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization.arithmetic import PLAIN, ActivationGrid, Adjustment, quantize_weight, stored_name
from onnxtool.optimize.quantization.linear_layers import (
    Product,
    find_products,
    open_products,
    scalable_normalization,
    shared_initializer,
)

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.optimize.quantization.arithmetic import Floats

_FIRST_OPSET = 11  # of DynamicQuantizeLinear
# Inputs of a MultiHeadAttention which leave its values those of one product.
_PLAIN_INPUTS = frozenset({"query", "key", "value", "key_padding_mask", "attention_bias"})


def quantize_int8(kept: frozenset[str] = frozenset(), adjustments: Mapping[str, Adjustment] | None = None) -> Pass:
    """Return the pass that computes in int8 all products with weights but those whose weights are `kept`.

    Args:
        kept: names of weights that stay float32.
        adjustments: what makes a product easier to round, by the name of its weight; products that read the same
            activations share one division where they have the same divisor.
    """

    def apply(model: ir.Model, _context: Context) -> Outcome:
        return _apply(model, kept, adjustments or {})

    return Pass("quantize_int8", apply)


def _apply(model: ir.Model, kept: frozenset[str], adjustments: Mapping[str, Adjustment]) -> Outcome:
    """Replace `x @ W + b` by `DynamicQuantizeMatMul(x, int8 W, scale, b)`, with a scale for each column of W.

    Where several products read x, or the adjustment has a grid for x, x is rounded in front of them and they become
    `MatMulIntegerToFloat`. A packed `Attention` is opened for that; a weight that an embedding shares gets a quantized
    copy.
    """
    if model.opset_imports.get("", 0) < _FIRST_OPSET:
        return Outcome(model, 0, f"opset below {_FIRST_OPSET}")
    reasons = open_products(model, kept, find_shapes(model))
    products, others = find_products(model)
    wanted = [product for product in products if product.name not in kept]
    folded, adjustments = _fold_divisors(wanted, adjustments)
    keys = [_key(product, adjustments.get(product.name, PLAIN)) for product in wanted]
    given: dict[_Key, _Activations] = {}
    for product, key in zip(wanted, keys, strict=True):
        adjustment, writer = adjustments.get(product.name, PLAIN), Writer(product.node)
        if key not in given:
            divisor = None if key[0] in folded else adjustment.divisor
            given[key] = _prepare(product, divisor, adjustment, writer, is_shared=keys.count(key) > 1)
        replace_and_erase(product.result, _write(product, given[key], adjustment, writer))
    for weight in {one for product in wanted for one in (product.weight, product.bias) if one is not None}:
        if not weight.uses() and not weight.is_graph_output():
            model.graph.initializers.pop(str(weight.name), None)
    return Outcome(model, len(wanted), refusals([*reasons, *others]))


_Key = tuple["ir.Value", bytes, ActivationGrid | None]


def _key(product: Product, adjustment: Adjustment) -> _Key:
    """Return what is the same for products that can share their activations."""
    divisor = b"" if adjustment.divisor is None else adjustment.divisor.tobytes()
    return product.value, divisor, adjustment.activations


def find_free_divisions(products: Sequence[Product]) -> frozenset[str]:
    """Return the names of activations that what makes them can divide in place of a multiplication."""
    readers = _readers(products)
    return frozenset(
        str(value.name) for value, group in readers.items() if _divider(value, group, products) is not None
    )


def _readers(products: Sequence[Product]) -> dict[ir.Value, list[Product]]:
    readers: dict[ir.Value, list[Product]] = {}
    for product in products:
        readers.setdefault(product.value, []).append(product)
    return readers


def _divider(value: ir.Value, group: Sequence[Product], products: Sequence[Product]) -> ir.Node | Product | None:
    """Return the normalization or the product in which `value` can be divided, where only `group` reads it; else None.

    What attention gives is a mean of its values, channel by channel, so their product can be divided.
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
    made = [product for product in products if product.result is inputs["value"]]
    if not made or only_consumer(made[0].result, domain=MICROSOFT) is not attention:
        return None
    # A weight that is used repeatedly has one scale for all its uses.
    return made[0] if [product.name for product in products].count(made[0].name) == 1 else None


def _fold_divisors(
    products: Sequence[Product], adjustments: Mapping[str, Adjustment]
) -> tuple[set[ir.Value], Mapping[str, Adjustment]]:
    """Let normalizations and products divide by themselves where only products with one divisor read them.

    Returns their outputs, and the adjustments with what the products divide by.
    """
    folded, changed = set(), dict(adjustments)
    for value, group in _readers(products).items():
        divisors = [adjustments.get(product.name, PLAIN).divisor for product in group]
        divisor = divisors[0]
        if divisor is None or any(one is None or not np.array_equal(one, divisor) for one in divisors):
            continue
        divider = _divider(value, group, products)
        if divider is None:
            continue
        if isinstance(divider, Product):
            changed[divider.name] = replace(changed.get(divider.name, PLAIN), result_divisor=divisor)
        else:
            _divide(divider, divisor)
        folded.add(value)
    return folded, changed


def _divide(normalization: ir.Node, divisor: Floats) -> None:
    """Divide scale and shift of a normalization."""
    for place, one in enumerate(normalization.inputs[1:], start=1):
        if one is not None:
            scaled = (tensor_of(one).numpy() / divisor).astype(divisor.dtype)
            normalization.replace_input_with(place, _weight(scaled, f"{one.name}_divided", normalization))


def _weight(array: Floats, name: str, node: ir.Node) -> ir.Value:
    import onnx_ir as ir

    return Writer(node).initializer(ir.tensor(array), name)


@dataclass(frozen=True)
class _Activations:
    """What a product reads.

    Attributes:
        value: float32 as they are, or uint8 with `scale`, float32 [], and `zero`, uint8 [].
    """

    value: ir.Value
    scale: ir.Value | None = None
    zero: ir.Value | None = None


def write_adjusted(product: Product, adjustment: Adjustment, writer: Writer, label: str) -> ir.Value:
    """Write the int8 of a product, with activations of its own, and return its result.

    The names of its weights end in `label`: there may be others of the same product, adjusted in another way.
    """
    activations = _prepare(product, adjustment.divisor, adjustment, writer, is_shared=False)
    return _write(product, activations, adjustment, writer, label)


def _prepare(
    product: Product, divisor: Floats | None, adjustment: Adjustment, writer: Writer, *, is_shared: bool
) -> _Activations:
    """Write what a product reads: its activations divided, by a multiplication, and rounded where that is not its own.

    An operator that finds the range of its activations does so for itself; `is_shared` by several, it is done once.
    """
    import onnx_ir as ir

    value, grid = product.value, adjustment.activations
    if divisor is not None:
        factor = writer.constant(1 / divisor, f"{product.name}_factor")
        value = writer.node("Mul", [value, factor], like=value)
    if grid is not None:
        scale = writer.constant(np.array(grid.scale, np.float32), f"{product.name}_input_scale")
        zero = writer.constant(np.array(grid.zero, np.uint8), f"{product.name}_input_zero")
        return _Activations(writer.node("QuantizeLinear", [value, scale, zero]), scale, zero)
    if is_shared:
        return _Activations(*writer.add(ir.node("DynamicQuantizeLinear", [value], num_outputs=3)))
    return _Activations(value)


def _write(
    product: Product, activations: _Activations, adjustment: Adjustment, writer: Writer, label: str = ""
) -> ir.Value:
    """Write the int8 of a product with its activations as `_prepare` left them, and return its result."""
    tensor, scales = _lazy_weights(product, adjustment)
    weight = shared_initializer(tensor, f"{stored_name(product)}_int8{label}", writer)
    scale = shared_initializer(scales, f"{stored_name(product)}_scale{label}", writer)
    bias = _bias(product, adjustment, writer)
    inputs: list[ir.Value | None] = [activations.value, weight, scale]
    operator = "DynamicQuantizeMatMul"
    if activations.scale is not None:
        inputs = [activations.value, weight, activations.scale, scale, activations.zero]
        operator = "MatMulIntegerToFloat"
    if bias is not None:
        inputs += [None, bias]  # without a zero point of the weight: its grid is symmetric
    return writer.node(operator, inputs, domain=MICROSOFT, like=product.result)


def _bias(product: Product, adjustment: Adjustment, writer: Writer) -> ir.Value | None:
    """Return what is added to the product, divided as the product is; None for nothing."""
    terms = [one for one in (product.read_bias(), adjustment.shift) if one is not None]
    if not terms or (adjustment.shift is None and adjustment.result_divisor is None):
        return product.bias
    total = sum(terms[1:], start=terms[0])
    if adjustment.result_divisor is not None:
        total = total / adjustment.result_divisor
    return writer.constant(total, f"{product.name}_int8_bias")


def _lazy_weights(product: Product, adjustment: Adjustment) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return int8 [K, N] and its scale, float32 [N], which are computed when their bytes are asked for."""
    import onnx_ir as ir

    divisor, result_divisor = adjustment.divisor, adjustment.result_divisor
    read = product.weight_reader()

    def quantized(index: int) -> ir.TensorProtocol:
        weight = read()
        found = quantize_weight(weight if divisor is None else weight * divisor[:, None])[index]
        return ir.tensor(found / result_divisor if index and result_divisor is not None else found)

    rows, columns = product.size
    return (
        ir.LazyTensor(lambda: quantized(0), ir.DataType.INT8, ir.Shape([rows, columns])),
        # Small enough to be written into every protobuf that somebody makes of the graph on the way.
        ir.LazyTensor(lambda: quantized(1), ir.DataType.FLOAT, ir.Shape([columns]), cache=True),
    )
