"""Convert a model to int8, weights and activations, with a bound on its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from onnxtool.optimize.quantization.activations import Feeds, Recording
from onnxtool.optimize.quantization.adjustments import Choice, choose_adjustments
from onnxtool.optimize.quantization.arithmetic import PLAIN, Adjustment
from onnxtool.optimize.quantization.bounded import Quantized, Say, Scheme, quantize_within
from onnxtool.optimize.quantization.int8_embeddings import int8_embeddings
from onnxtool.optimize.quantization.int8_linear_layers import find_free_divisions, quantize_int8, write_adjusted
from onnxtool.optimize.quantization.linear_layers import Product
from onnxtool.optimize.quantization.switches import Level

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxtool.graph.writer import Writer
    from onnxtool.optimize.pipeline import Pass
    from onnxtool.optimize.report import KeptLayer

_INT8 = "int8"


def to_int8(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    static: bool = False,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> Quantized:
    """Convert the products of a float32 model with weights to int8, as far as `max_error` allows.

    What rounding takes from a product on average is given back in its bias. Channels whose outliers would take the grid
    from all others are scaled down in front of a product, where a run has nothing to compute for that. Where the error
    on `feeds` is not below `max_error` with a margin then, a multiplication scales them down in front of more and more
    products, and then layers stay in float32, those first that cost most error for their size.

    Args:
        model: an optimized float32 model; it stays as it is.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: see `quantize_within`; with None, channels are scaled down wherever it is worth its time.
        static: whether activations are rounded to ranges that come from `feeds`, rather than to those of each run.
        on_progress: is told what is being done.

    Raises:
        PassError: there is nothing to convert, no feeds, or not even one layer can be in int8 within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """

    def choose(products: Sequence[Product], recording: Recording, say: Say) -> Scheme:
        say("choosing scales")
        choices = choose_adjustments(products, recording, static=static, free_divisions=find_free_divisions(products))
        return _scheme(choices, bounded=max_error is not None)

    return quantize_within(model, feeds, max_error, choose, on_progress)


def _scheme(choices: Mapping[str, Choice], *, bounded: bool) -> Scheme:
    """Return how products are written: with a bound, divided only where the error needs it."""
    best = {name: choice.best for name, choice in choices.items()}
    free = {name: choice.free for name, choice in choices.items()} if bounded else best

    def level(adjustments: Mapping[str, Adjustment], label: str) -> Level:
        def write(product: Product, writer: Writer) -> ir.Value:
            return write_adjusted(product, adjustments.get(product.name, PLAIN), writer, label)

        return Level(_INT8, write)

    def convert(raised: Sequence[KeptLayer]) -> Pass:
        kept = frozenset(layer.name for layer in raised if layer.precision != _INT8)
        divided = {choices[layer.name].group for layer in raised if layer.name in choices}
        return quantize_int8(
            kept, {name: (best if choice.group in divided else free)[name] for name, choice in choices.items()}
        )

    levels = [level(free, "_free")]
    if any(free[name] is not best[name] for name in choices):
        levels.append(level(best, "_best"))
    return Scheme(tuple(levels), convert, ((_INT8, int8_embeddings),))
