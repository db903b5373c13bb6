"""Time another model, another provider or PyTorch in turns with the model on the same inputs.

This is the only module of this package that loads torch and transformers, and only to compare with a checkpoint.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.benchmarking.options import BenchmarkOptions
from onnxtool.benchmarking.report import ComparedShape
from onnxtool.benchmarking.rounds import Floats, SessionRunner
from onnxtool.benchmarking.workload import Workload
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.pooling_modules import Pooling, read_pooling_modules, truncated
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.errors import CheckpointError, InputError, OnnxtoolError, ProviderError, first_line
from onnxtool.model_file import ModelFile
from onnxtool.reading import require_small_settings
from onnxtool.runtime.computed_modules import compute
from onnxtool.runtime.difference import measure, spreads_of
from onnxtool.runtime.providers import PROVIDERS, is_on_cuda
from onnxtool.runtime.quiet import quiet
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from onnxtool.runtime.timing import interval_of_median, summarize_latencies

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class EagerModel:
    """A transformers model in evaluation mode, in float32.

    Attributes:
        device: its torch device.
        threads: number of torch threads while it runs.
        accepted: the argument names of its forward.
    """

    name: str
    device: str
    threads: int
    load_ms: float
    accepted: frozenset[str]
    _model: Any

    @property
    def architecture(self) -> str:
        """The transformers class, e.g. `BertModel`."""
        return type(self._model).__name__

    def prepare(self, feeds: Feeds) -> Callable[[], object]:
        """Return a run on `feeds`, which are copied to the device here."""
        import torch

        torch.set_num_threads(self.threads)
        tensors = self._tensors(feeds)
        model, is_cuda = self._model, self.device != "cpu"

        def run() -> object:
            with torch.inference_mode():
                outputs: object = model(**tensors)
            if is_cuda:
                torch.cuda.synchronize()
            return outputs

        return run

    def outputs(self, feeds: Feeds) -> Mapping[str, NDArray[Any]]:
        """Run once."""
        import torch

        outputs = self.prepare(feeds)()
        assert isinstance(outputs, Mapping)  # noqa: S101 - what return_dict promises
        return {name: value.cpu().numpy() for name, value in outputs.items() if isinstance(value, torch.Tensor)}

    def _tensors(self, feeds: Feeds) -> dict[str, Any]:
        import torch

        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
            for name, array in feeds.items()
            if name in self.accepted
        }


def _model_class(name: str) -> Any:
    """Return transformers' model class of that name; None if there is no such class."""
    import transformers

    named: Any = getattr(transformers, name, None)
    return named if inspect.isclass(named) and issubclass(named, transformers.PreTrainedModel) else None


def load_eager(name: str, *, provider: str, threads: int) -> EagerModel:
    """Load the checkpoint `name`, a folder or an id on the hub, into the class that its config.json names.

    Only safetensors weights are loaded, and no code of the checkpoint runs.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not load.
        ProviderError: torch cannot use the device.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{error.name} is not installed", "pip install 'onnxtool-cli[export]'") from error
    device = "cuda" if is_on_cuda(provider) else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ProviderError("this PyTorch cannot use CUDA", "install a PyTorch with CUDA, or pass --provider cpu")
    start = time.perf_counter()
    local = Path(name).is_dir()
    try:
        if local:
            require_small_settings(Path(name))
        with quiet():
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=local)
            architecture = (getattr(config, "architectures", None) or [""])[0]
            model_class = _model_class(str(architecture))
            if model_class is None:
                raise InputError(
                    f"config.json of {name} names the architecture {architecture!r}, which transformers does not have",
                    "compare with a checkpoint of transformers, or with an ONNX file",
                )
            model = model_class.from_pretrained(
                name, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=local
            )
            model = model.to(device).eval()
    except OnnxtoolError:
        raise
    except Exception as error:  # damaged files fail in many ways, and attention may need a package of kernels
        reason = first_line(error)
        raise CheckpointError(
            f"cannot load {name} in PyTorch: {reason}", "--compare takes an ONNX file, a checkpoint, or cpu and cuda"
        ) from error
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    model.config.return_dict = True
    accepted = frozenset(inspect.signature(model.forward).parameters)
    return EagerModel(name, device, threads, (time.perf_counter() - start) * 1e3, accepted, model)


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
        runner = SessionRunner(other)
        return ComparedModel(f"{session.model.path} on {name}", "provider", other.provider, runner, other.notes)
    if path.suffix == ".onnx" or path.is_file():
        _require_same_inputs(session.model, ModelFile.open(path))
        other = _open(path, options, session.provider)
        return ComparedModel(name, "onnx", other.provider, SessionRunner(other))
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
    return open_session(path, provider=provider, threads=options.threads)


@dataclass(frozen=True)
class OutputDifference:
    """The differences of the outputs of both; None if they have none in common."""

    outputs: tuple[str, ...] = ()
    max_abs_error: float | None = None
    cosine_min: float | None = None


def compare_outputs(model: Runner, other: ComparedModel, workload: Workload) -> OutputDifference:
    """Run both on the first batch, and measure the differences of their outputs on real tokens."""
    feeds, mask = workload.batches[0], workload.masks[0]
    own, other_outputs = model.outputs(feeds), other.runner.outputs(feeds)
    pairs = [(name, name, array) for name, array in other_outputs.items() if name in own]
    if not pairs and other.kind == "pytorch":
        pairs = _with_heads(own, other_outputs, mask, other.folder)
    if not pairs and len(own) == len(other_outputs) == 1:
        (first,), ((second, array),) = own, other_outputs.items()
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
    model_outputs: Arrays, other_outputs: Arrays, mask: NDArray[np.bool_], folder: CheckpointFolder | None
) -> list[tuple[str, str, NDArray[Any]]]:
    """Apply an export's head, if known here, to PyTorch's outputs."""
    if _EMBEDDING in model_outputs and _STATES in other_outputs and folder is not None:
        modules = read_pooling_modules(folder.sentence_modules, Pooling) or (Pooling(),)
        vectors = compute(modules, other_outputs[_STATES], mask)
        width = model_outputs[_EMBEDDING].shape[1]
        if width < vectors.shape[1]:  # exported with --dimensions
            vectors = compute(truncated(modules, width), other_outputs[_STATES], mask)
        return [(_EMBEDDING, f"{_STATES}, pooled", vectors)]
    if _TERMS in model_outputs and _LOGITS in other_outputs:
        terms = () if folder is None else read_pooling_modules(folder.sentence_modules, SpladePooling)
        return [(_TERMS, f"{_LOGITS}, pooled", compute(terms or (SpladePooling(),), other_outputs[_LOGITS], mask))]
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
