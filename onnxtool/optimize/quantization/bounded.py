"""Convert a model to fewer bits with a bound on its error, which decides how many layers stay in higher precision."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxtool.errors import PassError
from onnxtool.graph.shapes import find_shapes
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization.activations import Feeds, Recording, open_written, record
from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.quantization.fallback_layers import MARGIN, Trials, find_kept_layers
from onnxtool.optimize.quantization.linear_layers import Product, find_products, open_products
from onnxtool.optimize.quantization.switches import Level, open_switchable
from onnxtool.optimize.report import KeptLayer

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scheme:
    """How products and embeddings of a model are written in fewer bits.

    Attributes:
        levels: how a product can be written below float32, the cheapest first. Two of the same precision differ in what
            they take to be more exact.
        products: returns the pass that converts all products, those at a higher level than the first as that says.
        embeddings: passes that convert embeddings with the precision that each leads to, the lowest first; that one is
            taken which the error allows.
    """

    levels: tuple[Level, ...]
    products: Callable[[Sequence[KeptLayer]], Pass]
    embeddings: tuple[tuple[str, Pass], ...]


@dataclass(frozen=True)
class Quantized:
    """A model in fewer bits, and what is known of it.

    Attributes:
        outcome: the model and what was done to it, as of a pass.
        kept: the layers in higher precision, those first that cost most error for their size.
        num_layers: products with weights, those in `kept` among them.
        num_embeddings: lookups of embeddings that read a quantized table.
        embedding_precision: of these; empty where there are none.
        error: the largest 1 - cosine of any row of an output, or of an output as a whole, on the calibration inputs.
        mean_error: the average over all of them.
        num_rows: how many rows and outputs were compared.
    """

    outcome: Outcome
    kept: tuple[KeptLayer, ...]
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
    choose_scheme: Callable[[Sequence[Product], Recording, Say], Scheme],
    on_progress: Say,
) -> Quantized:
    """Convert the products of a float32 model with weights by a scheme, as far as `max_error` allows.

    Args:
        model: an optimized float32 model; it stays as it is.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: the most that 1 - cosine of any row of an output, or of an output as a whole, may be. None for
            whatever comes out with all layers at the lowest level.
        choose_scheme: returns the scheme for the products of the model and what they are given on `feeds`.
        on_progress: is told what is being done.

    Raises:
        PassError: there is nothing to convert, no feeds, or not even one layer can be converted within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """
    if not feeds:
        raise PassError("no calibration inputs", "pass texts to calibrate on")
    opened = model.clone()
    open_products(opened, frozenset(), find_shapes(opened))
    products, _ = find_products(opened)
    if not products:
        raise PassError("no product with a float32 weight to quantize", "the model has another precision already")
    with tempfile.TemporaryDirectory(prefix="onnxtool-quantize-") as name:
        folder = Path(name)
        on_progress("recording activations")
        recording = record(model, feeds, folder)
        scheme = choose_scheme(products, recording, on_progress)
        measure = Measure(feeds, recording, folder)
        raised: tuple[KeptLayer, ...] = ()
        on_progress("measuring the error")
        trial = _first_trial(model, scheme, measure)
        if max_error is not None and trial.error > MARGIN * max_error:
            del trial
            switchable = open_switchable(model, scheme.levels, folder)
            raised = find_kept_layers(Trials(switchable, feeds, recording.outputs), max_error, on_progress)
            del switchable  # which holds every weight at every level
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
        len({product.name for product in products}),
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
    """What a converted model is run on and compared with."""

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
    """Convert a copy of `model` with everything as cheap as it can be."""
    precision, embeddings = scheme.embeddings[0]
    return _convert(model, (scheme.products(()), embeddings), precision, measure)


def _best_trial(
    model: ir.Model, scheme: Scheme, raised: Sequence[KeptLayer], measure: Measure, max_error: float
) -> _Trial:
    """Convert copies of `model`, with embeddings in the lowest precision first, until the error has its margin."""
    for precision, embeddings in scheme.embeddings:
        trial = _convert(model, (scheme.products(raised), embeddings), precision, measure)
        if not trial.num_embeddings or trial.error <= MARGIN * max_error:
            return trial
    return _convert(model, (scheme.products(raised),), "", measure)


def _convert(model: ir.Model, passes: Sequence[Pass], embedding_precision: str, measure: Measure) -> _Trial:
    """Apply `passes`, the first of which converts products, to a copy of `model`, and measure what comes out."""
    converted = model.clone()
    outcomes = [step.apply(converted, Context()) for step in passes]
    num_embeddings = sum(outcome.num_changes for outcome in outcomes[1:])
    notes = "; ".join(outcome.note for outcome in outcomes if outcome.note)
    total = Outcome(converted, sum(outcome.num_changes for outcome in outcomes), notes)
    return _Trial(total, num_embeddings, embedding_precision if num_embeddings else "", measure.errors(converted))
