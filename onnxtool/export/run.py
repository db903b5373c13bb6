"""Export a checkpoint: load it once, then trace, save and verify by one strategy after another until one is right."""

from __future__ import annotations

import filecmp
import gc
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder
from onnxtool.checkpoint.sentence_modules import ROUTER_NAME
from onnxtool.checkpoint.tasks import TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import ExportError, ModelFileError, OutputExistsError, SessionError, VerificationError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.length_verification import ShorterError, longest_case, merged_reference, verify_export
from onnxtool.export.lengths import Lengths
from onnxtool.export.modalities.sizes import SEQUENCE
from onnxtool.export.options import ExportOptions, check_opset
from onnxtool.export.pair import Side, find_sides
from onnxtool.export.pipelines import EncoderDecoderPipeline, GenerationPipeline, encoder_path
from onnxtool.export.preparation import Job, open_checkpoint, prepare
from onnxtool.export.provenance import describe
from onnxtool.export.report import ExportReport
from onnxtool.export.sidecar_files import (
    SIDECAR_FILES,
    module_files,
    obsolete_sidecar_files,
    state_length,
    write_sidecar_files,
)
from onnxtool.export.static import is_static
from onnxtool.export.strategies import ExportStrategy
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.vocabularies import all_files
from onnxtool.export.weights import FLOAT_CHECKPOINT, some
from onnxtool.model_file import (
    MAX_INLINE_BYTES,
    ModelFile,
    check_model_output,
    check_sidecar_files,
    save_beside,
    save_model,
    staged,
)
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.metadata import (
    DECODER_KEY,
    ENCODER_KEY,
    INPUTS_KEY,
    MAX_DECODER_LENGTH_KEY,
    TOKENIZER_KEY,
    VERIFIED_LENGTH_KEY,
    stamp,
    stamp_step,
)
from onnxtool.model_file.weights import write_inline
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.reports import PlannedFile, WritePlan, planned_files
from onnxtool.runtime.input_stamp import InputStamp
from onnxtool.runtime.tokens import OwnTokenizer, hard_texts, read_folder
from onnxtool.verification import Verification

_LOGGER = logging.getLogger(__name__)
_Failure = ExportError | VerificationError | SessionError


@checked
def export_model(options: ExportOptions) -> ExportReport:
    """Export a checkpoint to an ONNX file with its tokenizer or processor beside it, verified against PyTorch.

    A checkpoint whose Router encodes queries and documents by different models becomes two files, both or none.

    Strategies are tried in their order until one gives a file with the model's outputs; the report says which, and its
    notes why the ones before did not.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: no strategy gives a graph that follows the model, or none can have the opset.
        VerificationError: the graph's outputs are not the model's; no file is left.
        OutputExistsError: the output is there and `force` is not set.
        OutputWriteError: the output cannot be written.
    """
    with ExitStack() as outputs:
        check_opset(options.opset)
        reports = [_export(side, outputs) for side in find_sides(options)]
        if len(reports) == 1:
            return reports[0]
        _require_comparable(*reports)
        return replace(reports[0], partner=reports[1])


def _require_comparable(first: ExportReport, second: ExportReport) -> None:
    """Refuse queries and documents of which no similarity could be computed."""
    shapes = [(report.outputs[0].name, report.outputs[0].shape[-1]) for report in (first, second)]
    if shapes[0] != shapes[1]:
        found = " and ".join(f"{name} of {width}" for name, width in shapes)
        raise ExportError(
            f"the routes of {first.source} give {found}, which cannot be compared", "export one of them with --route"
        )


