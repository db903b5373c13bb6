"""Quantize the weights of linear layers to blocks of 4 or 8 bits; activations stay floating point.

Letters of shapes: K width of the input, N width of the output, C blocks of a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnxtool.graph.edit import drop_unused, replace_and_erase
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals
from onnxtool.optimize.quantization.arithmetic import Floats
from onnxtool.optimize.quantization.blocks import BLOCK, Grids, pack_zeros
from onnxtool.optimize.quantization.linear_layers import (
    LinearLayer,
    find_linear_layers,
    shared_initializer,
    unfuse_linear_layers,
)

# By provider: 4 rounds activations to int8, one block at a time, and multiplies integers. That takes half the time of
# float32 for a single token, and its error is a hundredth of that of the weights.
_ACCURACY_LEVELS = {"cpu": 4}
_WITH_BIAS = frozenset({"cpu"})  # providers whose operator adds the bias
_BITS = {"int4": 4, "int8": 8}


def quantize_int4(
    fallbacks: Mapping[str, str] | None = None, grids: Grids | None = None, provider: str = "cpu"
) -> Pass:
    """Return the pass that quantizes the weights of all linear layers to 4 bits, except for `fallbacks`.

    Args:
        fallbacks: `int8` for 8 bits, or `float32`, by the name of a weight.
        grids: the grids of one model, and the importances to find others; None for a pass for any model.
        provider: the execution provider of the result.
    """

    def apply(model: ir.Model, _context: Context) -> Outcome:
        return _apply(model, fallbacks or {}, Grids() if grids is None else grids, provider)

    return Pass("quantize_int4", apply)


def _apply(model: ir.Model, fallbacks: Mapping[str, str], grids: Grids, provider: str) -> Outcome:
    """Replace `Add(MatMul(x, W), b)` by `MatMulNBits(x, W in blocks, scales, zero points, , b)`.

    A packed `Attention` is unfused first; a weight that is also an embedding is copied.
    """
    exact = frozenset(name for name, precision in fallbacks.items() if precision not in _BITS)
    reasons = unfuse_linear_layers(model, exact, find_shapes(model))
    layers, others = find_linear_layers(model)
    wanted = [layer for layer in layers if layer.name not in exact]
    for layer in wanted:
        bits = _BITS[fallbacks.get(layer.name, "int4")]
        replace_and_erase(layer.result, write_blocks(layer, bits, grids, Writer(layer.node), provider))
    drop_unused(layer.weight for layer in wanted)
    return Outcome(model, len(wanted), refusals([*reasons, *others]))


def write_blocks(layer: LinearLayer, bits: int, grids: Grids, writer: Writer, provider: str = "cpu") -> ir.Value:
    """Write a layer with its weight in blocks of `bits`, and return its result."""
    rows, columns = layer.size
    parts = lazy_parts(layer.stored_name, layer.size, bits, grids, layer.weight_reader())
    inputs: list[ir.Value | None] = [
        layer.value,
        *(
            shared_initializer(tensor, f"{layer.stored_name}_int{bits}_{part}", writer)
            for part, tensor in parts.items()
        ),
    ]
    inside = layer.bias is not None and provider in _WITH_BIAS
    if inside:
        inputs += [None, layer.bias]  # no order of the rows
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": BLOCK}
    if provider in _ACCURACY_LEVELS:
        attributes["accuracy_level"] = _ACCURACY_LEVELS[provider]
    result = writer.node("MatMulNBits", inputs, attributes, domain=MICROSOFT, like=layer.result)
    if layer.bias is None or inside:
        return result
    return writer.node("Add", [result, layer.bias], like=layer.result)


def lazy_parts(
    name: str, size: tuple[int, int], bits: int, grids: Grids, read: Callable[[], Floats]
) -> dict[str, ir.TensorProtocol]:
    """Return weight, scales and zero points, in the operator's order, computed when their bytes are read.

    Args:
        name: by which `grids` knows the weight.
        size: K and N.
        bits: 4 or 8.
        grids: of the model.
        read: reads the weight, float32 [K, N].
    """

    def weight() -> ir.TensorProtocol:
        return ir.tensor(grids.pack(name, bits, read))

    def scale() -> ir.TensorProtocol:
        return ir.tensor(grids.find(name, bits, read).scale)

    def zero() -> ir.TensorProtocol:
        return ir.tensor(pack_zeros(grids.find(name, bits, read)))

    rows, columns = size
    num_blocks = -(-rows // BLOCK)
    return {
        "blocks": ir.LazyTensor(weight, ir.DataType.UINT8, ir.Shape([columns, num_blocks, BLOCK * bits // 8])),
        "scale": ir.LazyTensor(scale, ir.DataType.FLOAT, ir.Shape([columns, num_blocks])),
        "zero": ir.LazyTensor(zero, ir.DataType.UINT8, ir.Shape([columns, -(-num_blocks * bits // 8)])),
    }
