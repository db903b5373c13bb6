"""Convert a model to weights of 4 bits, with a bound on its error, for which layers get 8 bits or stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from onnxtool.optimize.quantization.activations import Feeds, Recording
from onnxtool.optimize.quantization.arithmetic import stored_name
from onnxtool.optimize.quantization.blocks import Grids
from onnxtool.optimize.quantization.bounded import Quantized, Say, Scheme, quantize_within
from onnxtool.optimize.quantization.int4_embeddings import int4_embeddings
from onnxtool.optimize.quantization.int4_linear_layers import quantize_int4, write_blocks
from onnxtool.optimize.quantization.int8_embeddings import int8_embeddings
from onnxtool.optimize.quantization.linear_layers import Product
from onnxtool.optimize.quantization.switches import Level

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.graph.writer import Writer
    from onnxtool.optimize.pipeline import Pass
    from onnxtool.optimize.quantization.arithmetic import Floats
    from onnxtool.optimize.report import KeptLayer


def to_int4(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    provider: str = "cpu",
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> Quantized:
    """Convert the weights of the products of a float32 model to 4 bits in blocks, as far as `max_error` allows.

    Activations and sums stay floating point. An error of a weight counts by how large its channel is on `feeds`. Layers
    get 8 bits until the error on `feeds` is below `max_error` with a margin, those first that cost most error for their
    size; where all of them have 8 bits and the error is still above it, they stay in float32, in the same order.

    Args:
        model: an optimized float32 model; it stays as it is.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: see `quantize_within`.
        provider: that the result is for.
        on_progress: is told what is being done.

    Raises:
        PassError: there is nothing to convert, no feeds, or not even one layer can be converted within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """

    def choose(products: Sequence[Product], recording: Recording, say: Say) -> Scheme:
        grids = Grids(_importances(products, recording))
        for number, product in enumerate(products, start=1):
            say(f"choosing scales of layer {number} of {len(products)}")
            grids.find(stored_name(product), 4, product.weight_reader())

        def level(precision: str, bits: int) -> Level:
            def write(product: Product, writer: Writer) -> ir.Value:
                return write_blocks(product, bits, grids, writer, provider)

            return Level(precision, write)

        def convert(kept: Sequence[KeptLayer]) -> Pass:
            return quantize_int4({layer.name: layer.precision for layer in kept}, grids, provider)

        embeddings = (("int4", int4_embeddings(grids)), ("int8", int8_embeddings))
        return Scheme((level("int4", 4), level("int8", 8)), convert, embeddings)

    return quantize_within(model, feeds, max_error, choose, on_progress)


def _importances(products: Sequence[Product], recording: Recording) -> Mapping[str, Floats]:
    """Return the mean square of each channel that a product is given, float32 [K], by the name of its weight."""
    importances: dict[str, Floats] = {}
    for product in products:
        names = recording.inputs.get(product.name, ())
        squares = [
            np.square(rows).mean(axis=0) for name in names for rows in recording.activations[name].rows if len(rows)
        ]
        if squares:
            importances[stored_name(product)] = np.mean(squares, axis=0, dtype=np.float32)
    return importances
