"""Compute products with weights in int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.optimize.matching import MICROSOFT, Editor, supersede, tensor_of
from onnxtool.optimize.notes import refusals
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.precision.products import (
    Product,
    find_products,
    open_products,
    scalable_normalization,
    shared_initializer,
)
from onnxtool.optimize.precision.quantization import PLAIN, ActivationGrid, Adjustment, quantize_weight, stored_name
from onnxtool.optimize.shapes import find_shapes

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.optimize.precision.quantization import Floats

_FIRST_OPSET = 10  # of QuantizeLinear


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

    Where the adjustment has a grid for x, it is `MatMulIntegerToFloat(QuantizeLinear(x), int8 W, …)`. A packed
    `Attention` is opened for that; a weight that an embedding shares gets a quantized copy.
    """
    if model.opset_imports.get("", 0) < _FIRST_OPSET:
        return Outcome(model, 0, f"opset below {_FIRST_OPSET}")
    reasons = open_products(model, kept, find_shapes(model))
    products, others = find_products(model)
    wanted = [product for product in products if product.name not in kept]
    folded = _fold_divisors(wanted, adjustments)
    given: dict[tuple[ir.Value, bytes, Any], ir.Value] = {}
    for product in wanted:
        adjustment, value = adjustments.get(product.name, PLAIN), product.value
        divisor = None if value in folded else adjustment.divisor
        key = (value, b"" if divisor is None else divisor.tobytes(), adjustment.activations)
        if key not in given:
            given[key] = _prepare(product, divisor, adjustment, Editor(product.node))
        supersede(product.result, _write(product, given[key], adjustment, Editor(product.node)))
    for name in {product.name for product in wanted}:
        weight = model.graph.initializers[name]
        if not weight.uses() and not weight.is_graph_output():
            model.graph.initializers.pop(name)
    return Outcome(model, len(wanted), refusals([*reasons, *others]))


def _fold_divisors(products: Sequence[Product], adjustments: Mapping[str, Adjustment]) -> set[ir.Value]:
    """Let normalizations divide by themselves where only products with one divisor read them; return their outputs."""
    readers: dict[ir.Value, list[Product]] = {}
    for product in products:
        readers.setdefault(product.value, []).append(product)
    folded = set()
    for value, group in readers.items():
        divisors = [adjustments.get(product.name, PLAIN).divisor for product in group]
        divisor, node = divisors[0], scalable_normalization(value)
        if divisor is None or node is None or len(value.uses()) != len(group) or value.is_graph_output():
            continue
        if any(one is None or not np.array_equal(one, divisor) for one in divisors):
            continue
        for place in range(1, len(node.inputs)):
            one = node.inputs[place]
            if one is not None:
                scaled = (tensor_of(one).numpy() / divisor).astype(divisor.dtype)
                node.replace_input_with(place, _weight(scaled, f"{one.name}_divided", node))
        folded.add(value)
    return folded


def _weight(array: Floats, name: str, node: ir.Node) -> ir.Value:
    import onnx_ir as ir

    return Editor(node).weight(ir.tensor(array), name)


def write_adjusted(product: Product, adjustment: Adjustment, editor: Editor) -> ir.Value:
    """Write the int8 of a product, with an activation of its own, and return its result."""
    value = _prepare(product, adjustment.divisor, adjustment, editor)
    return _write(product, value, adjustment, editor)


def _prepare(product: Product, divisor: Floats | None, adjustment: Adjustment, editor: Editor) -> ir.Value:
    """Write what a product reads: its activations divided, by a multiplication, and rounded where they have a grid."""
    value = product.value
    if divisor is not None:
        factor = editor.constant(1 / divisor, f"{product.name}_factor")
        value = editor.node("Mul", [value, factor], like=value)
    grid = adjustment.activations
    if grid is None:
        return value
    return editor.node("QuantizeLinear", [value, *_grid_inputs(product, grid, editor)])


def _grid_inputs(product: Product, grid: ActivationGrid, editor: Editor) -> tuple[ir.Value, ir.Value]:
    """Return the scale, float32 [], and the zero point, uint8 [], of activations."""
    scale = editor.constant(np.array(grid.scale, np.float32), f"{product.name}_input_scale")
    return scale, editor.constant(np.array(grid.zero, np.uint8), f"{product.name}_input_zero")


def _write(product: Product, value: ir.Value, adjustment: Adjustment, editor: Editor) -> ir.Value:
    """Write the int8 of a product with `value`, its activations as `_prepare` left them, and return its result."""
    tensor, scales = _lazy_weights(product, adjustment)
    weight = shared_initializer(tensor, f"{stored_name(product)}_int8", editor)
    scale = shared_initializer(scales, f"{stored_name(product)}_scale", editor)
    bias = _bias(product, adjustment, editor)
    inputs: list[ir.Value | None] = [value, weight, scale]
    operator = "DynamicQuantizeMatMul"
    if adjustment.activations is not None:
        input_scale, input_zero = _grid_inputs(product, adjustment.activations, editor)
        inputs = [value, weight, input_scale, scale, input_zero]
        operator = "MatMulIntegerToFloat"
    if bias is not None:
        inputs += [None, bias]  # without a zero point of the weight: its grid is symmetric
    return editor.node(operator, inputs, domain=MICROSOFT, like=product.result)


def _bias(product: Product, adjustment: Adjustment, editor: Editor) -> ir.Value | None:
    if adjustment.shift is None:
        return product.bias
    own = product.read_bias()
    return editor.constant(adjustment.shift if own is None else own + adjustment.shift, f"{product.name}_int8_bias")


def _lazy_weights(product: Product, adjustment: Adjustment) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return int8 [K, N] and its scale, float32 [N], which are computed when their bytes are asked for."""
    import onnx_ir as ir

    divisor = adjustment.divisor
    read = product.weight_reader()

    def quantized(index: int) -> ir.TensorProtocol:
        weight = read()
        return ir.tensor(quantize_weight(weight if divisor is None else weight * divisor[:, None])[index])

    rows, columns = product.size
    return (
        ir.LazyTensor(lambda: quantized(0), ir.DataType.INT8, ir.Shape([rows, columns])),
        # Small enough to be written into every protobuf that somebody makes of the graph on the way.
        ir.LazyTensor(lambda: quantized(1), ir.DataType.FLOAT, ir.Shape([columns]), cache=True),
    )
