"""Time another model, another provider or PyTorch in turns with the model on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.benchmarking.eager import EagerModel, load_eager
from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import ComparedShape
from onnxtool.benchmarking.rounds import Floats, SessionRunner
from onnxtool.benchmarking.workload import Workload
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.pooling_modules import Pooling, read_pooling_modules, truncated
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.runtime.computed_modules import compute
from onnxtool.runtime.difference import measure, spreads_of
from onnxtool.runtime.providers import PROVIDERS
from onnxtool.runtime.session import Session, open_session
from onnxtool.runtime.timing import interval_of_median, summarize_latencies

Arrays = Mapping[str, NDArray[Any]]
Runner = SessionRunner | EagerModel

_FEWEST_PAIRS = 6
# Outputs that an export's head substitutes for PyTorch's, and their sources.
_EMBEDDING, _TERMS, _STATES, _LOGITS = "sentence_embedding", "sparse", "last_hidden_state", "logits"


@dataclass(frozen=True)
class ComparedModel:
    """The model to compare with.

    Attributes:
        kind: `onnx`, `pytorch` or `provider`.
        folder: the checkpoint's folder, whose files define the pooling; None for ONNX files and hub ids.
    """

    name: str
    kind: str
    provider: str
    runner: Runner
    notes: tuple[str, ...] = ()
    folder: CheckpointFolder | None = None


def open_compared(options: BenchmarkOptions, session: Session) -> ComparedModel:
    """Load the target of `options.compare`: a provider, an ONNX file, or a checkpoint.

    Raises:
        InputError: its inputs differ from the model's, or it is none of these.
        ProviderError: the provider cannot run here.
    """
    name = options.compare or ""
    path = Path(name)
    if name.partition("?")[0].partition(":")[0] in PROVIDERS:
        other = _open(session.model.path, options, name)
        if other.provider == session.provider:
            raise InputError(f"the model runs on {name} already", "compare it with another provider")
        runner = SessionRunner(other, options.io_binding)
        return ComparedModel(f"{session.model.path} on {name}", "provider", other.provider, runner, other.notes)
    if path.suffix == ".onnx" or path.is_file():
        _require_same_inputs(session.model, ModelFile.open(path))
        other = _open(path, options, session.provider)
        return ComparedModel(name, "onnx", other.provider, SessionRunner(other, options.io_binding))
    eager = load_eager(name, provider=session.provider, threads=session.threads)
    required = {info.name for info in session.model.structure.inputs} & eager.accepted
    if not required:
        raise InputError(f"{name} takes none of the model's inputs", "compare with the checkpoint it was exported from")
    heads = {info.name for info in session.model.structure.outputs} & {_EMBEDDING, _TERMS}
    notes = [f"PyTorch runs {eager.architecture} eagerly, in float32"]
    if heads:
        notes.append(f"what turns its outputs into {' and '.join(sorted(heads))} is not included in PyTorch's time")
    folder = CheckpointFolder(path) if path.is_dir() else None
    return ComparedModel(name, "pytorch", eager.device, eager, tuple(notes), folder)


def _require_same_inputs(model: ModelFile, other: ModelFile) -> None:
    """Refuse to compare with a model that has other inputs.

    Raises:
        InputError: `other` has an input that `model` lacks.
    """
    names = {info.name for info in model.structure.inputs}
    unknown = [info.name for info in other.structure.inputs if info.name not in names]
    if unknown:
        raise InputError(
            f"{other.path} takes {', '.join(unknown)}, which {model.path} does not; no inputs suit both",
            "compare models with the same inputs",
        )


def _open(path: Path, options: BenchmarkOptions, provider: str) -> Session:
    return open_session(path, provider=provider, threads=options.threads, inter_threads=options.inter_threads)


@dataclass(frozen=True)
class OutputDifference:
    """The differences of the outputs of both; None if they have none in common."""

    outputs: tuple[str, ...] = ()
    max_abs_error: float | None = None
    cosine_min: float | None = None


def compare_outputs(model: Runner, other: ComparedModel, workload: Workload) -> OutputDifference:
    """Run both on the first batch, and measure the differences of their outputs on real tokens."""
    feeds, mask = workload.batches[0], workload.masks[0]
    own, others = model.outputs(feeds), other.runner.outputs(feeds)
    pairs = [(name, name, array) for name, array in others.items() if name in own]
    if not pairs and other.kind == "pytorch":
        pairs = _with_heads(own, others, mask, other.folder)
    if not pairs and len(own) == len(others) == 1:
        (first,), ((second, array),) = own, others.items()
        pairs = [(first, second, array)] if own[first].shape == array.shape else []
    # An error or a cosine is meaningless for codes and bits of a vector.
    pairs = [pair for pair in pairs if not {own[pair[0]].dtype.kind, pair[2].dtype.kind} & {"i", "u"}]
    spreads = spreads_of([{name: array for name, _, array in pairs}], [mask])
    errors = [measure(own[name], array, mask, spread=spreads.get(name)) for name, _, array in pairs]
    if not errors:
        return OutputDifference()
    return OutputDifference(
        tuple(name if name == second else f"{name}: {second}" for name, second, _ in pairs),
        max(error.max_abs_error for error in errors),
        min(error.cosine for error in errors),
    )


def _with_heads(
    own: Arrays, others: Arrays, mask: NDArray[np.bool_], folder: CheckpointFolder | None
) -> list[tuple[str, str, NDArray[Any]]]:
    """Apply an export's head, if known here, to PyTorch's outputs."""
    if _EMBEDDING in own and _STATES in others and folder is not None:
        modules = read_pooling_modules(folder.sentence_modules, Pooling) or (Pooling(),)
        vectors = compute(modules, others[_STATES], mask)
        width = own[_EMBEDDING].shape[1]
        if width < vectors.shape[1]:  # exported with --dimensions
            vectors = compute(truncated(modules, width), others[_STATES], mask)
        return [(_EMBEDDING, f"{_STATES}, pooled", vectors)]
    if _TERMS in own and _LOGITS in others:
        terms = () if folder is None else read_pooling_modules(folder.sentence_modules, SpladePooling)
        return [(_TERMS, f"{_LOGITS}, pooled", compute(terms or (SpladePooling(),), others[_LOGITS], mask))]
    return []


def compared_shape(
    workload: Workload, pairs: Sequence[tuple[Floats, Floats]], outputs: OutputDifference
) -> ComparedShape:
    """Summarize blocks of both that were timed in turns.

    Args:
        workload: the workload.
        pairs: a block of the model and one of the other for each round.
        outputs: the differences of their outputs.
    """
    ratios = [float(np.median(theirs) / np.median(ours)) for ours, theirs in pairs]
    return ComparedShape(
        batch_size=workload.batch_size,
        sequence_length=workload.sequence_length,
        latency_ms=summarize_latencies(np.concatenate([theirs for _, theirs in pairs]).tolist()),
        pairs=len(ratios),
        ratio=float(np.median(ratios)),
        ratio_interval=interval_of_median(ratios),
        max_abs_error=outputs.max_abs_error,
        cosine_min=outputs.cosine_min,
    )


def few_pairs(shape: ComparedShape) -> str:
    """Warn that there are too few pairs for an interval; an empty string if there are enough."""
    if shape.pairs >= _FEWEST_PAIRS:
        return ""
    return f"{shape.pairs} pairs are few: an interval of 95 % needs {_FEWEST_PAIRS}; pass more --runs or --duration"
