"""Run the passes on an input file, convert, write the result and verify it, without the passes that break it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from onnxtool.checkpoint.pruning import Pruning
from onnxtool.errors import FusionError, PassError
from onnxtool.model_file import MAX_INLINE_BYTES, NONE_INLINE, ModelFile, Staging, save_model, scratch_file
from onnxtool.model_file.metadata import PRUNE_KEY
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.kept import read_kept
from onnxtool.optimize.options import INT4_FP16, MIXED, QUANTIZED, OptimizeOptions, computing_in
from onnxtool.optimize.pipeline import MOST_ROUNDS, FailedPassError, Pass, run_passes
from onnxtool.optimize.presets import DISABLED_OPTIMIZERS, FINISHING
from onnxtool.optimize.pruned_output import PrunedOutput, take_off
from onnxtool.optimize.quantization.candidates import Judge, Judgement, choose
from onnxtool.optimize.quantization.conversion import MAX_ERROR, Conversion, Converted
from onnxtool.optimize.quantization.cpu_arithmetic import require_small_pairs
from onnxtool.optimize.quantization.error import measure_errors
from onnxtool.optimize.quantization.float16 import require_range
from onnxtool.optimize.quantization.ranking import measure_ranking
from onnxtool.optimize.quantization.written import count_written, require_weights
from onnxtool.optimize.report import (
    Candidate,
    FusionCount,
    GreedyTokens,
    KeptNode,
    OptimizeReport,
    PassResult,
    Quantization,
)
from onnxtool.optimize.verification import FaultyPassError, Reference, Verifier
from onnxtool.progress import tell
from onnxtool.runtime.comparison import failure
from onnxtool.runtime.difference import TOLERANCES, Tolerance
from onnxtool.runtime.machine import release_freed_memory
from onnxtool.runtime.probation import death_on
from onnxtool.runtime.providers import CPU, FP32, ExecutionProvider, runtime_version
from onnxtool.runtime.session import SAME, open_alike, prove_elsewhere
from onnxtool.runtime.sizes import set_files
from onnxtool.runtime.timing import Stopwatch
from onnxtool.summary import FUSED_OPERATORS, summarize_file
from onnxtool.summary.figures import Stats
from onnxtool.verification import Verification

_LOGGER = logging.getLogger(__name__)
_MOST_LEFT_OUT = 3  # if more passes fail, the graph is unlike the ones that they were made for
_RANDOM_IDS = 3.0  # the factor by which the error on random ids may exceed the error on texts


@dataclass(frozen=True)
class Attempts:
    """The attempts at one output, each without the passes that broke the one before.

    Attributes:
        before: figures of the input file, which has `attentions` attentions.
        reference: the reference for the result; None if it is not verified.
        judge: rejects candidates; None for no judge.
    """

    options: OptimizeOptions
    source: ModelFile
    before: Stats
    attentions: int
    staging: Staging
    reference: Reference | None
    stopwatch: Stopwatch
    judge: Judge | None = None

    def write(self, passes: Sequence[Pass], conversion: Conversion) -> tuple[ModelFile, OptimizeReport]:
        """Write the output; if one pass breaks it or fails, write it again without that pass.

        Raises:
            VerificationError: the outputs differ because of the conversion, of several passes together, or of more
                passes than can be trusted; or `require_fusion` asks for all of them.
        """
        left_out: list[PassResult] = []
        while True:
            try:
                result, report = self._attempt(passes, conversion)
            except (FaultyPassError, FailedPassError) as error:
                name = error.name
                known = {step.name for step in (*passes, *conversion.finishing)}
                if self.options.require_fusion or name not in known or len(left_out) == _MOST_LEFT_OUT:
                    raise
                left_out.append(PassResult(name, 0, 0.0, f"left out: {error.why}", left_out=True))
            else:
                return result, replace(report, passes=(*report.passes, *left_out))
            _LOGGER.info("pass %s is left out: %s", name, left_out[-1].note)
            tell(f"starting again without {name}")
            passes = [step for step in passes if step.name != name]
            finishing = [step for step in conversion.finishing if step.name != name]
            if len(finishing) < len(conversion.finishing):
                conversion = replace(conversion, finishing=finishing)

    def _judge_with(self, pruned: PrunedOutput | None) -> Judge | None:
        """Return the judge of candidates as the output would be, which is pruned; they are not."""
        judge = self.judge
        if judge is None or pruned is None:
            return judge

        def judge_pruned(path: Path) -> Judgement:
            model = load_model(path)
            pruned.put_back(model)
            with scratch_file(model, self.staging.folder) as file:
                return judge(file)

        return judge_pruned

    def _attempt(self, passes: Sequence[Pass], conversion: Conversion) -> tuple[ModelFile, OptimizeReport]:
        """Run the passes, convert, write and verify; return the file, which is not stamped yet, and what was done."""
        options = self.options
        model, pruned = load_graph(self.source, options)
        model, results = run_passes(model, passes, conversion.context)
        self.stopwatch.lap("passes")
        converted, conversion, candidates = _convert(model, options, conversion, self._judge_with(pruned))
        steps, results = (*MOST_ROUNDS * tuple(passes), *converted.steps), (*results, *converted.results)
        if converted.precision != "fp32" or candidates:
            self.stopwatch.lap("precision")
        tell(f"writing {self.staging.output}")
        result, quantization, kept = self._save(model, converted, pruned)
        precision = converted.precision
        del model, converted
        gc.collect()  # a graph has reference cycles, and would keep its weights while two sessions load theirs
        release_freed_memory()
        self.stopwatch.lap("write")
        staged_stats = summarize_file(result)
        _require_same_signature(self.before, staged_stats)
        fusions = _count_fusions(staged_stats, self.attentions)
        if options.require_fusion:
            _require_attention(fusions, results)
        target = computing_in(precision, conversion.options.target)
        verification, notes = self._verify(result, steps, conversion, precision, pruned)
        if verification is not None and precision in ("fp16", INT4_FP16):
            require_range(result.path, conversion.feeds, conversion.folder)
        ranking = None
        if quantization is not None:
            if options.verify and pruned is None:  # pruned vectors have different neighbours for that reason too
                tell("comparing neighbours")
                ranking = measure_ranking(self.source, result, self.source)
                self.stopwatch.lap("ranking")
            quantization = self._measure(result, quantization, target, conversion)
        report = OptimizeReport(
            output=str(self.staging.output),
            provider=target.place,
            precision=precision,
            before=self.before,
            after=staged_stats,
            passes=results,
            fusions=fusions,
            quantization=quantization,
            ranking=ranking,
            candidates=candidates,
            verification=verification,
            duration_ms={},
            notes=notes,
            kept_float32=kept,
        )
        return result, report

    def _save(
        self, model: ir.Model, converted: Converted, pruned: PrunedOutput | None
    ) -> tuple[ModelFile, Quantization | None, tuple[KeptNode, ...]]:
        """Write the converted `model` to the staged file, and check what was written.

        Returns:
            The file, with its quantization and the nodes kept in float32, as written.

        Raises:
            PassError: weights are lost, a pattern keeps nothing, or onnxruntime dies on the file.
        """
        options, quantization = self.options, converted.quantization
        if pruned is not None:
            pruned.put_back(converted.model)
        is_set = options.sizes and set_files(self.staging.output, options.sizes)
        most = NONE_INLINE if is_set else MAX_INLINE_BYTES
        result = ModelFile.open(save_model(converted.model, self.staging, max_inline_bytes=most))
        if converted.precision != FP32:
            require_weights(model, converted.model, result.path)
        if quantization is not None:
            quantization = count_written(quantization, result.path)
            if quantization.has_small_pairs:
                require_small_pairs(result.path)
        kept = read_kept(converted.model, result.path, options.keep_float32) if options.keep_float32 else ()
        # onnxruntime lacks float16 CPU kernels for some operators, and crashes on its replacements.
        if converted.precision == "fp16" and (signal := death_on(result)):
            raise PassError(
                f"onnxruntime {runtime_version()} dies on the result in fp16 ({signal})",
                "no file was written; leave --precision out",
            )
        return result, quantization, kept

    def _measure(
        self, result: ModelFile, quantization: Quantization, target: ExecutionProvider, conversion: Conversion
    ) -> Quantization:
        """Return the error and the greedy tokens of a quantized result where it is to run.

        Raises:
            PassError: the error is above its bound there, or too few tokens are shared.
        """
        if self.reference is not None and not target.row.is_reference:
            error = _error_on_provider(result, self.source, target, conversion)
            quantization = replace(quantization, error=error)
        if quantization.tokens is not None and self.options.verify:
            quantization = replace(quantization, tokens=_tokens_of(result, target, conversion))
            self.stopwatch.lap("tokens")
        return quantization

    def _verify(
        self,
        result: ModelFile,
        steps: Sequence[Pass],
        conversion: Conversion,
        precision: str,
        pruned: PrunedOutput | None,
    ) -> tuple[Verification | None, tuple[str, ...]]:
        """Compare the result of `steps` with the input where it is to run; return notes on the provider as well."""
        if self.reference is None:
            return None, ()
        notes: tuple[str, ...] = ()
        target = computing_in(precision, conversion.options.target)
        if not target.row.is_reference:  # which may die of a graph: another process runs it there first
            notes = prove_elsewhere(result, target, is_trial=True).notes
        reference = replace(self.reference, original=replace(self.reference.original, wanted=target))
        tolerance = _tolerance(self.options, precision, target, self.before)
        verifier = Verifier(reference, steps, conversion.context, tolerance, None if pruned is None else pruned.pruning)
        verification = verifier.verify(result)
        for adapter in self.source.adapters:
            notes += (self._compare_adapter(adapter.name, result, verifier),)
        self.stopwatch.lap("verify")
        return verification, notes

    def _compare_adapter(self, name: str, result: ModelFile, verifier: Verifier) -> str:
        """Compare the result with an adapter with the source with the same adapter; return the figures.

        Raises:
            VerificationError: an output differs.
        """
        tell(f"comparing the adapter {name}")
        original = verifier.reference.original
        source, path, result = (
            ModelFile.open(file).with_adapter(name, self.source.path) for file in (self.source, original.path, result)
        )
        reference = replace(original, source=source, path=path).run()
        verification = reference.compare(result, verifier.tolerance, verifier.pruning)
        if not verification.passed:
            error = failure(verification, f"leave out --precision, or export it merged: --model_name {name}")
            error.message = f"with the adapter {name}, {error.message}"
            raise error
        figures = f"max_abs_error {verification.max_abs_error:.3g}, cosine {verification.cosine_min:.8f}"
        return f"with the adapter {name}: {figures}"


def load_graph(source: ModelFile, options: OptimizeOptions) -> tuple[ir.Model, PrunedOutput | None]:
    """Load the graph, ending in the weights before pruning, and return what follows."""
    model = load_model(source.path)
    if options.prune is None:
        return model, take_off(model, source) if PRUNE_KEY in source.metadata else None
    if PRUNE_KEY in source.metadata:
        raise PassError(
            f"the graph of {source.path} is pruned by {source.metadata[PRUNE_KEY]} already",
            "pass the file that it was made from, or leave --prune out",
        )
    return model, PrunedOutput.adding(model, Pruning.in_graph(options.prune))


def _error_on_provider(
    result: ModelFile, source: ModelFile, target: ExecutionProvider, conversion: Conversion
) -> float:
    """Measure the error of the quantized result on the calibration inputs where it is to run.

    Raises:
        PassError: it is above the bound, which held on the CPU.
    """
    feeds = conversion.calibration.feeds
    tell(f"measuring the error on {target.place}")
    session = open_alike(source, provider=CPU, disabled=conversion.disabled_optimizers)
    expected = [session.run(feed) for feed in feeds]
    session = open_alike(result, provider=target, disabled=conversion.disabled_optimizers)
    error = float(measure_errors(session, feeds, expected).max(initial=0.0))
    if error > conversion.bound:
        raise PassError(
            f"the error on {target.place} is {error:.3g}, above {conversion.bound:g}, which holds on the CPU",
            "no file was written; allow it with --max_error, or pass another --precision",
        )
    return error


def _tokens_of(result: ModelFile, target: ExecutionProvider, conversion: Conversion) -> GreedyTokens | None:
    """Count the greedy tokens that the written file shares with its input, where it is to run.

    Raises:
        PassError: there are too few.
    """
    promise = conversion.tokens
    if promise is None:
        return None
    session = open_alike(result, provider=target, disabled=conversion.disabled_optimizers)
    tokens = promise.count_steps(session)
    promise.require(tokens, conversion.options.precision)
    return tokens


def _convert(
    model: ir.Model, options: OptimizeOptions, conversion: Conversion, judge: Judge | None
) -> tuple[Converted, Conversion, tuple[Candidate, ...]]:
    """Convert the fused model; return the conversion for its provider and, for `--precision auto`, the candidates."""
    if options.precision != "auto":
        return conversion.convert(model, options.precision, options.activations or MIXED), conversion, ()
    conversions = [conversion]
    for other in list(options.each_provider())[1:]:
        finishing, disabled = FINISHING[other.target.name], DISABLED_OPTIMIZERS[other.target.name]
        conversions.append(replace(conversion, options=other, finishing=finishing, disabled_optimizers=disabled))
    return choose(conversions, model, judge)


def _require_same_signature(before: Stats, after: Stats) -> None:
    """Check that the inputs and outputs of the model are unchanged.

    Raises:
        PassError: an input or an output is missing, new, in another place, or of another type.
    """
    for kind, old, new in (("inputs", before.inputs, after.inputs), ("outputs", before.outputs, after.outputs)):
        if [(info.name, info.dtype) for info in old] != [(info.name, info.dtype) for info in new]:
            names = [", ".join(f"{info.name} {info.dtype}" for info in side) for side in (old, new)]
            raise PassError(
                f"the passes changed the {kind} from {names[0]} to {names[1]}",
                "an input that no node reads may be dropped: export the model without it",
            )


def _tolerance(options: OptimizeOptions, precision: str, target: ExecutionProvider, before: Stats) -> Tolerance:
    tolerance = TOLERANCES["fp16" if is_half(before) else precision]
    if precision == "fp32" and not target.row.is_reference and not is_half(before):
        tolerance = SAME  # the provider has to compute in float32 as well
    if options.max_error is None:
        return tolerance
    if precision in QUANTIZED:  # the error was measured on texts; random ids may have a larger one
        if options.max_error <= MAX_ERROR:
            return tolerance
        # With such an error, small elements may change sign.
        return replace(tolerance, cosine=min(tolerance.cosine, 1.0 - _RANDOM_IDS * options.max_error), rtol=2.0)
    return replace(tolerance, cosine=1.0 - options.max_error)


def is_half(stats: Stats) -> bool:
    """Whether most weights, and so all outputs, are already in half precision."""
    return 2 * stats.initializer_bytes.get("float16", 0) > sum(stats.initializer_bytes.values())


def _count_fusions(stats: Stats, attentions: int) -> tuple[FusionCount, ...]:
    """Count the fused operators of a model that has `attentions` in all."""
    expected = {"attention": attentions}
    return tuple(
        FusionCount(kind, expected.get(kind), sum(stats.ops.get(operator, 0) for operator in operators))
        for kind, operators in FUSED_OPERATORS.items()
    )


def _require_attention(fusions: Sequence[FusionCount], passes: Sequence[PassResult]) -> None:
    """Insist on at least one attention, and on every one being fused.

    Raises:
        FusionError: there are fewer; it says why the attention pass left them alone.
    """
    attention = next(count for count in fusions if count.kind == "attention")
    if not attention.expected:
        raise FusionError(
            "no attention was found in the graph, and --require_fusion asks for them",
            "leave --require_fusion out for a model without attention",
        )
    if attention.found < attention.expected:
        reason = next((result.note for result in passes if result.name == "attention" and result.note), "")
        raise FusionError(
            f"{attention.found} of {attention.expected} attentions are fused, and --require_fusion asks for all"
            + (f": {reason}" if reason else ""),
            "export the model another way (--exporter), or leave --require_fusion out",
        )