def _export(side: Side, outputs: ExitStack) -> ExportReport:
    """Export one side by the first strategy that is right; its files get their names when `outputs` closes."""
    options = side.options
    job = replace(prepare(options, side.located), stamps=side.stamps)
    if not options.force:
        check_sidecar_files(job.paths.graph, job.paths.files, lambda folder: _write_sidecar_files(job, folder))
    _check_tokens(job)
    failures: list[tuple[ExportStrategy, _Failure]] = []
    for strategy in job.pipeline.strategies(options.exporter, verified=options.verify):
        if _has_longer_texts(failures, strategy):
            break
        if (strategy.fixed and options.require_dynamic) or _would_take_too_long(strategy, failures):
            continue
        try:
            report = _export_by(strategy, job, outputs)
        except (ExportError, VerificationError, SessionError) as error:
            failures.append((strategy, error))
            _LOGGER.info("strategy %s failed: %s", strategy.name, _without_staging(error.message))
        else:
            return _with_reasons(report, strategy, failures)
    shorter = _best_shorter(failures)
    others = [row for row in failures if shorter is None or row[1] is not shorter[1]]
    while shorter is not None:
        strategy, limit = shorter
        try:
            return _with_reasons(_export_by(strategy, replace(job, lengths=limit.lengths), outputs), strategy, others)
        except ShorterError as error:  # below the maximum thresholds are tried that were not before
            shorter = (strategy, error)
    if not failures:
        raise ExportError(
            f"{options.exporter} cannot trace for the task {job.task}", "leave --exporter out, or pass another one"
        )
    failed = _sum_up(failures)
    if job.checkpoint.quantizer:
        failed.hint = f"{job.checkpoint.quantizer} computes otherwise than with its weights; {FLOAT_CHECKPOINT}"
    raise failed


def _best_shorter(failures: Sequence[tuple[ExportStrategy, _Failure]]) -> tuple[ExportStrategy, ShorterError] | None:
    """Return the strategy whose file is right for the longest texts, the first of several; None without any."""
    found = [(strategy, error) for strategy, error in failures if isinstance(error, ShorterError)]
    return max(found, key=lambda row: row[1].longest, default=None)


def _has_longer_texts(failures: Sequence[tuple[ExportStrategy, _Failure]], strategy: ExportStrategy) -> bool:
    """Whether a dynamic file for shorter texts is better than what is next: a file of one length, or the same limit."""
    shorter = _best_shorter(failures)
    if shorter is None:
        return False
    return shorter[1].is_own or shorter[1].longest >= strategy.fixed.get(SEQUENCE, shorter[1].longest + 1)


def _with_reasons(
    report: ExportReport, strategy: ExportStrategy, failures: Sequence[tuple[ExportStrategy, _Failure]]
) -> ExportReport:
    """Add to a report why the strategies before did not give the file."""
    _LOGGER.info("strategy %s is taken", strategy.name)
    reasons = dict.fromkeys(_without_staging(failure.message) for _, failure in failures)
    return replace(report, notes=(*report.notes, *(f"{reason}; used {strategy.name} instead" for reason in reasons)))


@checked
def plan_export(options: ExportOptions) -> WritePlan:
    """Check the options and the configuration of the checkpoint, and say what would be written; loads no weights.

    Raises:
        OnnxtoolError: as `export_model`, as far as it is known without the model.
    """
    plans = [_plan(side) for side in find_sides(options)]
    files = [file for plan in plans for file in plan.files]
    return WritePlan("export", tuple(files), tuple(dict.fromkeys(note for plan in plans for note in plan.notes)))


