"""Convert a model to int8 with a bound on its error, which decides how many layers stay in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxtool.errors import PassError
from onnxtool.optimize.passes.int8_embeddings import int8_embeddings
from onnxtool.optimize.passes.int8_products import quantize_int8
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.precision.activations import Feeds, Recording, open_written, record
from onnxtool.optimize.precision.adjustments import choose_adjustments
from onnxtool.optimize.precision.kept_layers import MARGIN, KeptLayer, Trials, find_kept_layers
from onnxtool.optimize.precision.products import find_products, open_attention
from onnxtool.optimize.precision.quantization_error import output_errors, padding_mask
from onnxtool.optimize.precision.switches import open_switchable
from onnxtool.optimize.shapes import find_shapes

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Int8Result:
    """A model in int8, and what is known of it.

    Attributes:
        outcome: the model and what was done to it, as of a pass.
        kept: the layers that stay in float32, those first that cost most error for their size.
        num_layers: products with weights, those in `kept` among them.
        num_embeddings: lookups of embeddings that read an int8 table.
        error: the largest 1 - cosine of any row of an output, or of an output as a whole, on the calibration inputs.
        mean_error: the average over all of them.
        num_rows: how many rows and outputs were compared.
    """

    outcome: Outcome
    kept: tuple[KeptLayer, ...]
    num_layers: int
    num_embeddings: int
    error: float
    mean_error: float
    num_rows: int


def to_int8(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None = None,
    *,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> Int8Result:
    """Convert the products of a float32 model with weights to int8, as far as `max_error` allows.

    Channels whose outliers would take the grid from all others are scaled down in front of a product, and what rounding
    takes from a product on average is given back in its bias; both come from `feeds`. Layers stay in float32 until the
    error on `feeds` is below `max_error` with a margin, those first that cost most error for their size.

    Args:
        model: an optimized float32 model; it stays as it is.
        feeds: calibration inputs, each input name to array, on which the error is measured.
        max_error: the most that 1 - cosine of any row of an output, or of an output as a whole, may be. None for
            whatever comes out with all layers in int8.
        on_progress: is told what is being done.

    Raises:
        PassError: there is nothing to convert, no feeds, or not even one layer can be in int8 within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """
    if not feeds:
        raise PassError("no calibration inputs", "pass texts to calibrate on")
    opened = model.clone()
    open_attention(opened, frozenset(), find_shapes(opened))
    products, _ = find_products(opened)
    if not products:
        raise PassError("no product with a float32 weight to quantize", "the model has another precision already")
    with tempfile.TemporaryDirectory(prefix="onnxtool-int8-") as name:
        folder = Path(name)
        on_progress("recording activations")
        recording = record(model, feeds, folder)
        on_progress("choosing scales")
        adjustments = choose_adjustments(products, recording)
        kept: tuple[KeptLayer, ...] = ()
        if max_error is not None:
            switchable = open_switchable(model, adjustments, folder)
            kept = find_kept_layers(Trials(switchable, feeds, recording.outputs), max_error, on_progress)
            del switchable  # which holds every weight twice
        on_progress("measuring the error")
        passes = (quantize_int8(frozenset(layer.name for layer in kept), adjustments), int8_embeddings)
        trial = _convert(model, passes, feeds, recording, folder)
        if max_error is not None and trial.num_embeddings and trial.error > MARGIN * max_error:
            trial = _convert(model, passes[:1], feeds, recording, folder)
    if max_error is not None and trial.error > max_error:
        raise PassError(
            f"the error in int8 is {trial.error:.2g} with {len(kept)} layers in float32, and {max_error:g} is allowed",
            "pass a larger --max_error",
        )
    num_layers = len({product.name for product in products})
    mean_error = float(trial.errors.mean())
    return Int8Result(trial.outcome, kept, num_layers, trial.num_embeddings, trial.error, mean_error, len(trial.errors))


@dataclass(frozen=True)
class _Trial:
    """A converted model and its errors."""

    outcome: Outcome
    num_embeddings: int
    errors: NDArray[np.float64]

    @property
    def error(self) -> float:
        return float(self.errors.max(initial=0.0))


def _convert(
    model: ir.Model, passes: Sequence[Pass], feeds: Sequence[Feeds], recording: Recording, folder: Path
) -> _Trial:
    """Apply `passes` to a copy of `model`, and measure what comes out as a file."""
    converted = model.clone()
    outcomes = [step.apply(converted, Context()) for step in passes]
    session = open_written(converted, folder)
    errors = [
        output_errors(session.run(given), expected, padding_mask(given))
        for given, expected in zip(feeds, recording.outputs, strict=True)
    ]
    notes = "; ".join(outcome.note for outcome in outcomes if outcome.note)
    total = Outcome(converted, sum(outcome.num_changes for outcome in outcomes), notes)
    return _Trial(total, sum(outcome.num_changes for outcome in outcomes[1:]), np.concatenate(errors))
