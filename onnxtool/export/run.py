"""Export a checkpoint: load it once, then trace, save and verify by one strategy after another until one is right."""

from __future__ import annotations

import filecmp
import gc
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.tasks import TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import ExportError, ModelFileError, OutputExistsError, SessionError, VerificationError
from onnxtool.export.checkpoint import Checkpoint, some
from onnxtool.export.options import ExportOptions, check_opset
from onnxtool.export.pipelines import EncoderDecoderPipeline, encoder_path
from onnxtool.export.preparation import Job, locate, open_checkpoint, prepare
from onnxtool.export.provenance import describe
from onnxtool.export.report import ExportReport
from onnxtool.export.sidecar_files import SIDECAR_FILES, module_files, obsolete_sidecar_files, write_sidecar_files
from onnxtool.export.static import is_static
from onnxtool.export.strategies import ExportStrategy
from onnxtool.export.target_specification import TargetSpecification
from onnxtool.export.vocabularies import all_files
from onnxtool.model_file import (
    MAX_INLINE_BYTES,
    ModelFile,
    check_model_output,
    check_sidecar_files,
    save_beside,
    save_model,
    staged,
)
from onnxtool.model_file.metadata import (
    DECODER_KEY,
    ENCODER_KEY,
    INPUTS_KEY,
    MAX_DECODER_LENGTH_KEY,
    stamp,
    stamp_step,
)
from onnxtool.model_file.weights import write_inline
from onnxtool.options import checked
from onnxtool.progress import OnProgress, ignore, listening, tell
from onnxtool.reports import PlannedFile, WritePlan, planned_files
from onnxtool.runtime.input_stamp import InputStamp
from onnxtool.verification import Verification

_LOGGER = logging.getLogger(__name__)
_Failure = ExportError | VerificationError | SessionError


@checked
def export_model(options: ExportOptions, *, on_progress: OnProgress = ignore) -> ExportReport:
    """Export a checkpoint to an ONNX file with its tokenizer or processor beside it, verified against PyTorch.

    Strategies are tried in their order until one gives a file with the model's outputs; the report says which, and its
    notes why the ones before did not.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: no strategy gives a graph that follows the model, or none can have the opset.
        VerificationError: the graph's outputs are not the model's; no file is left.
        OutputExistsError: the output is there and `force` is not set.
        OutputWriteError: the output cannot be written.
    """
    with listening(on_progress):
        return _export(options)


def _export(options: ExportOptions) -> ExportReport:
    check_opset(options.opset)
    job = prepare(options)
    if not options.force:
        check_sidecar_files(job.paths.graph, job.paths.files, lambda folder: _write_sidecar_files(job, folder))
    failures: list[tuple[ExportStrategy, _Failure]] = []
    for strategy in job.pipeline.strategies(options.exporter, verified=options.verify):
        if (strategy.fixed and options.require_dynamic) or _would_take_too_long(strategy, failures):
            continue
        try:
            report = _export_by(strategy, job)
        except (ExportError, VerificationError, SessionError) as error:
            failures.append((strategy, error))
            _LOGGER.info("strategy %s failed: %s", strategy.name, _without_staging(error.message))
        else:
            _LOGGER.info("strategy %s is taken", strategy.name)
            reasons = dict.fromkeys(_without_staging(failure.message) for _, failure in failures)
            return replace(
                report, notes=(*report.notes, *(f"{reason}; used {strategy.name} instead" for reason in reasons))
            )
    if not failures:
        raise ExportError(
            f"{options.exporter} cannot trace for the task {job.task}", "leave --exporter out, or pass another one"
        )
    raise _sum_up(failures)


@checked
def plan_export(options: ExportOptions) -> WritePlan:
    """Check the options and the configuration of the checkpoint, and say what would be written; loads no weights.

    Raises:
        OnnxtoolError: as `export_model`, as far as it is known without the model.
    """
    source, target, paths = locate(options)
    checkpoint = open_checkpoint(options, source, target)
    graphs = [paths.graph]
    if checkpoint.task == TEXT_TO_TEXT_WITH_CACHE and getattr(checkpoint.config, "is_encoder_decoder", False):
        graphs.append(encoder_path(paths.graph))
        check_model_output(graphs[-1], force=options.force)
    names = dict.fromkeys((*SIDECAR_FILES, *(all_files() if source.is_local else ()), *module_files(source)))
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


