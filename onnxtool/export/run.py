"""Export a checkpoint: load it once, then trace, save and verify with one strategy after another until one works."""

from __future__ import annotations

import filecmp
import gc
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder, path_parts
from onnxtool.checkpoint.sentence_modules import ROUTER_NAME
from onnxtool.errors import ExportError, ModelFileError, OutputExistsError, SessionError, VerificationError, some
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.decoding.encoder_decoder import encoder_path
from onnxtool.export.modalities.modality import SEQUENCE
from onnxtool.export.options import ExportOptions, check_opset
from onnxtool.export.preparation import Job, Request, find_requests, prepare
from onnxtool.export.report import ExportReport
from onnxtool.export.runtime_adapters import open_inputs
from onnxtool.export.sidecar_files import (
    CARD,
    SIDECAR_FILES,
    module_files,
    obsolete_sidecar_files,
    state_length,
    without_section,
    write_json,
    write_sidecar_files,
)
from onnxtool.export.source import all_files
from onnxtool.export.tracing import ExportStrategy
from onnxtool.export.verification import ExportVerifier, ShorterError, lengths_of
from onnxtool.export.weights import FLOAT_CHECKPOINT
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import (
    MAX_INLINE_BYTES,
    NONE_INLINE,
    ModelFile,
    Staging,
    check_model_output,
    check_sidecar_files,
    disk_failures,
    save_beside,
    save_model,
    staged,
)
from onnxtool.model_file.domains import default_opset
from onnxtool.model_file.metadata import (
    DECODER_KEY,
    DTYPE_KEY,
    FILES_KEY,
    HEAD_KEY,
    INPUTS_KEY,
    MAX_LENGTH_KEY,
    PADDING_KEY,
    READS_KEY,
    ROUTE_KEY,
    TASK_KEY,
    TOKENIZER_KEY,
    VERIFIED_LENGTH_KEY,
    WEIGHTS_KEY,
    adapters_entry,
    step_entry,
)
from onnxtool.model_file.weights import write_inline
from onnxtool.options import checked
from onnxtool.progress import tell
from onnxtool.reading import read_bytes
from onnxtool.reports import PlannedFile, WritePlan, planned_files
from onnxtool.runtime.adapters import adapter_file
from onnxtool.runtime.providers import CPU, ExecutionProvider, find_library
from onnxtool.runtime.recipes import InputStamp
from onnxtool.runtime.sizes import SizeResult, read_sizes, set_files
from onnxtool.runtime.tokens import OwnTokenizer, hard_texts, read_folder
from onnxtool.verification import Verification
from onnxtool.version import __version__

_LOGGER = logging.getLogger(__name__)
_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")

# The names that onnxruntime's optimizer and tutorials use, and transformers' common names for them.
_FIGURES = {
    "num_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
}
_Failure = ExportError | VerificationError | SessionError


@checked
def export_model(options: ExportOptions, *, add_files: Callable[[Path, Path], None] | None = None) -> ExportReport:
    """Export a checkpoint to an ONNX file with its tokenizer or processor next to it, verified against PyTorch.

    A checkpoint whose Router encodes queries and documents with different models becomes two files, both or none.

    Strategies are tried in order until one gives a file with the model's outputs; the report names it, and its notes
    say why earlier ones failed.

    Args:
        options: export options.
        add_files: called with the verified graph, while it is staged, and the path that it gets, to write files next to
            it that appear together with it; None for no others.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: no strategy gives a graph that matches the model, or none supports the opset.
        VerificationError: the graph's outputs differ from the model's; no file is left.
        OutputExistsError: the output exists and `force` is not set.
        OutputWriteError: the output cannot be written.
    """
    with ExitStack() as outputs:
        check_opset(options.opset)
        if options.precisions and add_files is None:
            raise ExportError("export_model writes no further precisions", "call onnxtool.export_variants instead")
        exported = [_export(request, outputs) for request in find_requests(options)]
        reports = [report for report, _ in exported]
        if add_files is not None:
            add_files(exported[0][1], Path(reports[0].output))
        if len(reports) == 1:
            return reports[0]
        _require_comparable(*reports)
        return replace(reports[0], partner=reports[1])


