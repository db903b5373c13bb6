"""Quantize a model within a bound on its error: layers stay in higher precision until it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.errors import PassError
from onnxtool.graph.shapes import find_shapes
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization.activations import Feeds, Recording, open_written, record
from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.quantization.fallback_layers import MARGIN, Trials, find_fallback_layers
from onnxtool.optimize.quantization.linear_layers import LinearLayer, find_linear_layers, unfuse_linear_layers
from onnxtool.optimize.quantization.switches import Level, open_switchable
from onnxtool.optimize.report import FallbackLayer

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Scheme:
    """How linear layers and embeddings are quantized.

    Attributes:
        levels: the levels of a layer below float32, the cheapest first. Two of the same precision differ in the time
            that they spend on a smaller error.
        layers: returns the pass that quantizes all layers, given those above the first level.
        embeddings: passes that quantize embeddings, with their precisions, the lowest first; the first one within the
            bound is taken.
    """

    levels: tuple[Level, ...]
    layers: Callable[[Sequence[FallbackLayer]], Pass]
    embeddings: tuple[tuple[str, Pass], ...]


@dataclass(frozen=True)
class Quantized:
    """A quantized model and its error.

    Attributes:
        outcome: the model, as the outcome of a pass.
        kept: the fallback layers, by error per weight, the largest first.
        num_layers: linear layers, those in `kept` among them.
        num_embeddings: lookups that read a quantized table.
        embedding_precision: of these tables; empty without any.
        error: the largest 1 - cosine of any row of an output, or of an output as a whole, on the calibration inputs.
        mean_error: the average over all of them.
        num_rows: how many rows and outputs were compared.
    """

    outcome: Outcome
    kept: tuple[FallbackLayer, ...]
    num_layers: int
    num_embeddings: int
    embedding_precision: str
    error: float
    mean_error: float
    num_rows: int


def quantize_within(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None,
    choose_scheme: Callable[[Sequence[LinearLayer], Recording, OnProgress], Scheme],
    on_progress: OnProgress,
) -> Quantized:
    """Quantize the linear layers of a float32 model by a scheme, within `max_error`.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: the most that 1 - cosine of any row of an output, or of an output as a whole, may be. None
            for no bound, with all layers at the lowest level.
        choose_scheme: returns the scheme for the layers of the model and their activations on `feeds`.
        on_progress: receives the current step.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """
    if not feeds:
        raise PassError("no calibration inputs", "pass texts to calibrate on")
    opened = model.clone()
    unfuse_linear_layers(opened, frozenset(), find_shapes(opened))
    layers, _ = find_linear_layers(opened)
    if not layers:
        raise PassError("no linear layer has a float32 weight to quantize", "the model has another precision already")
    with tempfile.TemporaryDirectory(prefix="onnxtool-quantize-") as name:
        folder = Path(name)
        on_progress("recording activations")
        recording = record(model, feeds, folder)
        scheme = choose_scheme(layers, recording, on_progress)
        measure = Measure(feeds, recording, folder)
        raised: tuple[FallbackLayer, ...] = ()
        on_progress("measuring the error")
        trial = _first_trial(model, scheme, measure)
        if max_error is not None and trial.error > MARGIN * max_error:
            del trial
            switchable = open_switchable(model, scheme.levels, folder)
            raised = find_fallback_layers(Trials(switchable, feeds, recording.outputs), max_error, on_progress)
            del switchable  # it holds every weight at every level
            on_progress("measuring the error")
            trial = _best_trial(model, scheme, raised, measure, max_error)
    precision = scheme.levels[0].precision
    kept = tuple(layer for layer in raised if layer.precision != precision)
    if max_error is not None and trial.error > max_error:
        raise PassError(
            f"the error in {precision} is {trial.error:.2g} with {len(kept)} layers in higher precision, and "
            f"{max_error:g} is allowed",
            "pass a larger --max_error",
        )
    return Quantized(
        trial.outcome,
        kept,
        len({layer.name for layer in layers}),
        trial.num_embeddings,
        trial.embedding_precision,
        trial.error,
        float(trial.errors.mean()),
        len(trial.errors),
    )


@dataclass(frozen=True)
class _Trial:
    """A converted model and its errors."""

    outcome: Outcome
    num_embeddings: int
    embedding_precision: str
    errors: NDArray[np.float64]

    @property
    def error(self) -> float:
        return float(self.errors.max(initial=0.0))


@dataclass(frozen=True)
class Measure:
    """The inputs of a quantized model and its reference outputs."""

    feeds: Sequence[Feeds]
    recording: Recording
    folder: Path

    def errors(self, model: ir.Model) -> NDArray[np.float64]:
        """Return the errors of all outputs, measured on the model as a file."""
        session = open_written(model, self.folder)
        return np.concatenate(
            [
                output_errors(session.run(given), expected, padding_mask(given))
                for given, expected in zip(self.feeds, self.recording.outputs, strict=True)
            ]
        )


def _first_trial(model: ir.Model, scheme: Scheme, measure: Measure) -> _Trial:
    """Quantize a copy of `model` with everything at the lowest level."""
    precision, embeddings = scheme.embeddings[0]
    return _convert(model, (scheme.layers(()), embeddings), precision, measure)


def _best_trial(
    model: ir.Model, scheme: Scheme, raised: Sequence[FallbackLayer], measure: Measure, max_error: float
) -> _Trial:
    """Quantize copies of `model`, with embeddings in the lowest precision first, until the error is low enough."""
    for precision, embeddings in scheme.embeddings:
        trial = _convert(model, (scheme.layers(raised), embeddings), precision, measure)
        if not trial.num_embeddings or trial.error <= MARGIN * max_error:
            return trial
    return _convert(model, (scheme.layers(raised),), "", measure)


def _convert(model: ir.Model, passes: Sequence[Pass], embedding_precision: str, measure: Measure) -> _Trial:
    """Apply `passes`, the first of which quantizes layers, to a copy of `model`, and measure the errors."""
    converted = model.clone()
    outcomes = [step.apply(converted, Context()) for step in passes]
    num_embeddings = sum(outcome.num_changes for outcome in outcomes[1:])
    notes = "; ".join(outcome.note for outcome in outcomes if outcome.note)
    total = Outcome(converted, sum(outcome.num_changes for outcome in outcomes), notes)
    return _Trial(total, num_embeddings, embedding_precision if num_embeddings else "", measure.errors(converted))
