"""Keep the weights of products in blocks of 4 or 8 bits; what is computed with them stays floating point.

Letters of shapes: K width of the input, N width of the product, C blocks of a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from onnxtool.graph.edit import MICROSOFT, replace_and_erase
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.notes import refusals
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization.arithmetic import stored_name
from onnxtool.optimize.quantization.blocks import BLOCK, Grids, pack_weight, pack_zeros
from onnxtool.optimize.quantization.linear_layers import Product, find_products, open_products, shared_initializer

if TYPE_CHECKING:
    import onnx_ir as ir

# By provider: activations rounded to int8, a block at a time, for which the CPU has integer products. It takes half the
# time of float32 sums for a single token, and their error is a hundredth of that of the weights.
_ACCURACY_LEVELS = {"cpu": 4}
_WITH_BIAS = frozenset({"cpu"})  # whose operator adds it
_BITS = {"int4": 4, "int8": 8}


def quantize_int4(kept: Mapping[str, str] | None = None, grids: Grids | None = None, provider: str = "cpu") -> Pass:
    """Return the pass that keeps the weights of all products in 4 bits, but those that `kept` names.

    Args:
        kept: `int8` for 8 bits, or `float32`, by the name of a weight.
        grids: the grids that are known of one model, and how others are found; None for a pass that any model may have.
        provider: that the result is for.
    """

    def apply(model: ir.Model, _context: Context) -> Outcome:
        return _apply(model, kept or {}, Grids() if grids is None else grids, provider)

    return Pass("quantize_int4", apply)


def _apply(model: ir.Model, kept: Mapping[str, str], grids: Grids, provider: str) -> Outcome:
    """Replace `x @ W + b` by `MatMulNBits(x, W in blocks, scales, zero points, b)`.

    A packed `Attention` is opened for that; a weight that an embedding shares gets a quantized copy.
    """
    exact = frozenset(name for name, precision in kept.items() if precision not in _BITS)
    reasons = open_products(model, exact, find_shapes(model))
    products, others = find_products(model)
    wanted = [product for product in products if product.name not in exact]
    for product in wanted:
        bits = _BITS[kept.get(product.name, "int4")]
        replace_and_erase(product.result, write_blocks(product, bits, grids, Writer(product.node), provider))
    for name in {product.name for product in wanted}:
        weight = model.graph.initializers[name]
        if not weight.uses() and not weight.is_graph_output():
            model.graph.initializers.pop(name)
    return Outcome(model, len(wanted), refusals([*reasons, *others]))


def write_blocks(product: Product, bits: int, grids: Grids, writer: Writer, provider: str = "cpu") -> ir.Value:
    """Write a product with its weight in blocks of `bits`, and return its result."""
    rows, columns = product.size
    inputs: list[ir.Value | None] = [
        product.value,
        *(
            shared_initializer(tensor, f"{stored_name(product)}_int{bits}_{part}", writer)
            for part, tensor in _lazy_parts(product, bits, grids).items()
        ),
    ]
    inside = product.bias is not None and provider in _WITH_BIAS
    if inside:
        inputs += [None, product.bias]  # without an order of the rows
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": BLOCK}
    if provider in _ACCURACY_LEVELS:
        attributes["accuracy_level"] = _ACCURACY_LEVELS[provider]
    result = writer.node("MatMulNBits", inputs, attributes, domain=MICROSOFT, like=product.result)
    if product.bias is None or inside:
        return result
    return writer.node("Add", [result, product.bias], like=product.result)


def _lazy_parts(product: Product, bits: int, grids: Grids) -> dict[str, ir.TensorProtocol]:
    """Return weight, scales and zero points, in the operator's order, computed when their bytes are asked for."""
    import onnx_ir as ir

    read, name = product.weight_reader(), stored_name(product)

    def weight() -> ir.TensorProtocol:
        array = read()
        return ir.tensor(pack_weight(array, grids.find(name, bits, lambda: array)))

    def scale() -> ir.TensorProtocol:
        return ir.tensor(grids.find(name, bits, read).scale)

    def zero() -> ir.TensorProtocol:
        return ir.tensor(pack_zeros(grids.find(name, bits, read)))

    rows, columns = product.size
    num_blocks = -(-rows // BLOCK)
    return {
        "blocks": ir.LazyTensor(weight, ir.DataType.UINT8, ir.Shape([columns, num_blocks, BLOCK * bits // 8])),
        "scale": ir.LazyTensor(scale, ir.DataType.FLOAT, ir.Shape([columns, num_blocks])),
        "zero": ir.LazyTensor(zero, ir.DataType.UINT8, ir.Shape([columns, -(-num_blocks * bits // 8)])),
    }