def _require_comparable(first: ExportReport, second: ExportReport) -> None:
    """Refuse query and document vectors that cannot be compared."""
    shapes = [(report.outputs[0].name, report.outputs[0].shape[-1]) for report in (first, second)]
    if shapes[0] != shapes[1]:
        vectors = " and ".join(f"{name} of {width}" for name, width in shapes)
        raise ExportError(
            f"the routes of {first.source} give {vectors}, which cannot be compared", "export one of them with --route"
        )


def _export(request: Request, outputs: ExitStack) -> tuple[ExportReport, Path]:
    """Export one file, which gets its name when `outputs` closes, with the first strategy that works."""
    options = request.options
    job = prepare(request)
    _check_files(job)
    verifier = ExportVerifier(job)
    failures: list[tuple[ExportStrategy, _Failure]] = []
    for strategy in job.plan.pipeline.strategies(options.exporter, verified=options.verify):
        if _has_longer_texts(failures, strategy):
            break
        if (strategy.fixed and options.require_dynamic) or _would_take_too_long(strategy, failures):
            continue
        try:
            report, graph = _export_by(strategy, job, verifier, outputs)
        except (ExportError, VerificationError, SessionError) as error:
            failures.append((strategy, error))
            _LOGGER.info("strategy %s failed: %s", strategy.name, _without_staging(error.message))
        else:
            return _with_reasons(report, strategy, failures), graph
    shorter = _best_shorter(failures)
    other_failures = [row for row in failures if shorter is None or row[1] is not shorter[1]]
    while shorter is not None:
        strategy, limit = shorter
        try:
            report, graph = _export_by(strategy, replace(job, lengths=limit.lengths), verifier, outputs)
        except ShorterError as error:  # below the maximum, previously untested thresholds are tried
            shorter = (strategy, error)
        else:
            return _with_reasons(report, strategy, other_failures), graph
    if not failures:
        raise ExportError(
            f"{options.exporter} cannot trace for the task {job.plan.task}", "leave --exporter out, or pass another one"
        )
    failed = _sum_up(failures)
    if job.checkpoint.quantizer:
        failed.hint = f"{job.checkpoint.quantizer} does not compute with its weights alone; {FLOAT_CHECKPOINT}"
    raise failed


def _best_shorter(failures: Sequence[tuple[ExportStrategy, _Failure]]) -> tuple[ExportStrategy, ShorterError] | None:
    """Return the strategy whose file works for the longest texts, the first in a tie; None if there is none."""
    shorter = [(strategy, error) for strategy, error in failures if isinstance(error, ShorterError)]
    return max(shorter, key=lambda row: row[1].longest, default=None)


def _has_longer_texts(failures: Sequence[tuple[ExportStrategy, _Failure]], strategy: ExportStrategy) -> bool:
    """Return whether a dynamic file for shorter texts beats the next: a file of one length, or with the same limit."""
    shorter = _best_shorter(failures)
    if shorter is None:
        return False
    return shorter[1].is_own or shorter[1].longest >= strategy.fixed.get(SEQUENCE, shorter[1].longest + 1)


def _with_reasons(
    report: ExportReport, strategy: ExportStrategy, failures: Sequence[tuple[ExportStrategy, _Failure]]
) -> ExportReport:
    """Add to a report why earlier strategies failed."""
    _LOGGER.info("strategy %s is taken", strategy.name)
    reasons = dict.fromkeys(_without_staging(failure.message) for _, failure in failures)
    return replace(report, notes=(*report.notes, *(f"{reason}; used {strategy.name} instead" for reason in reasons)))


