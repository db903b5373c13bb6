"""Export a checkpoint: load it once, then trace, save and verify by one strategy after another until one is right."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.pooling_modules import Pooling
from onnxtool.checkpoint.tasks import TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.checkpoint.token_states import TokenStates
from onnxtool.checkpoint.vector_types import check_ranges_options
from onnxtool.errors import ExportError, SessionError, TargetError, VerificationError
from onnxtool.export.chats import check_chat_template
from onnxtool.export.checkpoint import Checkpoint, some
from onnxtool.export.heads.choice import choose_head, choose_no_head, choose_side_head, require_expanding_token
from onnxtool.export.heads.head import Head
from onnxtool.export.heads.storage import choose_storage
from onnxtool.export.modalities.combined import PaddedTexts
from onnxtool.export.modalities.finding import find_both_sides, find_modality, text_of
from onnxtool.export.modalities.pages import is_of_pages, restrict_to_pages
from onnxtool.export.modalities.sides import find_side, restrict, scales_to_length_one, with_padding
from onnxtool.export.modalities.text import TextInputs
from onnxtool.export.options import EXPORTER_NAMES, ExportOptions, check_opset
from onnxtool.export.pipelines import (
    EncoderDecoderPipeline,
    ExportPipeline,
    GenerationPipeline,
    SingleCallPipeline,
    encoder_path,
)
from onnxtool.export.provenance import describe
from onnxtool.export.report import ExportReport
from onnxtool.export.sidecar_files import obsolete_sidecar_files, write_sidecar_files
from onnxtool.export.signature import detect_signature
from onnxtool.export.source import Source
from onnxtool.export.static import StaticCheckpoint, is_static
from onnxtool.export.strategies import ExportStrategy
from onnxtool.export.target import Layout, layout
from onnxtool.export.target_specification import TargetSpecification, specify
from onnxtool.export.targets import find_target
from onnxtool.export.token_states import give_states
from onnxtool.model_file import ModelFile, check_model_output, check_sidecar_files, save_beside, save_model, staged
from onnxtool.model_file.metadata import DECODER_KEY, ENCODER_KEY, MAX_DECODER_LENGTH_KEY, stamp_step
from onnxtool.model_file.weights import write_inline
from onnxtool.runtime.comparison import ReferenceOutputs
from onnxtool.runtime.timing import Stopwatch
from onnxtool.verification import Verification

_Failure = ExportError | VerificationError | SessionError
_WITH_CACHE = (TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE)


class _Models:
    """Loads the model as a strategy wants it; the one that was looked at first serves the first strategy."""

    def __init__(self, checkpoint: Checkpoint, options: ExportOptions) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._states: TokenStates | None = None
        self._first: Any = self.load(None)

    @property
    def first(self) -> Any:
        """The model that was loaded first; None once it is taken."""
        return self._first

    def give(self, states: TokenStates) -> None:
        """Let the models give other states than those of their last layer, from now on."""
        self._states = states
        if self._first is not None:
            give_states(self._first, states)

    def take(self, attention: str | None) -> Any:
        """Return a model that nothing has traced yet, and keep no reference to it."""
        first, self._first = self._first, None
        if first is not None and attention is not None and hasattr(first, "set_attn_implementation"):
            first.set_attn_implementation(attention)
        elif first is None or attention is not None:
            return self.load(attention)
        return first

    def load(self, attention: str | None) -> Any:
        """Load the weights again."""
        model = self._checkpoint.load_model(
            dtype=self._options.dtype,
            device=self._options.device,
            attention=attention,
            allow_missing_weights=self._options.allow_missing_weights,
        )
        model = restrict_to_pages(restrict(model, self._checkpoint.task), self._checkpoint)
        if self._states is not None:
            give_states(model, self._states)
        return model


def _refuse_unused(options: ExportOptions, task: str, head: Head | None, text: TextInputs | None) -> None:
    """Refuse options that would do nothing."""
    if task in _WITH_CACHE and options.head not in ("auto", "logits", "none"):
        raise ExportError(f"the task {task} takes no head, and --head {options.head} was passed", "leave --head out")
    if options.keep_raw and head is None:
        raise ExportError("--keep_raw keeps what a head reads, and there is no head", "leave --keep_raw out")
    if options.keep_raw and head is not None and head.name == "reranker":
        raise ExportError("--keep_raw was passed for a reranker, which reads two of the logits", "leave --keep_raw out")
    if options.dimensions is not None and (head is None or head.name != "embedding"):
        raise ExportError(
            "--dimensions keeps a part of an embedding, and this graph computes none", "leave --dimensions out"
        )
    if options.vectors_as is not None and (head is None or head.name != "embedding"):
        raise ExportError(
            "--vectors_as stores the numbers of one embedding for each text, and this graph computes none",
            "leave --vectors_as out; vectors of tokens are stored so by `onnxtool infer --output FOLDER/ --vectors_as`",
        )
    if options.text is not None and text is None:
        raise ExportError("--text was passed for a model that takes no text", "leave --text out")


def _choose_states(
    models: _Models, source: Source, head: Head | None, specification: TargetSpecification | None
) -> None:
    """Let the models give the states that an embedder pools, where these are not those of its last layer.

    Raises:
        CheckpointError: the weights of layers cannot be read.
        TargetError: a consumer would pool others.
    """
    states = TokenStates.of(source.sentence_modules, source)
    if states is None or (head is None and specification is None):
        return
    if specification is not None:
        raise TargetError(
            f"{source.model_name} pools other states than those of its last layer, and "
            f"{specification.target.title} reads these",
            "pass --target plain",
        )
    models.give(states)


@dataclass(frozen=True)
class _Job:
    """An export under strategy: all that does not depend on the strategy.

    Attributes:
        tokenizer: that of a model of text; None for others.
        max_length: the most tokens a text may have; None where the model does not bound it, or takes no text.
        reasons: decisions that were made for the user, and why.
        references: PyTorch's outputs, by the sizes of the fixed axes.
    """

    options: ExportOptions
    paths: Layout
    checkpoint: Checkpoint
    models: _Models
    pipeline: ExportPipeline
    specification: TargetSpecification | None
    task: str
    head_name: str
    tokenizer: Any
    max_length: int | None
    reasons: tuple[str, ...]
    on_progress: Callable[[str], None]
    stopwatch: Stopwatch
    references: dict[tuple[tuple[str, int], ...], ReferenceOutputs] = field(default_factory=dict)


def export_model(options: ExportOptions, *, on_progress: Callable[[str], None] = lambda _stage: None) -> ExportReport:
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
    if options.exporter not in EXPORTER_NAMES:
        raise ExportError(f"no exporter called {options.exporter}", f"use one of {', '.join(EXPORTER_NAMES)}")
    check_opset(options.opset)
    job = _prepare(options, on_progress)
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
        else:
            reasons = dict.fromkeys(_without_staging(failure.message) for _, failure in failures)
            return replace(
                report, notes=(*report.notes, *(f"{reason}; used {strategy.name} instead" for reason in reasons))
            )
    if not failures:
        raise ExportError(
            f"{options.exporter} cannot trace for the task {job.task}", "leave --exporter out, or pass another one"
        )
    raise _sum_up(failures)


def _would_take_too_long(strategy: ExportStrategy, failures: Sequence[tuple[ExportStrategy, _Failure]]) -> bool:
    """Whether its exporter reached the time limit before: another attention has as many sizes to reason about."""
    return strategy.timeout_s is not None and any(
        earlier.exporter is strategy.exporter and isinstance(error.__cause__, TimeoutError)
        for earlier, error in failures
    )


def _prepare(options: ExportOptions, on_progress: Callable[[str], None]) -> _Job:
    """Load the model once, and find out all that does not depend on the strategy."""
    stopwatch = Stopwatch()
    source = Source.find(
        options.model_name,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        route=options.route,
    )
    target = find_target(options.target)
    check_ranges_options(options.vectors_as, options.ranges, options.calibration)
    changed = options.head != "auto" or options.keep_raw or options.dimensions or options.vectors_as
    if not target.takes_any_graph and changed:
        raise TargetError(
            f"the target {target.name} decides on the head of the graph, and --head, --keep_raw, --dimensions or "
            "--vectors_as was passed as well",
            "leave these out, or pass --target plain",
        )
    paths = layout(target, options.output, source.name)
    check_model_output(paths.graph, force=options.force)
    on_progress(f"loading {options.model_name}")
    checkpoint: Checkpoint
    if is_static(source):
        if not target.takes_any_graph:
            raise TargetError(f"the target {target.name} takes no table of vectors", "leave --target out")
        checkpoint = StaticCheckpoint.open_static(source, task=options.task)
    else:
        checkpoint = Checkpoint.open(source, task=options.task, allow_pickle=options.allow_pickle)
    models = _Models(checkpoint, options)
    modality = find_modality(models.first, checkpoint, text=options.text)
    side = find_side(models.first, checkpoint.task)
    of_pages = is_of_pages(checkpoint)
    if (side is not None or of_pages) and not target.takes_any_graph:
        raise TargetError(f"the target {target.name} takes no side of an encoder of pictures", "leave --target out")
    if (side is not None or of_pages) and options.vectors_as is not None:
        raise ExportError(
            "--vectors_as was passed for an encoder of pictures, whose vectors are compared as floats",
            "leave it out; a corpus of pictures is stored so by `onnxtool infer --output FOLDER/ --vectors_as`",
        )
    modality = modality if side is None else with_padding(models.first, modality, side)
    text = text_of(modality)
    tokenizer, max_length = (None, None) if text is None else (text.tokenizer, text.longest)
    task, head_name, head, why = checkpoint.task, "logits", None, ""
    notes: tuple[str, ...] = ()
    pipeline: ExportPipeline
    specification: TargetSpecification | None = None
    if task in _WITH_CACHE:
        if not target.takes_any_graph:
            target.use_for(task, (), pads_left=False)
        # Decoders that hear sound are among the sequence-to-sequence models of transformers.
        if task == TEXT_TO_TEXT_WITH_CACHE and getattr(checkpoint.config, "is_encoder_decoder", False):
            check_model_output(encoder_path(paths.graph), force=options.force)
            pipeline = EncoderDecoderPipeline.of(models.first, modality)
        else:
            task, pipeline = TASK_WITH_CACHE, GenerationPipeline.of(modality)
    else:
        signature = detect_signature(models.first, modality)
        specification = specify(target, checkpoint, signature, tokenizer)
        if specification is None:
            if of_pages:
                choice = choose_no_head(options.head, source)
            elif side is None:
                choice = choose_head(options.head, checkpoint, signature, task=options.task)
            else:
                both = find_both_sides(models.first, checkpoint)
                scales = scales_to_length_one(models.first, modality, both, side)
                choice = choose_side_head(
                    options.head, side, source, signature, scales=scales, pads=isinstance(modality, PaddedTexts)
                )
            head_name, head, why = choice.name, choice.head, choice.why
            if head is not None and tokenizer is not None:
                require_expanding_token(source, tokenizer)
            if head is not None and options.dimensions is not None:
                head = head.truncated(options.dimensions, signature)
            if head is not None and head.name == "embedding" and options.vectors_as is not None:
                stored, few = choose_storage(options, models.first, head, modality, source)
                head, notes = head.stored_as(stored, signature), notes + few
        else:
            head_name, head, signature = specification.head_name, specification.head, specification.narrow(signature)
            modality = specification.fed(modality)
        task = task if head is None else head.task
        pools = head is not None and any(isinstance(module, Pooling) for module in head.modules)
        if side is None and (pools or task == "sentence-similarity"):
            _choose_states(models, source, head, specification)
        pipeline = SingleCallPipeline.of(
            models.first, modality, signature, head, specification, keep_raw=options.keep_raw
        )
    _refuse_unused(options, checkpoint.task, head, text)
    chat = None if text is None else check_chat_template(source, tokenizer, task)
    if chat is not None and specification is not None and not specification.needs_module_weights:
        raise TargetError(
            f"{source.model_name} puts texts into a chat template, and {target.title} would run it on them as they are",
            "pass --target plain, and read texts with `onnxtool infer` or onnxtool.load",
        )
    stopwatch.lap("load")
    reasons = ((why,) if why else ()) + notes
    return _Job(
        options, paths, checkpoint, models, pipeline, specification, task, head_name, tokenizer, max_length, reasons,
        on_progress, stopwatch,
    )  # fmt: skip


def _export_by(strategy: ExportStrategy, job: _Job) -> ExportReport:
    options, checkpoint, stopwatch = job.options, job.checkpoint, job.stopwatch
    model = job.models.take(strategy.attention)
    architecture = type(model).__name__
    stopwatch.lap("load")
    job.on_progress(f"tracing {architecture} by {strategy.name}")
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
    with staged(paths.graph, force=options.force, root=paths.root) as staging:
        job.on_progress(f"writing {paths.graph}")
        path = save_model(graph, staging)
        twin = _write_second(specification, second, path)
        before = [] if encoder is None else [save_beside(encoder, staging, encoder_path(path))]
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


def _write_sidecar_files(job: _Job, folder: Path) -> None:
    """Write the sidecar files to `folder`: the checkpoint's own, and those of the target."""
    checkpoint, specification = job.checkpoint, job.specification
    with_weights = specification is not None and specification.needs_module_weights
    write_sidecar_files(checkpoint.source, job.tokenizer, folder, job.paths.files, module_weights=with_weights)
    if specification is not None:
        specification.write_files(checkpoint.config, job.tokenizer, folder, job.max_length)


def _describe_decoder(job: _Job) -> dict[str, str]:
    """Return what the decoder of an encoder-decoder says of itself: where its encoder is, and what bounds it."""
    longest = job.pipeline.longest if isinstance(job.pipeline, EncoderDecoderPipeline) else None
    limit = {} if longest is None else {MAX_DECODER_LENGTH_KEY: str(longest)}
    return {ENCODER_KEY: encoder_path(job.paths.graph).name, **limit}


def _write_second(specification: TargetSpecification | None, second: Any, path: Path) -> list[Path]:
    """Write the second graph beside the first, where the target has one."""
    if specification is None or second is None:
        return []
    twin = specification.target.second_path(path, specification.model.name)
    write_inline(second, twin)
    return [twin]


def _verify(path: Path, job: _Job, strategy: ExportStrategy) -> Verification:
    """Compare the file with a model that was loaded again: running and tracing may change a model."""
    job.on_progress("verifying against PyTorch")
    fixed = tuple(sorted(strategy.fixed.items()))
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