def _plan(side: Side) -> WritePlan:
    options, (source, target, paths) = side.options, side.located
    checkpoint = open_checkpoint(options, source, target)
    graphs = [paths.graph]
    if checkpoint.task == TEXT_TO_TEXT_WITH_CACHE and getattr(checkpoint.config, "is_encoder_decoder", False):
        graphs.append(encoder_path(paths.graph))
        check_model_output(graphs[-1], force=options.force)
    names = dict.fromkeys((*SIDECAR_FILES, *(all_files() if source.is_local else ()), *module_files(source)))
    if source.route is not None:  # the files of a route are of its modules alone
        names.pop(ROUTER_NAME)
    found = {name: file for name in names if (file := source.locate(name)) is not None}
    existing = {name for name in found if (paths.files / name).is_file()}
    same = {name for name in existing if filecmp.cmp(found[name], paths.files / name, shallow=False)}
    if existing > same and not options.force:
        raise OutputExistsError(
            f"{paths.files / min(existing - same)} is there already, and its content is another one",
            "pass --force to replace it, or another --output",
        )
    change = {name: "unchanged" if name in same else "replaced" if name in existing else "new" for name in found}
    sidecars = (PlannedFile(str(paths.files / name), change[name]) for name in found)
    notes = [f"files that a tokenizer of {checkpoint.architecture} needs beside these are written as well"]
    if source.locate(TOKENIZER_NAME) is not None:
        notes.append(f"{TOKENIZER_NAME} becomes another one where transformers reads other tokens by all its files")
    if not target.takes_any_graph:
        notes.append(f"{target.title} gets files of its own, and may refuse the model once it is loaded")
    if not is_static(source) and sum(file.stat().st_size for file in checkpoint.weight_files) > MAX_INLINE_BYTES:
        notes.append("weights of more than 1.9 GB go to a file of their own beside the graph")
    return WritePlan("export", (*planned_files(graphs), *sidecars), tuple(notes))


def _would_take_too_long(strategy: ExportStrategy, failures: Sequence[tuple[ExportStrategy, _Failure]]) -> bool:
    """Whether its exporter reached the time limit before: another attention has as many sizes to reason about."""
    return strategy.timeout_s is not None and any(
        earlier.exporter is strategy.exporter and isinstance(error.__cause__, TimeoutError)
        for earlier, error in failures
    )


def _export_by(strategy: ExportStrategy, job: Job, outputs: ExitStack) -> ExportReport:
    options, checkpoint, stopwatch = job.options, job.checkpoint, job.stopwatch
    model = job.models.take(strategy.attention)
    architecture = type(model).__name__
    stopwatch.lap("load")
    tell(f"tracing {architecture} by {strategy.name}")
    graphs = job.pipeline.trace(model, strategy, options.opset)
    graph, encoder = graphs.model, graphs.encoder
    del graphs
    job = replace(job, lengths=_lengths_of(job, strategy).seen_in(graph if encoder is None else encoder))
    paths, specification = job.paths, job.specification
    described = describe(
        checkpoint,
        task=job.task,
        head=job.head_name,
        strategy=strategy,
        files=paths.stamp,
        dtype=options.dtype,
        max_length=job.lengths.longest,
        choices=options.choices,
    )
    described |= job.stamps
    graph.metadata_props.update(described)
    if encoder is not None:
        graph.metadata_props.update(_describe_decoder(job))
        encoder.metadata_props.update({**described, DECODER_KEY: paths.graph.name})
    opset = default_opset(graph.opset_imports)
    second = None
    if specification is not None:
        second = specification.second_graph(graph)
        specification.adapt(graph)
    stopwatch.lap("trace")
    _LOGGER.info("strategy %s traced %d nodes, opset %d", strategy.name, graph.graph.num_nodes(), opset)
    with ExitStack() as output:
        staging = output.enter_context(staged(paths.graph, force=options.force, root=paths.root))
        tell(f"writing {paths.graph}")
        path = save_model(graph, staging)
        twin = _write_second(specification, second, path)
        before = [] if encoder is None else [save_beside(encoder, staging, encoder_path(path).name)]
        staging.obsolete.extend([] if before else _encoder_of(paths.graph))
        del graph, second, encoder, model
        gc.collect()  # graphs are full of cycles, and what they hold is as large as the model
        sidecars = staging.folder / paths.files.relative_to(paths.root)
        _write_sidecar_files(job, sidecars)
        staging.obsolete.extend(obsolete_sidecar_files(checkpoint.source, sidecars, paths.files))
        stopwatch.lap("write")
        verifications = [verify_export(file, job, strategy) if options.verify else None for file in (path, *twin)]
        if specification is not None:
            specification.check(sidecars, path)
        # The two graphs of an encoder-decoder are verified together.
        stamped = [*zip((path, *twin), verifications, strict=True), *((file, verifications[0]) for file in before)]
        for file, figures in stamped:
            _stamp_inputs(file, job, strategy, figures, is_encoder=file in before)
            _stamp_tokenizer(file, job, sidecars)
            stamp_step(file, "export", figures, exporter=strategy.exporter.name)
        if specification is not None:
            specification.target.pack(specification.model, sidecars, path)
        exported = ModelFile.open(path)
        outputs.push(output.pop_all())
    return ExportReport(
        output=str(paths.graph),
        files=str(paths.files),
        source=checkpoint.source.model_name,
        model_type=checkpoint.config.model_type,
        architecture=checkpoint.architecture,
        task=job.task,
        head=job.head_name,
        exporter=strategy.exporter.name,
        attention=strategy.attention or "",
        fixed_axes=dict(strategy.fixed),
        opset=default_opset(exported.structure.opsets),
        inputs=exported.structure.inputs,
        outputs=exported.structure.outputs,
        metadata=exported.metadata,
        verification=verifications[0],
        notes=(
            *job.reasons,
            *_loading_notes(checkpoint),
            *_tokenizer_notes(job),
            *job.pipeline.notes(architecture, strategy),
            *job.lengths.notes,
            *_answer_notes(job),
            *(() if specification is None else specification.notes),
        ),
        duration_ms=stopwatch.laps_ms,
    )


