"""Convert a model to int8, weights and activations, with a bound on its error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from onnxtool.optimize.passes.int8_embeddings import int8_embeddings
from onnxtool.optimize.passes.int8_products import quantize_int8, write_adjusted
from onnxtool.optimize.precision.activations import Feeds, Recording
from onnxtool.optimize.precision.adjustments import choose_adjustments
from onnxtool.optimize.precision.bounded import Quantized, Say, Scheme, quantize_within
from onnxtool.optimize.precision.products import Product
from onnxtool.optimize.precision.quantization import PLAIN
from onnxtool.optimize.precision.switches import Level

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.optimize.matching import Editor
    from onnxtool.optimize.pipeline import Pass
    from onnxtool.reports import KeptLayer


def to_int8(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    static: bool = False,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> Quantized:
    """Convert the products of a float32 model with weights to int8, as far as `max_error` allows.

    Channels whose outliers would take the grid from all others are scaled down in front of a product, and what rounding
    takes from a product on average is given back in its bias; both come from `feeds`. Layers stay in float32 until the
    error on `feeds` is below `max_error` with a margin, those first that cost most error for their size.

    Args:
        model: an optimized float32 model; it stays as it is.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: see `quantize_within`.
        static: whether activations are rounded to ranges that come from `feeds`, rather than to those of each run.
        on_progress: is told what is being done.

    Raises:
        PassError: there is nothing to convert, no feeds, or not even one layer can be in int8 within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """

    def choose(products: Sequence[Product], recording: Recording, say: Say) -> Scheme:
        say("choosing scales")
        adjustments = choose_adjustments(products, recording, static=static)

        def write(product: Product, editor: Editor) -> ir.Value:
            return write_adjusted(product, adjustments.get(product.name, PLAIN), editor)

        def convert(kept: Sequence[KeptLayer]) -> Pass:
            return quantize_int8(frozenset(layer.name for layer in kept), adjustments)

        return Scheme((Level("int8", write),), convert, (("int8", int8_embeddings),))

    return quantize_within(model, feeds, max_error, choose, on_progress)