def plan_export(options: ExportOptions) -> WritePlan:
    """Check the options and the checkpoint's configuration, and describe what would be written; loads no weights.

    Raises:
        OnnxtoolError: as `export_model`, as far as it can be known without the model.
    """
    plans = [_plan_files(request) for request in find_requests(options)]
    files = [file for plan in plans for file in plan.files]
    return WritePlan("export", tuple(files), tuple(dict.fromkeys(note for plan in plans for note in plan.notes)))


def _plan_files(request: Request) -> WritePlan:
    options, source, target, paths = request.options, request.source, request.target, request.paths
    checkpoint = request.open()
    graphs = [paths.graph]
    if checkpoint.writes_from_encoder:
        graphs.append(encoder_path(paths.graph))
        check_model_output(graphs[-1], force=options.force)
    precisions = target.precisions(options.precisions)
    if options.sizes:
        graphs += set_files(paths.graph, options.sizes)
    if len(graphs) > 1 and options.sizes:
        graphs.append(paths.graph.with_name(f"{paths.graph.name}.data"))
    graphs += [paths.graph.with_name(adapter_file(paths.graph, path_parts(name)[-1])) for name in options.adapters]
    graphs += [paths.graph.with_name(name) for precision in precisions for name in target.variants[precision]]
    graphs += [paths.files / CARD] if precisions else []
    names = dict.fromkeys((*SIDECAR_FILES, *(all_files() if source.is_local else ()), *module_files(source)))
    if source.route is not None:  # a route's files describe only its modules
        names.pop(ROUTER_NAME)
    sidecar_files = {name: file for name in names if (file := source.locate(name)) is not None}
    existing = {name for name in sidecar_files if (paths.files / name).is_file()}
    same = {name for name in existing if filecmp.cmp(sidecar_files[name], paths.files / name, shallow=False)}
    if existing > same and not options.force:
        raise OutputExistsError(
            f"{paths.files / min(existing - same)} already exists with different contents",
            "pass --force to replace it, or another --output",
        )
    change = {
        name: "unchanged" if name in same else "replaced" if name in existing else "new" for name in sidecar_files
    }
    sidecars = (PlannedFile(str(paths.files / name), change[name]) for name in sidecar_files)
    notes = [f"other files that a tokenizer of {checkpoint.architecture} needs are also written"]
    if source.locate(TOKENIZER_NAME) is not None:
        notes.append(f"{TOKENIZER_NAME} is rewritten if transformers overrides it by the checkpoint's other files")
    if not target.takes_any_graph:
        notes.append(f"{target.title} gets additional files, and may refuse the model once it is loaded")
    if not source.is_static and sum(file.stat().st_size for file in checkpoint.weight_files) > MAX_INLINE_BYTES:
        notes.append("weights of more than 1.9 GB go to a separate file next to the graph")
    return WritePlan("export", (*planned_files(graphs), *sidecars), tuple(notes))


def _would_take_too_long(strategy: ExportStrategy, failures: Sequence[tuple[ExportStrategy, _Failure]]) -> bool:
    """Return whether its exporter has already timed out: another attention has as many sizes to reason about."""
    return strategy.timeout_s is not None and any(
        earlier.exporter is strategy.exporter and isinstance(error.__cause__, TimeoutError)
        for earlier, error in failures
    )