def _write_sidecar_files(job: Job, folder: Path) -> None:
    """Write the sidecar files to `folder`: the checkpoint's own, and those of the target."""
    checkpoint, specification = job.checkpoint, job.specification
    with_weights = specification is not None and specification.needs_module_weights
    write_sidecar_files(checkpoint.source, job.tokenizer, folder, job.paths.files, module_weights=with_weights)
    if checkpoint.source.base is not None:
        content = json.dumps(checkpoint.adapted_config, indent=2, ensure_ascii=False) + "\n"
        (folder / "config.json").write_text(content, encoding="utf-8")
    if job.lengths.longest is not None and job.lengths.longest < (job.lengths.stated or 0):
        state_length(folder, job.lengths.longest)
    if specification is not None:
        specification.write_files(checkpoint.config, job.tokenizer, folder, job.lengths.longest)


def _check_tokens(job: Job) -> None:
    """Read hard texts by the files that will be written, as onnxtool does and as the target does.

    Raises:
        CheckpointError: transformers reads one of them otherwise.
    """
    if job.tokenizer is None:
        return
    source, specification = job.checkpoint.source, job.specification
    texts = hard_texts(job.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_sidecar_files(job, folder)
        if not (folder / TOKENIZER_NAME).is_file():  # a checkpoint that is exported beside itself keeps its own
            folder = job.paths.files
        if not (folder / TOKENIZER_NAME).is_file():
            return
        own = OwnTokenizer(job.tokenizer, source.model_name, source.sentence_modules.adds_special_tokens)
        own.check("onnxtool", read_folder(CheckpointFolder(folder)), texts)
        if specification is not None:
            specification.check_tokens(own, folder, texts)


def _stamp_tokenizer(file: Path, job: Job, folder: Path) -> None:
    """Write into a file which tokenizer.json reads texts as transformers does, so that nothing needs to ask it."""
    path = folder / TOKENIZER_NAME
    if job.tokenizer is not None and path.is_file():
        stamp(file, {TOKENIZER_KEY: hashlib.sha256(path.read_bytes()).hexdigest()})


def _describe_decoder(job: Job) -> dict[str, str]:
    """Return what the decoder of an encoder-decoder says of itself: where its encoder is, and what bounds it."""
    longest = _longest_answer(job)
    limit = {} if longest is None else {MAX_DECODER_LENGTH_KEY: str(longest)}
    return {ENCODER_KEY: encoder_path(job.paths.graph).name, **limit}


def _longest_answer(job: Job) -> int | None:
    """Return the most tokens of the decoder of an encoder-decoder; None for no limit, and for other models."""
    if not isinstance(job.pipeline, EncoderDecoderPipeline):
        return None
    return job.pipeline.verified_answer if job.options.verify else job.pipeline.longest


def _answer_notes(job: Job) -> tuple[str, ...]:
    """Say where answers are shorter than the decoder's own, because longer ones are not verified."""
    longest = _longest_answer(job)
    stated = job.pipeline.longest if isinstance(job.pipeline, EncoderDecoderPipeline) else None
    if longest == stated:
        return ()
    of_stated = "" if stated is None else f", of the {stated} that the checkpoint states"
    return (f"for answers of up to {longest} tokens{of_stated}: longer ones are not verified",)


def _encoder_of(decoder: Path) -> list[Path]:
    """Return the encoder that an earlier export wrote beside the file that is replaced; nothing where it wrote none."""
    try:
        encoder = ModelFile.open(encoder_path(decoder))
    except ModelFileError:
        return []
    return [encoder.path] if encoder.metadata.get(DECODER_KEY) == decoder.name else []


def _write_second(specification: TargetSpecification | None, second: Any, path: Path) -> list[Path]:
    """Write the second graph beside the first, where the target has one."""
    if specification is None or second is None:
        return []
    twin = specification.target.second_path(path, specification.model.name)
    write_inline(second, twin)
    return [twin]


def _lengths_of(job: Job, strategy: ExportStrategy) -> Lengths:
    """Return the lengths of texts of the file: one alone where the model or the strategy fixes it."""
    given = {} if isinstance(job.pipeline, GenerationPipeline) else job.pipeline.signature.given
    fixed = {**given, **strategy.fixed}.get(SEQUENCE)
    return job.lengths if fixed is None or job.lengths.longest is None else Lengths(job.lengths.stated, fixed)


def _stamp_inputs(
    file: Path, job: Job, strategy: ExportStrategy, verification: Verification | None, *, is_encoder: bool
) -> None:
    """Write into a file what inputs it takes, as far as it takes those of the model, and how long its texts were."""
    reference, pipeline = merged_reference(job, strategy), job.pipeline
    if is_encoder and isinstance(pipeline, EncoderDecoderPipeline):
        described = pipeline.encoder_inputs(strategy, reference)
    else:
        described = pipeline.inputs(strategy, reference)
    found = InputStamp.of(ModelFile.open(file).structure.inputs, described.kinds, described.cases)
    if found.kinds:
        stamp(file, {INPUTS_KEY: found.json})
    if verification is not None and job.lengths.longest is not None:
        stamp(file, {VERIFIED_LENGTH_KEY: str(longest_case(verification, pipeline))})


def _loading_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Say what of the checkpoint the file does not hold, and what it holds that the checkpoint does not."""
    notes = list(checkpoint.notes)
    if checkpoint.initialized:
        notes.append(f"random, because the checkpoint does not have them: {some(checkpoint.initialized)}")
    if checkpoint.is_pickle:
        notes.append(f"the weights came from a pickle ({checkpoint.weight_files[0].name})")
    return tuple(notes)


def _tokenizer_notes(job: Job) -> tuple[str, ...]:
    """Say where no file of the export can read texts."""
    tokenizer = job.tokenizer
    if tokenizer is None or hasattr(tokenizer, "backend_tokenizer"):
        return ()
    if job.checkpoint.source.locate(TOKENIZER_NAME) is not None:  # which was compared
        return ()
    return (f"no {TOKENIZER_NAME}, because {type(tokenizer).__name__} runs in Python: `onnxtool infer` reads no texts",)


def _without_staging(message: str) -> str:
    """Leave out the folder in which a file was staged: it has a random name, and is gone when a user reads this."""
    return re.sub(r"\S*\.partial/", "", message)


def _sum_up(failures: Sequence[tuple[ExportStrategy, _Failure]]) -> _Failure:
    """Return the only error; of several, the first where all are of verification, else one that names all reasons."""
    errors = [error for _, error in failures]
    if len(errors) == 1 or all(isinstance(error, VerificationError) for error in errors):
        errors[0].message = _without_staging(errors[0].message)
        return errors[0]
    reasons = "\n".join(f"  {strategy.name}: {_without_staging(error.message)}" for strategy, error in failures)
    return ExportError(f"no way to trace it gives a file that follows the model:\n{reasons}", errors[0].hint)