def _export_by(strategy: ExportStrategy, job: Job) -> ExportReport:
    options, checkpoint, stopwatch = job.options, job.checkpoint, job.stopwatch
    model = job.models.take(strategy.attention)
    architecture = type(model).__name__
    stopwatch.lap("load")
    tell(f"tracing {architecture} by {strategy.name}")
    graphs = job.pipeline.trace(model, strategy, options.opset)
    graph, encoder = graphs.model, graphs.encoder
    del graphs
    paths, specification = job.paths, job.specification
    described = describe(
        checkpoint,
        task=job.task,
        head=job.head_name,
        strategy=strategy,
        files=paths.stamp,
        dtype=options.dtype,
        max_length=job.max_length,
        choices=options.choices,
    )
    graph.metadata_props.update(described)
    if encoder is not None:
        graph.metadata_props.update(_describe_decoder(job))
        encoder.metadata_props.update({**described, DECODER_KEY: paths.graph.name})
    opset = graph.opset_imports[""]
    second = None
    if specification is not None:
        second = specification.second_graph(graph)
        specification.adapt(graph)
    stopwatch.lap("trace")
    _LOGGER.info("strategy %s traced %d nodes, opset %d", strategy.name, graph.graph.num_nodes(), opset)
    with staged(paths.graph, force=options.force, root=paths.root) as staging:
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
        verifications = [_verify(file, job, strategy) if options.verify else None for file in (path, *twin)]
        if specification is not None:
            specification.check(sidecars, path)
        # The two graphs of an encoder-decoder are verified together.
        stamped = [*zip((path, *twin), verifications, strict=True), *((file, verifications[0]) for file in before)]
        for file, figures in stamped:
            _stamp_inputs(file, job, strategy, is_encoder=file in before)
            stamp_step(file, "export", figures, exporter=strategy.exporter.name)
        if specification is not None:
            specification.target.pack(specification.model, sidecars, path)
        exported = ModelFile.open(path)
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
        opset=opset,
        inputs=exported.structure.inputs,
        outputs=exported.structure.outputs,
        metadata=exported.metadata,
        verification=verifications[0],
        notes=(
            *job.reasons,
            *_loading_notes(architecture, checkpoint),
            *job.pipeline.notes(architecture, strategy),
            *(() if specification is None else specification.notes),
        ),
        duration_ms=stopwatch.laps_ms,
    )


def _write_sidecar_files(job: Job, folder: Path) -> None:
    """Write the sidecar files to `folder`: the checkpoint's own, and those of the target."""
    checkpoint, specification = job.checkpoint, job.specification
    with_weights = specification is not None and specification.needs_module_weights
    write_sidecar_files(checkpoint.source, job.tokenizer, folder, job.paths.files, module_weights=with_weights)
    if specification is not None:
        specification.write_files(checkpoint.config, job.tokenizer, folder, job.max_length)


def _describe_decoder(job: Job) -> dict[str, str]:
    """Return what the decoder of an encoder-decoder says of itself: where its encoder is, and what bounds it."""
    longest = job.pipeline.longest if isinstance(job.pipeline, EncoderDecoderPipeline) else None
    limit = {} if longest is None else {MAX_DECODER_LENGTH_KEY: str(longest)}
    return {ENCODER_KEY: encoder_path(job.paths.graph).name, **limit}


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


def _verify(path: Path, job: Job, strategy: ExportStrategy) -> Verification:
    """Compare the file with a model that was loaded again: running and tracing may change a model."""
    fixed = _fixed(strategy)
    if fixed not in job.references:
        # In float32 whatever the weights are: PyTorch in half precision has rounding errors itself.
        model = job.models.load(None).float()
        job.references[fixed] = job.pipeline.reference_outputs(model, strategy)
        del model
        gc.collect()  # its weights make room for onnxruntime's
    try:
        return job.pipeline.verify(path, job.references[fixed], job.options.tolerance)
    finally:
        job.stopwatch.lap("verify")


def _stamp_inputs(file: Path, job: Job, strategy: ExportStrategy, *, is_encoder: bool) -> None:
    """Write into a file what inputs it takes, as far as it takes those of the model."""
    reference, pipeline = job.references.get(_fixed(strategy)), job.pipeline
    if is_encoder and isinstance(pipeline, EncoderDecoderPipeline):
        described = pipeline.encoder_inputs(strategy, reference)
    else:
        described = pipeline.inputs(strategy, reference)
    found = InputStamp.of(ModelFile.open(file).structure.inputs, described.kinds, described.cases)
    if found.kinds:
        stamp(file, {INPUTS_KEY: found.json})


def _fixed(strategy: ExportStrategy) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(strategy.fixed.items()))


def _loading_notes(architecture: str, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Say what of the checkpoint the file does not hold, and what it holds that the checkpoint does not."""
    notes = []
    if checkpoint.initialized:
        notes.append(f"random, because the checkpoint does not have them: {some(checkpoint.initialized)}")
    if checkpoint.unused:
        notes.append(f"left out, because {architecture} does not use them: {some(checkpoint.unused)}")
    if checkpoint.is_pickle:
        notes.append(f"the weights came from a pickle ({checkpoint.weight_files[0].name})")
    return tuple(notes)


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