def _export_by(
    strategy: ExportStrategy, job: Job, verifier: ExportVerifier, outputs: ExitStack
) -> tuple[ExportReport, Path]:
    """Trace, write, verify and stamp with one strategy; return the report and the staged graph."""
    options, paths = job.request.options, job.request.paths
    specification, stopwatch = job.plan.specification, job.stopwatch
    model = job.models.take(strategy.attention)
    architecture = type(model).__name__
    stopwatch.lap("load")
    tell(f"tracing {architecture} by {strategy.name}")
    traced = [*job.plan.pipeline.trace(model, strategy, options.opset)]
    del model
    job = replace(job, lengths=lengths_of(job, strategy).seen_in(traced[-1]))
    further = _finish_graphs(job, strategy, traced)
    stopwatch.lap("trace")
    with ExitStack() as output:
        staging = output.enter_context(staged(paths.graph, force=options.force, root=paths.root))
        tell(f"writing {paths.graph}")
        written, num_verified = _write_graphs(job, traced, further, staging)
        gc.collect()  # graphs are full of reference cycles, and hold as much memory as the model
        sidecars = _write_sidecars(job, staging)
        stopwatch.lap("write")
        files = list(map(ModelFile.open, written))
        all_sizes = read_sizes(options.sizes, files[0]) if options.sizes else {}
        if options.sizes and len(files) > 1:
            raise ExportError(f"--sizes is for one graph, and {architecture} becomes {len(files)}", "leave it out")
        verifications, notes = _verify_files(job, strategy, verifier, files[:num_verified])
        if specification is not None:
            specification.check(sidecars, files[0])
        _stamp_files(job, strategy, verifier, files, verifications, sidecars)
        if options.reads_texts:
            from onnxtool.export.in_graph import put_tokenizer

            own = sidecars if (sidecars / TOKENIZER_NAME).is_file() else paths.files
            files[0] = put_tokenizer(files[0], staging, own, options)
            stopwatch.lap("tokenizer")
        size_results: tuple[SizeResult, ...] = ()
        if options.sizes:
            files[0], size_results = _write_sizes(job, strategy, verifier, files[0], staging, all_sizes)
        if specification is not None:
            specification.pack(sidecars, files[0].path)
        outputs.push(output.pop_all())
    report = _report(job, strategy, files[0], verifications[0], architecture, size_results)
    return replace(report, notes=(*report.notes, *notes)), files[0].path


def _finish_graphs(job: Job, strategy: ExportStrategy, traced: Sequence[ir.Model]) -> dict[str, ir.Model]:
    """Stamp all, give the first its target's form, and return the target's further graphs by file name."""
    graph, specification = traced[0], job.plan.specification
    described = {**_describe(job, strategy), **job.request.stamps}
    for model, links in zip(traced, job.plan.pipeline.links(job.request.paths.graph), strict=True):
        model.metadata_props.update({**described, **links})
    if job.models.adapters:
        open_inputs(graph.graph, job.models.adapters)
    opset = default_opset(graph.opset_imports)
    further = {} if specification is None else specification.adapt(graph, _longest(job))
    _LOGGER.info("strategy %s traced %d nodes, opset %d", strategy.name, graph.graph.num_nodes(), opset)
    return dict(further)


def _write_graphs(
    job: Job, traced: list[ir.Model], further: dict[str, ir.Model], staging: Staging
) -> tuple[list[Path], int]:
    """Write all graphs and adapters; return the paths, and how many are verified: an encoder is with its decoder.

    `traced` and `further` are emptied, because they hold as much memory as the model.
    """
    paths, sizes = job.request.paths, job.request.options.sizes
    graph, *encoders = traced
    staging.data_suffix = job.request.target.data_suffix
    adapters = [
        adapter.write(staging.folder / adapter_file(paths.graph, adapter.name), graph.graph)
        for adapter in job.models.adapters
    ]
    graph.metadata_props.update(adapters_entry(adapters) if adapters else {})
    is_set = sizes and set_files(paths.graph, sizes)
    written = [save_model(graph, staging, max_inline_bytes=NONE_INLINE if is_set else MAX_INLINE_BYTES)]
    for name, other in further.items():
        written.append(written[0].with_name(name))
        write_inline(other, written[-1])
    num_verified = len(written)
    written += [save_beside(encoder, staging, encoder_path(written[0]).name) for encoder in encoders]
    if not encoders and paths.graph.is_file():
        staging.obsolete.extend(_encoder_of(paths.graph))
    traced.clear()
    further.clear()
    return written, num_verified


