"""The artifact report: parameters, inputs, outputs and files; and its form for a target, JavaScript."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from onnx import helper

from onnxtool.errors import ArtifactError, some
from onnxtool.model_file.domains import default_opset
from onnxtool.reports import TensorInfo
from onnxtool.training.api.session import BLOCK_SIZE
from onnxtool.training.artifacts.verification import ArtifactVerification
from onnxtool.training.checkpoints import Array, Checkpoint
from onnxtool.training.graphs.names import LABELS, LAZY_RESET, accumulated_name, buffer_name, description, updated_name
from onnxtool.training.onnxblock import TrainingBlock
from onnxtool.training.options import TrainingTarget
from onnxtool.version import __version__


@dataclass(frozen=True)
class ArtifactFile:
    """A file that was written; the size includes its external data."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class ArtifactReport:
    """The result of `make_artifacts`.

    Attributes:
        directory: the folder of the files.
        files: the written files, the training model first.
        trained: names of the parameters with a gradient, in input order.
        frozen: names of the other parameters, including running statistics.
        num_trained: number of trained elements.
        num_frozen: number of frozen elements.
        inputs: user inputs of the training model, without parameters and buffers.
        outputs: user outputs of the training model, without gradients.
        labels: `classes`, `ignore_index` and `first`, the first token whose label counts, for each label input.
        notes: remarks for the user.
        duration_ms: wall time by stage.
        proof: the comparison with PyTorch; None if there was none.
    """

    directory: str
    files: tuple[ArtifactFile, ...]
    loss: str
    optimizer: str
    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    num_trained: int
    num_frozen: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    labels: dict[str, dict[str, Any]]
    opset: int
    notes: tuple[str, ...]
    duration_ms: dict[str, float]
    proof: ArtifactVerification | None = None


def describe(
    block: TrainingBlock,
    directory: str,
    used: tuple[str, str],
    verification: ArtifactVerification | None,
    notes: Sequence[str],
) -> ArtifactReport:
    """Return the report for a training block with the loss and the optimizer `used`, without files and times."""
    training = block.to_model_proto()[0]
    trained, frozen = block.parameters()
    parameters = {tensor.name for tensor in (*trained, *frozen)}
    hidden = {LAZY_RESET, *parameters}
    inputs = block.inputs_with_gradient
    hidden |= {make(name) for name in (*parameters, *inputs) for make in (buffer_name, accumulated_name, updated_name)}
    return ArtifactReport(
        directory=directory,
        files=(),
        loss=used[0],
        optimizer=used[1],
        trained=tuple(tensor.name for tensor in trained),
        frozen=tuple(tensor.name for tensor in frozen),
        num_trained=sum(prod(tensor.dims) for tensor in trained),
        num_frozen=sum(prod(tensor.dims) for tensor in frozen),
        inputs=tuple(_tensor_info(value) for value in training.graph.input if value.name not in hidden),
        outputs=tuple(_tensor_info(value) for value in training.graph.output if value.name not in hidden),
        labels=description(LABELS, {entry.key: entry.value for entry in training.metadata_props}),
        opset=default_opset({entry.domain: entry.version for entry in training.opset_import}),
        notes=(*_notes(block), *notes),
        duration_ms={},
        proof=verification,
    )


def _notes(block: TrainingBlock) -> Iterator[str]:
    if inputs := block.inputs_with_gradient:
        yield f"the training model has the gradients of the inputs {', '.join(inputs)}"
    if not block.selection.trained:
        yield "no parameter is trained: the training model computes the loss, and no gradients"


_PROBABILITIES = re.compile("prob|softmax|sigmoid", re.IGNORECASE)


def doubtful(block: TrainingBlock, numbers: Sequence[str], logits: Sequence[str]) -> Iterator[str]:
    """Explain possible mistakes: untrained parameters and `numbers`, and logits with suspicious names."""
    has_gradient = {*block.inputs_with_gradient, *(tensor.name for tensor in block.parameters()[0])}
    if unused := [name for name in block.selection.trained if name not in has_gradient]:
        yield _without_gradient(unused)
    if numbers and block.selection.optional:
        yield f"{some(numbers)} of one element not trained: patterns do not match what may be a constant"
    if named := [name for name in logits if _PROBABILITIES.search(name)]:
        yield f"the loss expects logits, and the name of {some(named)} says probabilities"


def _without_gradient(names: Sequence[str]) -> str:
    """Explain why parameters without a gradient are frozen."""
    return (
        f"{some(names)} frozen: the loss does not depend on "
        f"{'it' if len(names) == 1 else 'them'}, or only through operators without a gradient such as Round"
    )


def _tensor_info(value: Any) -> TensorInfo:
    kind = value.type.tensor_type
    shape = tuple(getattr(dim, dim.WhichOneof("value") or "", None) for dim in kind.shape.dim)
    return TensorInfo(value.name, helper.tensor_dtype_to_np_dtype(kind.elem_type).name, shape)


DESCRIPTION = "training.json"
VERSION = 1
# The tensor types of onnxruntime in JavaScript; NumPy calls strings `object`.
_DTYPES = frozenset(
    ("bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


def write_description(target: TrainingTarget, report: ArtifactReport, checkpoint: Checkpoint, folder: Path) -> Path:
    """Write what the target's program reads next to the artifacts in `folder`, and return its path.

    Raises:
        ArtifactError: the target cannot read the artifacts.
    """
    data = sorted(folder.glob("*.data"))
    if data:
        raise ArtifactError(
            f"{data[0].name.removesuffix('.data')} has constants of more than 1.9 GB, which no {target} can hold",
            "train or freeze them with --train and --freeze, so that the checkpoint has them",
        )
    document = _describe(report, checkpoint)
    (folder / DESCRIPTION).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return folder / DESCRIPTION


def _describe(report: ArtifactReport, checkpoint: Checkpoint) -> dict[str, object]:
    """Return the content of training.json."""
    return {
        "version": VERSION,
        "loss": report.outputs[0].name,
        "loss_function": report.loss,
        "optimizer": report.optimizer or None,
        "block_size": BLOCK_SIZE,
        "schedule": {"name": "constant"},
        "inputs": _values(report.inputs),
        "outputs": _values(report.outputs),
        "labels": report.labels,
        "parameters": {"trained": _arrays(checkpoint.trainable), "frozen": _arrays(checkpoint.frozen)},
        "made_with": {"onnxtool": __version__, "opset": report.opset, "onnxruntime": ">=1.17"},
    }


def _values(tensors: Iterable[TensorInfo]) -> list[dict[str, object]]:
    return [{"name": tensor.name, "dtype": _dtype(tensor), "shape": list(tensor.shape)} for tensor in tensors]


def _arrays(arrays: Mapping[str, Array]) -> list[dict[str, object]]:
    return _values(TensorInfo(name, array.dtype.name, array.shape) for name, array in arrays.items())


def _dtype(tensor: TensorInfo) -> str:
    if tensor.dtype in _DTYPES:
        return tensor.dtype
    if tensor.dtype == "object":
        return "string"
    raise ArtifactError(
        f"{tensor.name} is {tensor.dtype}, which onnxruntime has no tensors of in JavaScript", "convert it to float32"
    )
