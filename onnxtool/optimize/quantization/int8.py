"""Quantize a model to int8, weights and activations, within a bound on its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from onnxtool.graph.writer import Writer
from onnxtool.optimize.options import MIXED, PER_ROW
from onnxtool.optimize.pipeline import Pass
from onnxtool.optimize.quantization.activations import Feeds, Recording
from onnxtool.optimize.quantization.adjustments import Choice, choose_adjustments
from onnxtool.optimize.quantization.arithmetic import PLAIN, Adjustment, RowGrid
from onnxtool.optimize.quantization.bounded import QuantizationConfig, Quantized, quantize_within
from onnxtool.optimize.quantization.int8_embeddings import int8_embeddings
from onnxtool.optimize.quantization.int8_linear_layers import (
    find_free_smoothing,
    quantize_int8,
    require_opset,
    write_adjusted,
)
from onnxtool.optimize.quantization.linear_layers import LinearLayer
from onnxtool.optimize.quantization.switches import Level
from onnxtool.optimize.report import FallbackLayer
from onnxtool.progress import counted

_INT8 = "int8"


def to_int8(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    activations: str = MIXED,
    exact: bool = False,
    folder: Path | None = None,
) -> Quantized:
    """Quantize the linear layers of a float32 model to int8, within `max_error`.

    Weights are rounded so that the errors of channels make up for each other on `feeds`, and the average loss by
    rounding is added to the bias. Channels with outliers are scaled down in front of a layer where that costs no node.
    Where the error on `feeds` is then not below `max_error` with a margin, a Mul scales them down in front of more and
    more layers, and then layers stay in float32, those with the largest error per weight first.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: see `quantize_within`; with None, channels are scaled down wherever that is worth its time.
        activations: how these are rounded in a run: `per_row`, with a scale for each; `dynamic`, with the range of all
            of the run; `static`, with ranges that come from `feeds`; or `mixed`, `static` behind normalizations where
            that costs little, and `per_row` elsewhere.
        exact: whether the result is only for CPUs on which no product of uint8 and int8 saturates. Without it, products
            are exact on every CPU, and weights have slightly coarser steps.
        folder: see `quantize_within`.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """
    require_opset(model)

    def choose(layers: Sequence[LinearLayer], recording: Recording) -> QuantizationConfig:
        choices = choose_adjustments(
            layers, recording, activations, exact=exact, free_smoothing=find_free_smoothing(layers)
        )
        # Rows for themselves also where nothing is known about them.
        others = Adjustment(activations=RowGrid.middle()) if activations in (MIXED, PER_ROW) else PLAIN
        defaults = {layer.name: others for layer in layers}
        return _config(choices, defaults, is_bounded=max_error is not None, is_exact=exact)

    return quantize_within(model, feeds, max_error, choose, folder)


def _config(
    choices: Mapping[str, Choice], defaults: Mapping[str, Adjustment], *, is_bounded: bool, is_exact: bool
) -> QuantizationConfig:
    """Return how layers are quantized: with a bound, activations are divided only where the error requires it."""

    def adjustment(name: str, *, is_free: bool) -> Adjustment:
        choice = choices.get(name)
        if choice is None:
            return defaults[name]
        return (choice.free if is_free and is_bounded else choice.best).by_name[name]

    def level(label: str, *, is_free: bool) -> Level:
        def write(layer: LinearLayer, writer: Writer) -> ir.Value:
            return write_adjusted(layer, adjustment(layer.name, is_free=is_free), writer, label, exact=is_exact)

        return Level(_INT8, write)

    def convert(fallbacks: Sequence[FallbackLayer]) -> Pass:
        exact = frozenset(layer.name for layer in fallbacks if layer.precision != _INT8)
        divided = {choices[layer.name].group for layer in fallbacks if layer.name in choices}
        adjustments = {
            name: adjustment(name, is_free=name not in choices or choices[name].group not in divided)
            for name in counted([name for name in defaults if name not in exact], "rounding layer")
        }
        return quantize_int8(exact, adjustments, exact=is_exact)

    levels = [level("_free", is_free=True)]
    if is_bounded and any(choice.free is not choice.best for choice in choices.values()):
        levels.append(level("_best", is_free=False))
    return QuantizationConfig(tuple(levels), convert, ((_INT8, int8_embeddings),))
