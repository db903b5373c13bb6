"""Checkpoint to file: load, trace, put a head on, save, verify against PyTorch, stamp."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxtool.errors import ExportError, VerificationError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.companions import Pooling, check_splade, obsolete_companions, read_pooling, write_companions
from onnxtool.export.graph import tidy
from onnxtool.export.heads import Head, append_head, choose_head
from onnxtool.export.provenance import describe
from onnxtool.export.signature import Signature, detect_signature
from onnxtool.export.source import Source
from onnxtool.export.tracing import EXPORTER_NAMES, EXPORTERS, Exporter, trace
from onnxtool.export.verification import Prover, longest_text, prove, tokenize
from onnxtool.metadata import stamp_step
from onnxtool.model_file import ModelFile, check_model_output, save_model, staged
from onnxtool.reports import ExportReport
from onnxtool.runtime.comparison import TOLERANCES, Answers, Tolerance
from onnxtool.runtime.timing import Stopwatch

__all__ = ["ExportOptions", "export_model"]

DTYPES = {"float32": "fp32", "float16": "fp16"}
_SAMPLE_TEXTS = ("onnxtool traces a model on two texts of different lengths", "the second is shorter")


@dataclass(frozen=True)
class ExportOptions:
    """What to export and how.

    Attributes:
        output: the ONNX file; None for models/NAME.onnx.
        text: what to trace the model on, beside a text of our own.
        atol: replaces the tolerance of the dtype; so does `rtol`.
    """

    model_name: str
    output: Path | None = None
    task: str = "auto"
    head: str = "auto"
    exporter: str = "auto"
    opset: int | None = None
    text: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    allow_missing_weights: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    verify: bool = True
    atol: float | None = None
    rtol: float | None = None
    force: bool = False

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of the dtype, with what the user replaced."""
        base = TOLERANCES[DTYPES[self.dtype]]
        return Tolerance(
            base.atol if self.atol is None else self.atol, base.rtol if self.rtol is None else self.rtol, base.cosine
        )


@dataclass(frozen=True)
class _Job:
    """An export under way."""

    options: ExportOptions
    output: Path
    checkpoint: Checkpoint
    tokenizer: Any
    on_progress: Callable[[str], None]
    stopwatch: Stopwatch

    def load_model(self, exporter: Exporter) -> Any:
        """Load the weights as this exporter wants them."""
        return self.checkpoint.load_model(
            dtype=self.options.dtype,
            device=self.options.device,
            attention=exporter.attention,
            allow_missing_weights=self.options.allow_missing_weights,
        )


def export_model(options: ExportOptions, *, on_progress: Callable[[str], None] = lambda _stage: None) -> ExportReport:
    """Export a checkpoint to an ONNX file with its tokenizer beside it, verified against PyTorch.

    With `exporter="auto"` the exporters are tried in their order; the report's notes say which failed and why.

    Raises:
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        ExportError: no exporter gives a graph that follows the model.
        VerificationError: the graph's answers are not the model's; no file is left.
        OutputExistsError: the output is there and `force` is not set.
        OutputWriteError: the output cannot be written.
    """
    stopwatch = Stopwatch()
    source = Source.find(options.model_name, revision=options.revision, trust_remote_code=options.trust_remote_code)
    output = options.output or Path("models") / f"{source.name}.onnx"
    check_model_output(output, force=options.force)
    on_progress(f"loading {options.model_name}")
    checkpoint = Checkpoint.open(source, task=options.task)
    job = _Job(options, output, checkpoint, checkpoint.load_tokenizer(), on_progress, stopwatch)
    exporters = [exporter for exporter in EXPORTERS if options.exporter in ("auto", exporter.name)]
    failures: list[ExportError | VerificationError] = []
    for exporter in exporters:
        try:
            report = _export_with(exporter, job)
        except (ExportError, VerificationError) as error:
            failures.append(error)
            if exporter is exporters[-1]:
                raise _sum_up(failures) from None
        else:
            notes = tuple(f"{failure.message}; used {exporter.name} instead" for failure in failures)
            return replace(report, notes=notes)
    raise ExportError(f"no exporter called {options.exporter}", f"use one of {', '.join(EXPORTER_NAMES)}")


