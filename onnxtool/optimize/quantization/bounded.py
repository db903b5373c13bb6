"""Quantize a model within a bound on its error: layers stay in higher precision until it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from onnxtool.errors import PassError
from onnxtool.graph.shapes import find_shapes
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization.activations import Feeds, Recording, open_written, record
from onnxtool.optimize.quantization.cpu_arithmetic import by_arithmetic
from onnxtool.optimize.quantization.error import measure_errors
from onnxtool.optimize.quantization.fallback_layers import MARGIN, Level, find_fallback_layers, open_switchable
from onnxtool.optimize.quantization.linear_layers import LinearLayer, find_linear_layers, unfuse_linear_layers
from onnxtool.optimize.quantization.written import nothing_to_quantize
from onnxtool.optimize.report import FallbackLayer, Quantization


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization of linear layers and embeddings.

    Attributes:
        levels: the levels of a layer below float32, cheapest first. Levels of the same precision trade time for a
            smaller error.
        layers: returns the pass that quantizes all layers, given the layers above the first level.
        embeddings: passes that quantize embeddings, with their precisions, lowest first; the first one within the bound
            is used.
    """

    levels: tuple[Level, ...]
    layers: Callable[[Sequence[FallbackLayer]], Pass]
    embeddings: tuple[tuple[str, Pass], ...]


@dataclass(frozen=True)
class Quantized:
    """A quantized model and its error.

    Attributes:
        outcome: the model, as the outcome of a pass.
        report: its layers, and the errors on the calibration inputs, under the worst arithmetic.
        errors: the largest error under each arithmetic that was computed; see `by_arithmetic`.
    """

    outcome: Outcome
    report: Quantization
    errors: Mapping[str, float]


def quantize_within(
    model: ir.Model,
    feeds: Sequence[Feeds],
    max_error: float | None,
    configure: Callable[[Sequence[LinearLayer], Recording], QuantizationConfig],
    folder: Path | None = None,
) -> Quantized:
    """Quantize the linear layers of a float32 model by a configuration, within `max_error`.

    Args:
        model: an optimized float32 model; it is not changed.
        feeds: calibration inputs, arrays by input name, on which the error is measured.
        max_error: upper bound on 1 - cosine of any row of an output, or of an output as a whole. None for no bound,
            with all layers at the lowest level.
        configure: returns the configuration for the layers of the model and their activations on `feeds`.
        folder: for temporary files as large as the model; None for the system's.

    Raises:
        PassError: there is nothing to quantize, no feeds, or no layer can be quantized within `max_error`.
        SessionError: onnxruntime cannot run the model on `feeds`.
    """
    if not feeds:
        raise PassError("no calibration inputs", "pass texts to calibrate on")
    opened = model.clone()
    unfuse_linear_layers(opened, frozenset(), find_shapes(opened))
    layers, refused = find_linear_layers(opened)
    if not layers:
        raise nothing_to_quantize(opened, refused)
    with tempfile.TemporaryDirectory(prefix="onnxtool-quantize-", dir=folder) as name:
        folder = Path(name)
        recording = record(model, feeds, folder)
        config = configure(layers, recording)
        precision = config.levels[0].precision

        def quantize(fallbacks: Sequence[FallbackLayer], embeddings: tuple[str, Pass] | None) -> Quantized:
            """Quantize a copy of the model, with `embeddings` as well, and measure the errors of the written file."""
            converted = model.clone()
            passes = [config.layers(fallbacks), *(() if embeddings is None else embeddings[1:])]
            outcomes = [step.apply(converted, Context()) for step in passes]
            num_embeddings = sum(outcome.num_changes for outcome in outcomes[1:])
            measured = {
                name: measure_errors(open_written(one, folder), feeds, recording.outputs)
                for name, one in by_arithmetic(converted).items()
            }
            errors = {name: float(found.max(initial=0.0)) for name, found in measured.items()}
            worst = max(errors, key=lambda name: errors[name])
            notes = "; ".join(outcome.note for outcome in outcomes if outcome.note)
            return Quantized(
                Outcome(converted, sum(outcome.num_changes for outcome in outcomes), notes),
                Quantization(
                    precision=precision,
                    num_layers=len({layer.name for layer in layers}),
                    kept=tuple(layer for layer in fallbacks if layer.precision != precision),
                    num_embeddings=num_embeddings,
                    embedding_precision=embeddings[0] if embeddings and num_embeddings else "",
                    error=errors[worst],
                    mean_error=float(measured[worst].mean()),
                ),
                errors,
            )

        def search(arithmetic: str, bound: float) -> Quantized:
            """Return the smallest result within the bound, of one for each precision of embeddings.

            A table is often larger than all layers together, so that it comes before them.
            """
            found: list[Quantized] = []
            for embeddings in (*config.embeddings, None):
                base = model.clone()
                if embeddings is None:
                    if found:
                        break
                elif not embeddings[1].apply(base, Context()).num_changes:
                    continue
                switchable = open_switchable(base, config.levels, folder, feeds, recording.outputs, arithmetic)
                try:
                    if embeddings and max(switchable.error({}, place) for place in range(len(feeds))) > MARGIN * bound:
                        continue
                    fallbacks = find_fallback_layers(switchable, bound)
                except PassError:
                    if embeddings is None:
                        raise
                    continue
                finally:
                    del switchable  # it contains every weight at every level
                result = quantize(fallbacks, embeddings)
                if embeddings is None or result.report.error <= bound:
                    found.append(result)
                if not result.report.kept:
                    break
            return min(found, key=_size_bytes)

        result = quantize((), config.embeddings[0])
        if max_error is not None and result.report.error > MARGIN * max_error:
            errors, has_tables = result.errors, bool(result.report.num_embeddings)
            del result
            # The arithmetic with the largest error over all layers decides the fallback layers; the others rarely
            # matter.
            for arithmetic in sorted(errors, key=lambda name: -errors[name]):
                result = search(arithmetic, max_error)
                if result.report.error <= max_error:
                    break
            if has_tables and not result.report.num_embeddings:
                note = f"embeddings stay in float32, because in {config.embeddings[-1][0]} the error exceeds the bound"
                result = replace(result, report=replace(result.report, note=note))
    report = result.report
    if max_error is not None and report.error > max_error:
        raise PassError(
            f"the error in {precision} is {report.error:.2g} with {len(report.kept)} layers in higher precision, and "
            f"{max_error:g} is allowed",
            "pass a larger --max_error",
        )
    return result


def _size_bytes(quantized: Quantized) -> int:
    held = (value.const_value for value in quantized.outcome.model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in held if tensor is not None)