def _write_sidecars(job: Job, staging: Staging) -> Path:
    """Write tokenizer, configuration and card next to the graph, mark what they replace, and return their folder."""
    paths = job.request.paths
    sidecars = staging.folder / paths.files.relative_to(paths.root)
    _write_sidecar_files(job, sidecars)
    staging.obsolete.extend(obsolete_sidecar_files(job.request.source, sidecars, paths.files))
    if job.request.options.force:  # files in other precisions belong to the graph that is replaced
        for name in job.request.target.variant_names:
            staging.remove(paths.graph.with_name(name))
        staging.obsolete.extend(without_section(paths.files / CARD, sidecars / CARD))
    return sidecars


def _verify_files(
    job: Job, strategy: ExportStrategy, verifier: ExportVerifier, files: Sequence[ModelFile]
) -> tuple[list[Verification | None], list[str]]:
    """Compare each file, and each adapter, with PyTorch; return the figures, None without --verify, and notes."""
    if not job.request.options.verify:
        return [None], []
    figures: list[Verification | None] = [verifier.verify(file, strategy, job.lengths) for file in files]
    notes = []
    for name, of_adapter in verifier.adapted.items():
        tell(f"comparing the adapter {name}")
        error = of_adapter.verify(files[0].with_adapter(name), strategy, job.lengths).max_abs_error
        notes.append(f"with the adapter {name}, the max_abs_error from PEFT is {error:.3g}")
    return figures, notes


def _stamp_files(
    job: Job,
    strategy: ExportStrategy,
    verifier: ExportVerifier,
    files: Sequence[ModelFile],
    verifications: Sequence[Verification | None],
    sidecars: Path,
) -> None:
    """Record inputs, verification and tokenizer in each file; an encoder shares the figures of its decoder."""
    inputs, path = job.plan.pipeline.inputs(strategy, verifier.cases(strategy, job.lengths)), sidecars / TOKENIZER_NAME
    has_tokenizer = job.tokenizer is not None and path.is_file()
    tokenizer_sha256 = hashlib.sha256(read_bytes(path)).hexdigest() if has_tokenizer else ""
    for number, file in enumerate(files):
        figures = verifications[number if number < len(verifications) else 0]
        stamp = InputStamp.of(file.structure.inputs, *inputs[number if number < len(inputs) else 0])
        if stamp.inputs:  # of the model's; a target may have others
            file.stamp({INPUTS_KEY: stamp.json})
        if figures is not None and job.lengths.longest is not None:
            file.stamp({VERIFIED_LENGTH_KEY: str(verifier.longest_case(figures))})
        if tokenizer_sha256:  # this tokenizer.json reads texts as transformers does
            file.stamp({TOKENIZER_KEY: tokenizer_sha256})
        file.stamp(step_entry("export", figures, exporter=strategy.exporter.name))


def _write_sizes(
    job: Job,
    strategy: ExportStrategy,
    verifier: ExportVerifier,
    file: ModelFile,
    staging: Staging,
    all_sizes: Mapping[str, dict[str, int]],
) -> tuple[ModelFile, tuple[SizeResult, ...]]:
    """Write a file for each of --sizes, each compared with PyTorch up to its own length."""
    from onnxtool.runtime.made_files import write_sizes

    def check(fixed_file: ModelFile) -> None:
        longest = min(filter(None, (job.lengths.longest, fixed_file.sizes[0].sizes.get(SEQUENCE))), default=None)
        verifier.verify(fixed_file, strategy, replace(job.lengths, longest=longest))

    place, is_checked = ExecutionProvider.parse(CPU), job.request.options.verify
    written = write_sizes(file, staging, all_sizes, place if is_checked else None, check if is_checked else None)
    job.stopwatch.lap("sizes")
    return written


