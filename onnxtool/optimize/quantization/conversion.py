"""Convert a fused model to a lower precision, keeping nodes in float32 based on measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from onnxtool.errors import PassError
from onnxtool.graph.edit import tensor_of
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import (
    DISABLED_OPTIMIZERS_KEY,
    DTYPE_KEY,
    EXACT_PRODUCTS_KEY,
    REQUIRED,
    STEPS_KEY,
    TASK_KEY,
)
from onnxtool.optimize.options import (
    ANY_CPU,
    DYNAMIC,
    EIGHT_BITS,
    EXACT_CPUS,
    INT4_FP16,
    MIXED,
    NATIVE,
    STATIC,
    OptimizeOptions,
)
from onnxtool.optimize.pipeline import Context, Outcome, Pass, run_passes
from onnxtool.optimize.quantization.activations import Feeds, open_written
from onnxtool.optimize.quantization.adjustments import HEADROOM, NORMALIZED_HEADROOM
from onnxtool.optimize.quantization.bounded import QuantizationSetting, Quantized
from onnxtool.optimize.quantization.calibration import Calibration, make_calibration
from onnxtool.optimize.quantization.cpu_arithmetic import EXACT, figures_of
from onnxtool.optimize.quantization.error import measure_errors
from onnxtool.optimize.quantization.float16 import LEAST, beyond, measure_ranges, to_float16
from onnxtool.optimize.quantization.int4 import to_int4
from onnxtool.optimize.quantization.int8 import to_int8, unsigned_weights
from onnxtool.optimize.quantization.tokens import TokenPromise, predicts_tokens, promise_tokens
from onnxtool.optimize.report import PassResult, Quantization
from onnxtool.progress import tell
from onnxtool.runtime.adapters import with_each_adapter
from onnxtool.runtime.machine import available_cores
from onnxtool.runtime.providers import BF16, FP32, products_saturate

MAX_ERROR = 0.01
"""The default bound on the quantization error: rankings of texts hardly change below it."""


_OF_TEXT = ("text-generation", "text2text-generation")  # how tasks of files that generate begin
_DTYPES = {"fp16": "float16", "int8": "int8", "uint8": "uint8", "int4": "int4", INT4_FP16: "int4"}
# To convert, compare and time: at least, and for each weight on one core, as BERT-base and MiniLM took in int8.
_SECONDS = (2.0, 4.5e-7)
# Half of the range of float16: other texts may produce larger values than the calibration texts.
_LARGEST_IN_FLOAT16 = 65504.0 / 2


def expected_seconds(model: ir.Model) -> float:
    """Return how long a conversion of `model` takes here, by the number of its weights."""
    num_weights = sum(tensor_of(value).size for value in model.graph.initializers.values())
    return _SECONDS[0] + _SECONDS[1] * num_weights / available_cores()


@dataclass(frozen=True)
class Converted:
    """A converted model, ready to be written.

    Attributes:
        steps: the passes that converted and finished it; `results` has the result of each.
        quantization: its error and layers; None if nothing was quantized.
    """

    model: ir.Model
    precision: str
    steps: tuple[Pass, ...]
    results: tuple[PassResult, ...]
    quantization: Quantization | None


@dataclass(frozen=True)
class Conversion:
    """The context of a conversion.

    Attributes:
        options: the error bound, the calibration inputs, and the target CPU of int8.
        source: the file to optimize, with its tokenizer next to it.
        feeds: inputs of many shapes, for measuring the magnitude of values.
        folder: for temporary files.
        context: model type and sizes, and the provider.
        finishing: the passes that run after the conversion.
        disabled_optimizers: onnxruntime optimizers that a session must not run.
    """

    options: OptimizeOptions
    source: ModelFile
    feeds: Sequence[Feeds]
    folder: Path
    context: Context
    finishing: Sequence[Pass]
    disabled_optimizers: Sequence[str]

    @property
    def bound(self) -> float:
        """The upper bound on 1 - cosine."""
        return MAX_ERROR if self.options.max_error is None else self.options.max_error

    @property
    def cpu(self) -> str:
        """The target CPU of int8, one of `CPUS`."""
        return self.options.cpu or ANY_CPU

    @property
    def is_for_exact_cpus(self) -> bool:
        """Whether int8 is only for CPUs on which no product saturates."""
        return self.cpu in EXACT_CPUS or (self.cpu == NATIVE and not products_saturate())

    @cached_property
    def calibration(self) -> Calibration:
        """The inputs to calibrate on."""
        calibration = make_calibration(self.source.path, self.options.calibration, self.options.given)
        return replace(calibration, feeds=with_each_adapter(self.source, calibration.feeds))

    @cached_property
    def tokens(self) -> TokenPromise | None:
        """The greedy tokens that a quantized decoder has to share; None for other models.

        Raises:
            PassError: a share was asked for, and the file is none whose tokens can be compared.
        """
        wanted_share = self.options.equal_tokens
        share = 1.0 if wanted_share is None else wanted_share
        if not share:
            return None
        promise = (
            promise_tokens(self.source, self.calibration.held_out, share) if predicts_tokens(self.source) else None
        )
        if promise is None and wanted_share is not None:
            raise PassError(
                f"--equal_tokens is for decoders of text that give the logits of each position, and {self.source.path} "
                "is none",
                "leave it out: --max_error bounds the error",
            )
        return promise

    def convert(self, model: ir.Model, precision: str, activations: str = MIXED) -> Converted:
        """Convert the fused `model`, which may be changed in place, and record the precision in its metadata.

        Raises:
            PassError: it cannot be converted within `max_error`.
            InputError: the texts cannot be read, or there is no tokenizer for them.
        """
        steps, quantization = tuple(self.finishing), None
        if precision not in (FP32, BF16):  # which is float32 with other arithmetic
            seconds = expected_seconds(model)
            tell(f"converting to {precision}, in about {seconds:.0f} s by the number of weights")
            step, quantization = self._prepare(model, precision, activations)
            steps = (step, *steps)
        model, results = run_passes(model, steps, self.context, most_rounds=1)
        if precision == "fp16" and not results[0].num_changes:
            raise PassError(f"nothing can be converted to fp16: {results[0].note}", "leave --precision out")
        converted = Converted(model, precision, steps, results, quantization)
        self._describe(converted)
        return converted

    def _prepare(self, model: ir.Model, precision: str, activations: str) -> tuple[Pass, Quantization | None]:
        if precision == "fp16":
            return self._to_float16(model), None
        result = self._quantize(model, precision, activations)
        outcomes = [result.outcome]

        def apply(fused: ir.Model, _context: Context) -> Outcome:
            """Return the converted model the first time; the search for a faulty pass converts its models again."""
            return outcomes.pop() if outcomes else self._quantize(fused, precision, activations).outcome

        task = self.source.metadata.get(TASK_KEY, "")
        bound_alone = self.tokens is None and task.startswith(_OF_TEXT)
        uncounted = "greedy tokens are not compared with the input's: only the error is bounded" if bound_alone else ""
        notes = "; ".join(filter(None, (self.calibration.note, result.report.note, uncounted)))
        report = replace(result.report, num_texts=self.calibration.num_texts, note=notes)
        if precision in EIGHT_BITS:
            arithmetic = figures_of(result.errors, small_pairs=not self.is_for_exact_cpus)
            caveat = self._batch_effect(result.outcome.model) if activations == DYNAMIC else self._caveat(activations)
            note = "; ".join(note for note in (report.note, caveat) if note)
            report = replace(report, activations=activations, cpu=self.cpu, arithmetic=arithmetic, note=note)
        return Pass(precision, apply), report

    def _caveat(self, activations: str) -> str:
        """Return a note on the limits of the error of int8 on calibration inputs."""
        if activations not in (MIXED, STATIC):
            return ""
        scope, headroom = ("", HEADROOM) if activations == STATIC else (" behind normalizations", NORMALIZED_HEADROOM)
        return (
            f"ranges of activations{scope} are fixed at {headroom:g} times those on the calibration texts: a text "
            "whose activations exceed them has a larger error than this one, so calibrate on texts like those that the "
            "model will get"
        )

    def _batch_effect(self, model: ir.Model) -> str:
        """Return a note on answers that depend on their batch, measured on a text of the calibration."""
        note = "each range of activations is that of a whole batch, so that an answer depends on the texts beside it"
        batch = self.calibration.feeds[-1]  # the longest texts
        if not self.calibration.num_texts or len(next(iter(batch.values()))) < 2:
            return note
        session = open_written(model, self.folder)
        alone = {name: array[:1] for name, array in batch.items()}
        together = {name: array[:1] for name, array in session.run(batch).items()}
        error = measure_errors(session, [alone], [together]).max(initial=0.0)
        return f"{note}: by 1 - cosine {error:.2g}, for one text of the calibration alone and in its batch"

    def _quantize(self, model: ir.Model, precision: str, activations: str) -> Quantized:
        feeds, setting = self.calibration.feeds, QuantizationSetting(self.tokens, self.folder)
        if precision in EIGHT_BITS:
            exact = self.is_for_exact_cpus
            if exact:  # also for the sessions that measure it here
                model.metadata_props[EXACT_PRODUCTS_KEY] = REQUIRED
            result = to_int8(model, feeds, self.bound, activations=activations, exact=exact, setting=setting)
            return result if precision == "int8" else self._followed(model, result, unsigned_weights, precision)
        result = to_int4(
            model,
            feeds,
            self.bound,
            provider=self.context.provider,
            tables=self.options.embeddings or "int4",
            setting=setting,
        )
        if precision != INT4_FP16:
            return result
        return self._followed(model, result, self._to_float16(result.outcome.model), precision)

    def _to_float16(self, model: ir.Model) -> Pass:
        return to_float16(beyond(measure_ranges(model, self.feeds, self.folder), _LARGEST_IN_FLOAT16, LEAST))

    def _followed(self, model: ir.Model, quantized: Quantized, step: Pass, precision: str) -> Quantized:
        """Apply another pass to what was quantized, and measure the error of both against `model`.

        Raises:
            PassError: it exceeds the bound.
        """
        outcome, feeds = quantized.outcome, self.calibration.feeds
        followed = step.apply(outcome.model, self.context)
        original = open_written(model, self.folder)
        session = open_written(followed.model, self.folder)
        errors = measure_errors(session, feeds, [original.run(feed) for feed in feeds])
        tokens = None if self.tokens is None else self.tokens.count_steps(session)
        report = replace(quantized.report, error=float(errors.max(initial=0.0)), mean_error=float(errors.mean()))
        report = replace(report, tokens=tokens)
        if report.error > self.bound:
            raise PassError(
                f"the error in {precision} is {report.error:.2g}, and {self.bound:g} is allowed",
                "pass a larger --max_error, or another --precision",
            )
        if self.tokens is not None and tokens is not None:
            self.tokens.require(tokens, precision)
        notes = "; ".join(filter(None, (outcome.note, followed.note)))
        changes = outcome.num_changes + followed.num_changes
        return Quantized(Outcome(followed.model, changes, notes), report, {EXACT: report.error})

    def _describe(self, converted: Converted) -> None:
        """Record in the metadata the precision, and the optimizers that a session must not run."""
        properties = converted.model.metadata_props
        properties.pop(STEPS_KEY, None)  # stamped again with this step
        if converted.precision in _DTYPES:
            properties[DTYPE_KEY] = _DTYPES[converted.precision]
        properties.pop(DISABLED_OPTIMIZERS_KEY, None)
        if self.disabled_optimizers:
            properties[DISABLED_OPTIMIZERS_KEY] = ",".join(self.disabled_optimizers)
