"""Quantize weights to 4 bits within a bound on the error; layers get 8 bits or stay in float32 for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Pass
from onnxtool.optimize.quantization.activations import Activations, Feeds, Recording
from onnxtool.optimize.quantization.arithmetic import Floats
from onnxtool.optimize.quantization.blocks import Grids
from onnxtool.optimize.quantization.bounded import QuantizationConfig, Quantized, quantize_within
from onnxtool.optimize.quantization.int4_embeddings import int4_embeddings
from onnxtool.optimize.quantization.int4_linear_layers import quantize_int4, write_blocks
from onnxtool.optimize.quantization.int8_embeddings import int8_embeddings
from onnxtool.optimize.quantization.linear_layers import LinearLayer
from onnxtool.optimize.quantization.switches import Level
from onnxtool.optimize.report import FallbackLayer
from onnxtool.progress import counted


def to_int4(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    provider: str = "cpu",
    folder: Path | None = None,
) -> Quantized:
    """Quantize the weights of linear layers of a float32 model to 4 bits in blocks, within `max_error`.

    Activations and sums stay floating point. The error of a weight is weighted by the size of its channel on `feeds`,
    and what a channel adds too much is taken away by others.
    Layers get 8 bits until the error on `feeds` is below `max_error` with a margin, those with the largest error per
    weight first; where that is not enough for all layers together, they stay in float32, in the same order.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: see `quantize_within`.
        provider: the execution provider of the result.
        folder: see `quantize_within`.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """

    def choose(layers: Sequence[LinearLayer], recording: Recording) -> QuantizationConfig:
        grids = Grids(_activations(layers, recording))
        for layer in counted(layers, "choosing scales of layer"):
            grids.find(layer.stored_name, 4, layer.weight_reader())

        def level(precision: str, bits: int) -> Level:
            def write(layer: LinearLayer, writer: Writer) -> ir.Value:
                return write_blocks(layer, bits, grids, writer, provider)

            return Level(precision, write)

        def convert(fallbacks: Sequence[FallbackLayer]) -> Pass:
            return quantize_int4({layer.name: layer.precision for layer in fallbacks}, grids, provider)

        embeddings = (("int4", int4_embeddings(grids)), ("int8", int8_embeddings))
        return QuantizationConfig((level("int4", 4), level("int8", 8)), convert, embeddings)

    return quantize_within(model, feeds, max_error, choose, folder)


def _activations(layers: Sequence[LinearLayer], recording: Recording) -> Mapping[str, Callable[[], Floats]]:
    """Return what gives rows of the input of each layer, float32 [T, K], by the name of its weight."""

    def rows(names: Sequence[str]) -> Floats:
        return np.concatenate(Activations.joined([recording.activations[name] for name in names]).rows)

    return {
        layer.stored_name: partial(rows, recording.inputs[layer.name])
        for layer in layers
        if any(recording.activations[name].rows for name in recording.inputs[layer.name])
    }