def _export_with(exporter: Exporter, job: _Job) -> ExportReport:
    options, checkpoint, stopwatch = job.options, job.checkpoint, job.stopwatch
    model = job.load_model(exporter)
    signature = detect_signature(model, job.tokenizer)
    head_name, head = choose_head(options.head, signature)
    task = checkpoint.task if head is None else head.task
    pooling = _pooling_for(head_name, job)
    stopwatch.lap("load")
    job.on_progress(f"tracing {type(model).__name__} with {exporter.name}")
    graph = trace(exporter, model, _sample(job, model, signature), signature, options.opset)
    tidy(graph, signature)
    if head is not None:
        append_head(graph, head, pooling)
    files = job.output.parent / job.output.stem
    graph.metadata_props.update(
        describe(
            checkpoint,
            task=task,
            head=head_name,
            exporter=exporter.name,
            files=files.name,
            dtype=options.dtype,
            max_length=longest_text(model, job.tokenizer),
        )
    )
    opset = graph.opset_imports[""]
    stopwatch.lap("trace")
    with staged(job.output, force=options.force) as staging:
        job.on_progress(f"writing {job.output}")
        path = save_model(graph, staging)
        del graph, model
        gc.collect()  # graphs are full of cycles, and what they hold is as large as the model
        companions = staging.folder / files.name
        write_companions(checkpoint.source, job.tokenizer, companions, files)
        staging.obsolete.extend(obsolete_companions(checkpoint.source, companions, files))
        stopwatch.lap("write")
        verification = None
        if options.verify:
            job.on_progress("verifying against PyTorch")
            answers = _ask_pytorch(path, exporter, job, signature, head, pooling)
            verification = prove(path, answers, options.tolerance)
            stopwatch.lap("verify")
        stamp_step(path, "export", verification, exporter=exporter.name)
        file = ModelFile.open(path)
    return ExportReport(
        output=str(job.output),
        files=str(files),
        source=checkpoint.source.model_name,
        model_type=checkpoint.config.model_type,
        architecture=checkpoint.architecture,
        task=task,
        head=head_name,
        exporter=exporter.name,
        opset=opset,
        inputs=file.structure.inputs,
        outputs=file.structure.outputs,
        metadata=file.metadata,
        verification=verification,
        notes=(),
        duration_ms=stopwatch.laps_ms,
    )


def _ask_pytorch(
    path: Path, exporter: Exporter, job: _Job, signature: Signature, head: Head | None, pooling: Pooling
) -> Answers:
    """Ask a model that was loaded anew: running and tracing may change one for good, and the file with it."""
    # In float32 whatever the weights are: half precision of PyTorch is a reference with errors of its own.
    prover = Prover(job.load_model(exporter).float(), job.tokenizer, signature, head, pooling)
    answers = prover.ask(path)
    del prover
    gc.collect()  # its weights make room for onnxruntime's
    return answers


def _pooling_for(head_name: str, job: _Job) -> Pooling:
    """Return how the head pools, once the checkpoint and its tokenizer agree with it."""
    source = job.checkpoint.source
    if head_name == "splade":
        check_splade(source)
    if head_name != "embedding":
        return Pooling()
    pooling = read_pooling(source)
    if pooling.mode == "cls" and job.tokenizer.padding_side == "left":
        raise ExportError(
            "the head embedding takes the first token, and this tokenizer pads on the left, before it",
            "pass --head none and pool after the model",
        )
    return pooling


def _sample(job: _Job, model: Any, signature: Signature) -> dict[str, Any]:
    """Return what to trace on: two texts of different lengths, so that there is padding and no axis of size 1."""
    import torch

    texts = (job.options.text or _SAMPLE_TEXTS[0], _SAMPLE_TEXTS[1])
    tokens = tokenize(job.tokenizer, texts, signature)
    return {name: torch.from_numpy(array).to(model.device) for name, array in tokens.items()}


def _sum_up(failures: Sequence[ExportError | VerificationError]) -> ExportError | VerificationError:
    """Return the one error, the last one where all are of figures, or one that tells all of several."""
    if len(failures) == 1 or all(isinstance(failure, VerificationError) for failure in failures):
        return failures[-1]
    reasons = "\n  ".join(failure.message for failure in failures)
    return ExportError(f"no exporter gives a graph that follows the model:\n  {reasons}", failures[0].hint)