def _report(
    job: Job,
    strategy: ExportStrategy,
    exported: ModelFile,
    verification: Verification | None,
    architecture: str,
    sizes: tuple[SizeResult, ...],
) -> ExportReport:
    plan, paths, specification = job.plan, job.request.paths, job.plan.specification
    return ExportReport(
        output=str(paths.graph),
        files=str(paths.files),
        source=job.request.source.model_name,
        model_type=job.checkpoint.config.model_type,
        architecture=job.checkpoint.architecture,
        task=plan.task,
        head=plan.head_name,
        exporter=strategy.exporter.name,
        attention=strategy.attention or "",
        fixed_axes=dict(strategy.fixed),
        opset=default_opset(exported.structure.opsets),
        inputs=exported.structure.inputs,
        outputs=exported.structure.outputs,
        metadata=exported.metadata,
        verification=verification,
        notes=(
            *plan.reasons,
            *_loading_notes(job.checkpoint),
            *_tokenizer_notes(job),
            *plan.pipeline.notes(architecture, strategy),
            *job.lengths.notes,
            *(() if exported.text_input is None else exported.text_input.notes),
            *(() if specification is None else filter(None, (specification.note, specification.left_out))),
        ),
        duration_ms=job.stopwatch.laps_ms,
        sizes=sizes,
    )


def _write_sidecar_files(job: Job, folder: Path) -> None:
    """Write the sidecar files to `folder`: the checkpoint's own, and the target's."""
    checkpoint, source, specification = job.checkpoint, job.request.source, job.plan.specification
    with_weights = specification is not None and specification.usage.after is None
    write_sidecar_files(source, job.tokenizer, folder, job.request.paths.files, module_weights=with_weights)
    if source.base is not None:
        write_json(folder / "config.json", checkpoint.adapted_config)
    if job.lengths.longest is not None and job.lengths.longest < (job.lengths.stated or 0):
        state_length(folder, job.lengths.longest)
    if specification is not None:
        specification.files(folder, _longest(job))


def _longest(job: Job) -> int | None:
    """Return the maximum number of tokens in a text, by the checkpoint's modules and the file; None for no limit."""
    limits = (job.request.source.sentence_modules.max_sequence_length, job.lengths.longest)
    return min(filter(None, limits), default=None)


def _check_files(job: Job) -> None:
    """Write the sidecar files to a scratch folder, and tokenize hard texts with them as onnxtool and the target do.

    Raises:
        CheckpointError: transformers tokenizes one of the texts differently.
        OutputExistsError: a file with other content exists, and `force` is not set.
        OutputWriteError: the files cannot be written.
    """
    request, specification = job.request, job.plan.specification
    source = request.source
    if request.options.reads_texts:
        find_library()
    with disk_failures(request.paths.graph), temporary_folder() as folder:
        _write_sidecar_files(job, folder)
        if not request.options.force:
            check_sidecar_files(folder, request.paths.files)
        if not (folder / TOKENIZER_NAME).is_file():  # a checkpoint exported into its own folder keeps its own
            folder = request.paths.files
        if job.tokenizer is None or not (folder / TOKENIZER_NAME).is_file():
            return
        texts = hard_texts(job.tokenizer)
        own = OwnTokenizer(job.tokenizer, source.model_name, source.sentence_modules.adds_special_tokens)
        own.check("onnxtool", read_folder(CheckpointFolder(folder)), texts)
        if specification is not None:
            specification.check_tokens(own, folder, texts)


def _encoder_of(decoder: Path) -> list[Path]:
    """Return the encoder that an earlier export wrote next to the file being replaced, if there is one."""
    path = encoder_path(decoder)
    try:
        is_its_own = path.is_file() and ModelFile.open(path).metadata.get(DECODER_KEY) == decoder.name
    except ModelFileError:
        return []
    return [path] if is_its_own else []


