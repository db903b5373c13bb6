"""Optimize a file: check the options, attempt it (`attempt`), stamp, fit to sizes, and report."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from onnxtool.checkpoint.text_files import iterate_texts
from onnxtool.errors import OnnxtoolError, PassError, ProviderError
from onnxtool.graph.edit import bodies
from onnxtool.graph.shapes import find_turns
from onnxtool.model_file import (
    MAX_INLINE_BYTES,
    ModelFile,
    Staging,
    check_model_output,
    follow_link,
    scratch_file,
    staged,
)
from onnxtool.model_file.metadata import step_entry
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.attempt import Attempts, is_half, load_graph
from onnxtool.optimize.attention.scores import match_roots
from onnxtool.optimize.kept import note_matches, require_matches
from onnxtool.optimize.options import OptimizeOptions, computing_in
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.presets import DISABLED_OPTIMIZERS, FINISHING, PRESETS
from onnxtool.optimize.quantization.candidates import Judge
from onnxtool.optimize.quantization.conversion import Conversion
from onnxtool.optimize.report import OptimizeReport, Speed
from onnxtool.optimize.speed import compare_speed
from onnxtool.optimize.verification import Original, verification_feeds
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.reading import STDIN
from onnxtool.reports import Json, WritePlan, planned_files
from onnxtool.runtime.adapters import copy_adapters, with_each_adapter
from onnxtool.runtime.given_inputs import NO_INPUTS
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.machine import processor_name
from onnxtool.runtime.probation import check_harmless
from onnxtool.runtime.providers import (
    AUTO,
    BF16,
    CPU,
    ExecutionProvider,
    has_bf16,
    provider_problem,
    resolve_provider,
    runtime_version,
)
from onnxtool.runtime.session import proof_of, require_loadable
from onnxtool.runtime.sizes import read_sizes, set_files
from onnxtool.runtime.timing import Stopwatch
from onnxtool.summary import FUSED_OPERATORS, summarize_file
from onnxtool.summary.figures import Stats
from onnxtool.version import __version__

_OF_SIZES = ("Shape", "Size")


@checked
def optimize_model(options: OptimizeOptions, *, judge: Judge | None = None) -> OptimizeReport:
    """Optimize an ONNX file for a provider and a precision, verified against the file itself.

    Args:
        options: optimization options.
        judge: rejects candidates of `--precision auto` for reasons other than their error; None for no judge.

    Raises:
        ModelFileError: the file cannot be read.
        PassError: a pass failed, or the options contradict the model.
        FusionError: `require_fusion` is set and an attention is not fused.
        VerificationError: the outputs differ from those of the input file; no file is left.
        OutputExistsError: the output exists and `force` is not set.
        OutputWriteError: the output cannot be written.
    """
    if judge is not None and options.precision != "auto":
        raise PassError(
            f"candidates are judged for the precision auto, and it is {options.precision}",
            "pass --precision auto, or evaluate the result",
        )
    if judge is not None and options.vocabulary is not None:
        raise PassError("candidates are judged with the whole vocabulary", "cut it first, and optimize the cut file")
    return _optimize(options, judge)


def plan_optimization(options: OptimizeOptions) -> WritePlan:
    """Check the options and the file as `optimize_model` does before its first pass, and return what it would write.

    Raises:
        OnnxtoolError: as for `optimize_model`, if detectable by then.
    """
    source, output = _checked(options)
    notes = ("weights of more than 1.9 GB go to a file of their own beside it",)
    if options.compiled:
        notes = (f"what {options.target.place} compiles goes to a file of its own beside each",)
    files = [*(set_files(output, options.sizes) if options.sizes else ()), output]
    files += [output.with_name(adapter.file) for adapter in source.adapters if output.parent != source.path.parent]
    if len(files) > 1:
        files.append(output.with_name(f"{output.name}.data"))
    if options.vocabulary is not None:
        from onnxtool.optimize.vocabulary import CutModel

        files += CutModel(source, options.vocabulary, output, output.with_suffix("")).planned()
    says = options.compiled or source.size_bytes > MAX_INLINE_BYTES
    return WritePlan("optimize", planned_files(files), notes if says else ())


def _checked(options: OptimizeOptions) -> tuple[ModelFile, Path]:
    """Return the input and the output path, after checking them."""
    source = ModelFile.open(options.model_path).with_sizes()
    check_harmless(source)
    if source.compiled is not None:
        raise PassError(
            f"{source.path} is compiled for {source.compiled.provider}, and has no operators to optimize",
            "optimize the file that it was made from",
        )
    _require_provider(options)
    kind = "optimized" if options.precision in ("fp32", "auto") else options.precision
    if source.adapters and (options.sizes or options.compiled or not options.target.row.is_reference):
        raise PassError(
            f"{source.path} has adapters, which run on the CPU or CUDA, from a graph of any size",
            "leave out --sizes, --compile and --provider, or export each adapter merged: --model_name ADAPTER",
        )
    output = options.output or options.model_path.with_name(f"{options.model_path.stem}-{kind}.onnx")
    if options.sizes and source.text_input is not None:
        raise PassError(
            f"{source.path} reads texts, and --sizes is for graphs that read ids",
            "pass --sizes to the export without --tokenizer in_graph",
        )
    if options.sizes:
        read_sizes(options.sizes, source)
    if options.given != NO_INPUTS:  # inconsistencies are reported before the first pass
        input_cases(source, given=options.given)
    if options.keep_float32:
        require_matches(load_model(source.path), options.keep_float32)
    if options.calibration not in (None, STDIN):  # stdin can be read once
        next(iterate_texts(options.calibration))
    check_model_output(output, force=options.force)
    return source, follow_link(output)


def _optimize(options: OptimizeOptions, judge: Judge | None) -> OptimizeReport:
    stopwatch = Stopwatch()
    tell(f"loading {options.model_path}")
    source, output = _checked(options)
    if options.vocabulary is not None:
        from onnxtool.optimize.vocabulary import optimize_cut

        return optimize_cut(source, output, options, lambda inner: _optimize(inner, None))
    if source.text_input is not None:
        from onnxtool.optimize.text_input import optimize_behind

        return optimize_behind(source, source.text_input, output, options, lambda inner: _optimize(inner, judge))
    require_loadable(source)
    context = _context(source, options)
    before = summarize_file(source)
    named = options.keep_float32
    passes = PRESETS[options.target.name]
    if named:
        passes = (Pass("keep_float32", lambda model, _: Outcome(note_matches(model, named), 0)), *passes)
    model, pruned = load_graph(source, options)
    attentions = _expected_attentions(model)
    stopwatch.lap("load")
    with staged(output, force=options.force) as staging, ExitStack() as stack:
        # The reference returns weights before pruning.
        is_plain = pruned is None or options.prune is not None
        original = source if is_plain else stack.enter_context(scratch_file(model, staging.folder))
        reference, disabled = None, _disabled_optimizers(options, before)
        if options.verify:  # before any pass, because no pass causes the file's own behaviour
            tell(f"running {source.path.name}")
            turns = find_turns(model)
            reference = Original(source, original, options.target, before.ops, disabled, turns, options.given).run()
            stopwatch.lap("verify")
        feeds = verification_feeds(source, options.given) if options.precision != "fp32" else []
        if source.adapters:
            feeds = [*with_each_adapter(source, feeds)]
        finishing = FINISHING[options.target.name]
        conversion = Conversion(options, source, feeds, staging.folder, context, finishing, disabled)
        attempts = Attempts(options, source, before, attentions, staging, reference, stopwatch, judge)
        del model, pruned
        result, report = attempts.write(passes, conversion)
        if source.adapters and output.parent.resolve() != source.path.parent.resolve():
            copy_adapters(source, staging.folder)
        target = ExecutionProvider.parse(report.provider) if options.provider == AUTO else options.target
        target = computing_in(report.precision, target)
        speed, not_timed = _speed(options, target, source, result)
        stopwatch.lap("timing")
        _stamp(result, report, source, target)
        result, report = _fit(result, report, target, staging, options, stopwatch)
        after = summarize_file(result)._replace(path=str(output))
    return replace(report, after=after, duration_ms=stopwatch.laps_ms, speed=speed, not_timed=not_timed)


def _stamp(result: ModelFile, report: OptimizeReport, source: ModelFile, target: ExecutionProvider) -> None:
    """Record in the result what was done to the source."""
    left_out = [step.name for step in report.passes if step.left_out]
    result.stamp(
        step_entry(
            "optimize",
            report.verification,
            previous=source.steps,
            provider=report.provider,
            precision=report.precision,
            versions=f"onnxtool {__version__}, onnxruntime {runtime_version()}",
            **({} if target.row.is_reference else proof_of(result.path, target)),
            passes={step.name: step.num_changes for step in report.passes if not step.left_out},
            **({"left_out": list[Json](left_out)} if left_out else {}),
            **({} if report.quantization is None else report.quantization.recorded),
            **({"kept_float32": dict[str, Json](report.num_kept)} if report.kept_float32 else {}),
        )
    )


def _fit(
    result: ModelFile,
    report: OptimizeReport,
    target: ExecutionProvider,
    staging: Staging,
    options: OptimizeOptions,
    stopwatch: Stopwatch,
) -> tuple[ModelFile, OptimizeReport]:
    """Write the result for fixed sizes, or compile it, if requested; return it and its report."""
    if options.sizes:
        from onnxtool.runtime.made_files import write_sizes

        place, all_sizes = target if options.verify else None, read_sizes(options.sizes, result)
        result, sizes = write_sizes(result, staging, all_sizes, place, compiles=options.compiled)
        report = replace(report, sizes=sizes)
        stopwatch.lap("sizes")
    elif options.compiled:
        from onnxtool.runtime.made_files import compile_file

        locations = result.external_locations
        result, note = compile_file(result, target)
        report = replace(report, notes=(*report.notes, note))
        for location in locations:  # the compiled part has the weights
            result.path.with_name(location).unlink()
        stopwatch.lap("compile")
    return result, report


def _require_provider(options: OptimizeOptions) -> None:
    """Refuse a provider whose results cannot be verified here, or that would emulate the arithmetic.

    Raises:
        ProviderError: it cannot run here, or not in this precision.
    """
    target = options.target
    if target.row.is_reference or not options.verify:
        return
    resolve_provider(options.provider)
    if options.precision == BF16 and not has_bf16(target):
        raise ProviderError(
            f"{target.place} would only emulate bfloat16: {processor_name()} cannot multiply in it",
            "optimize it on a machine that can, or leave --precision out",
        )


def _speed(
    options: OptimizeOptions, target: ExecutionProvider, source: ModelFile, result: ModelFile
) -> tuple[Speed | None, str]:
    """Time the result if requested, or return why that was not possible."""
    if not options.timing:
        return None, ""
    if problem := provider_problem(target.place, target.library):
        return None, problem
    tell("timing the result and its input")
    try:
        return compare_speed(source, result, target, options.given), ""
    except OnnxtoolError as error:  # the result may still be right
        return None, error.message.replace(str(result.path), "the result")


def _disabled_optimizers(options: OptimizeOptions, before: Stats) -> tuple[str, ...]:
    """Return the onnxruntime optimizers that sessions must not run on the result.

    None for half precision: without its fusion of SkipLayerNormalization, onnxruntime 1.31 crashes while loading some
    float16 graphs.
    """
    return () if options.precision == "fp16" or is_half(before) else DISABLED_OPTIMIZERS[options.target.name]


def _context(source: ModelFile, options: OptimizeOptions) -> Context:
    """Merge the options with the metadata of the model; options take precedence."""
    heads = options.num_heads or source.metadata_number("num_heads") or 0
    hidden = options.hidden_size or source.metadata_number("hidden_size") or 0
    # By its metadata alone, mT5-small has 6 heads of 64 numbers, and a width of 512.
    if (options.num_heads or options.hidden_size) and heads and hidden and hidden % heads:
        raise PassError(
            f"hidden_size {hidden} is not a multiple of num_heads {heads}", "check --num_heads and --hidden_size"
        )
    model_type = options.model_type or source.metadata.get("model_type", "")
    provider = (
        options.target.name if options.target.row.is_reference else CPU
    )  # others read what the CPU's passes write
    return Context(model_type, heads, hidden, provider, options.precision)


def _expected_attentions(model: ir.Model) -> int:
    """Count the attentions that the outputs depend on, whether or not they are already onnxruntime operators.

    A graph may contain others: the encoder of a model traced as a whole has unused parts of the decoder.
    """
    operators = FUSED_OPERATORS["attention"]
    needed = _needed(model.graph)
    fused = sum(f"{node.domain}::{node.op_type}" in operators for node in needed)
    return fused + sum(root in needed for root in match_roots(model.graph))


def _needed(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes of a graph that its outputs are computed from, including branches and loop bodies."""
    needed: set[ir.Node] = set()
    waiting = [value.producer() for value in graph.outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in needed:
            continue
        needed.add(node)
        if node.op_type in _OF_SIZES:  # a pass reads the sizes elsewhere
            continue
        waiting += [value.producer() for value in node.inputs if value is not None]
        for inner in bodies(node):
            waiting += [value.producer() for value in inner.outputs]
            waiting += list(inner)  # what reads values of the graph outside
    return {node for node in needed if node.graph is graph}
