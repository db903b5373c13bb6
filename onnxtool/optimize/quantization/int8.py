"""Quantize a model to int8, weights and activations, within a bound on its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Pass
from onnxtool.optimize.quantization.activations import Feeds, Recording
from onnxtool.optimize.quantization.adjustments import Choice, choose_adjustments
from onnxtool.optimize.quantization.arithmetic import PLAIN, Adjustment
from onnxtool.optimize.quantization.bounded import OnProgress, QuantizationConfig, Quantized, quantize_within
from onnxtool.optimize.quantization.int8_embeddings import int8_embeddings
from onnxtool.optimize.quantization.int8_linear_layers import find_free_smoothing, quantize_int8, write_adjusted
from onnxtool.optimize.quantization.linear_layers import LinearLayer
from onnxtool.optimize.quantization.switches import Level
from onnxtool.optimize.report import FallbackLayer

_INT8 = "int8"


def to_int8(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    static: bool = False,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> Quantized:
    """Quantize the linear layers of a float32 model to int8, within `max_error`.

    The average loss by rounding is added to the bias. Channels with outliers are scaled down in front of a layer where
    that costs no node. Where the error on `feeds` is then not below `max_error` with a margin, a Mul scales them down
    in front of more and more layers, and then layers stay in float32, those with the largest error per weight first.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: see `quantize_within`; with None, channels are scaled down wherever that is worth its time.
        static: whether activations are rounded to ranges that come from `feeds`, rather than to those of each run.
        on_progress: receives the current step.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """

    def choose(layers: Sequence[LinearLayer], recording: Recording, say: OnProgress) -> QuantizationConfig:
        say("choosing scales")
        choices = choose_adjustments(layers, recording, static=static, free_smoothing=find_free_smoothing(layers))
        return _config(choices, bounded=max_error is not None)

    return quantize_within(model, feeds, max_error, choose, on_progress)


def _config(choices: Mapping[str, Choice], *, bounded: bool) -> QuantizationConfig:
    """Return how layers are quantized: with a bound, activations are divided only where the error requires it."""
    best = {name: choice.best for name, choice in choices.items()}
    free = {name: choice.free for name, choice in choices.items()} if bounded else best

    def level(adjustments: Mapping[str, Adjustment], label: str) -> Level:
        def write(layer: LinearLayer, writer: Writer) -> ir.Value:
            return write_adjusted(layer, adjustments.get(layer.name, PLAIN), writer, label)

        return Level(_INT8, write)

    def convert(fallbacks: Sequence[FallbackLayer]) -> Pass:
        exact = frozenset(layer.name for layer in fallbacks if layer.precision != _INT8)
        divided = {choices[layer.name].group for layer in fallbacks if layer.name in choices}
        return quantize_int8(
            exact, {name: (best if choice.group in divided else free)[name] for name, choice in choices.items()}
        )

    levels = [level(free, "_free")]
    if any(free[name] is not best[name] for name in choices):
        levels.append(level(best, "_best"))
    return QuantizationConfig(tuple(levels), convert, ((_INT8, int8_embeddings),))