def _describe(job: Job, strategy: ExportStrategy) -> dict[str, str]:
    """Return the metadata of an export; the same export with the same packages always has the same metadata.

    Folders are named without their path, which is useless elsewhere.
    """
    checkpoint, options, max_length = job.checkpoint, job.request.options, job.lengths.longest
    config = checkpoint.config
    figures = {key: _figure(config.get_text_config(), name) for key, name in _FIGURES.items()}
    source = checkpoint.source
    metadata = {
        "model_type": str(config.model_type),
        **{key: str(value) for key, value in figures.items() if isinstance(value, int)},
        "onnxtool.source": source.origin,
        "onnxtool.revision": checkpoint.revision,
        WEIGHTS_KEY: checkpoint.weights_sha256,
        "onnxtool.checkpoint_sha256": checkpoint.checkpoint_sha256,
        "onnxtool.adapter_base": "" if source.base is None else source.base.name,
        ROUTE_KEY: source.route or "",
        READS_KEY: ", ".join(
            task for task, route in source.sentence_modules.route_of.items() if task and route == source.route
        ),
        "onnxtool.architecture": checkpoint.architecture,
        "onnxtool.random_weights": ", ".join(checkpoint.initialized),
        **source.license.stamps,
        TASK_KEY: job.plan.task,
        HEAD_KEY: job.plan.head_name,
        "onnxtool.exporter": strategy.exporter.name,
        "onnxtool.attention": strategy.attention or "",
        "onnxtool.prompts": strategy.prompts,
        "onnxtool.fixed_axes": strategy.fixed_axes,
        DTYPE_KEY: options.dtype,
        FILES_KEY: job.request.paths.stamp,
        PADDING_KEY: job.plan.padding,
        MAX_LENGTH_KEY: "" if max_length is None else str(max_length),
        "onnxtool.options": json.dumps(options.choices, sort_keys=True) if options.choices else "",
        "onnxtool.versions": ", ".join([f"onnxtool {__version__}", *(f"{name} {version(name)}" for name in _PACKAGES)]),
        "onnxtool.date": stamped_date(),
    }
    return {key: value for key, value in metadata.items() if value}


def _figure(config: Any, name: str) -> Any:
    """Return a number of an architecture; None if it has none, or it differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # from transformers, for a number that differs between layers
        return None


def stamped_date() -> str:
    """Return the day in SOURCE_DATE_EPOCH, if set: the export day would make each export a different file.

    Raises:
        ExportError: the variable is set to something other than seconds.
    """
    epoch: Any = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not epoch:
        return ""
    try:
        return datetime.fromtimestamp(int(epoch), tz=UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        raise ExportError(
            f"SOURCE_DATE_EPOCH is {epoch!r}, not a number of seconds", "unset it, or set it to e.g. $(date +%s)"
        ) from None


def _loading_notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Report what in the checkpoint the file lacks, and what the file has that the checkpoint lacks."""
    notes = list(checkpoint.notes)
    if checkpoint.initialized:
        notes.append(f"random, because the checkpoint does not have them: {some(checkpoint.initialized)}")
    if checkpoint.is_pickle:
        notes.append(f"the weights came from a pickle ({checkpoint.weight_files[0].name})")
    return tuple(notes)


def _tokenizer_notes(job: Job) -> tuple[str, ...]:
    """Report if no file of the export can tokenize text."""
    tokenizer = job.tokenizer
    if tokenizer is None or hasattr(tokenizer, "backend_tokenizer"):
        return ()
    if job.request.source.locate(TOKENIZER_NAME) is not None:  # already compared
        return ()
    return (f"no {TOKENIZER_NAME}, because {type(tokenizer).__name__} runs in Python: `onnxtool infer` reads no texts",)


def _without_staging(message: str) -> str:
    """Remove the staging folder from a message: it has a random name, and no longer exists when a user reads it."""
    return re.sub(r"\S*\.partial/", "", message)


def _sum_up(failures: Sequence[tuple[ExportStrategy, _Failure]]) -> _Failure:
    """Return the only error; of several, the first if all are from verification, else one that lists all reasons."""
    errors = [error for _, error in failures]
    if len(errors) == 1 or all(isinstance(error, VerificationError) for error in errors):
        errors[0].message = _without_staging(errors[0].message)
        return errors[0]
    reasons = "\n".join(f"  {strategy.name}: {_without_staging(error.message)}" for strategy, error in failures)
    return ExportError(f"no tracing method gives a file that agrees with the model:\n{reasons}", errors[0].hint)
