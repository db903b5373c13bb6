"""What the artifacts of a model are: parameters, inputs, outputs and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxtool.reports import TensorInfo
from onnxtool.training.artifacts.files import ArtifactFile
from onnxtool.training.graphs.names import LAZY_RESET, accumulated_name, buffer_name, updated_name
from onnxtool.training.onnxblock import TrainingBlock

if TYPE_CHECKING:
    import onnx

    from onnxtool.training.artifacts.verification import Proof

_LISTED = 6


@dataclass(frozen=True)
class ArtifactFiles:
    """What was written, and where."""

    directory: str
    written: tuple[ArtifactFile, ...]


@dataclass(frozen=True)
class ArtifactReport:
    """What `make_artifacts` wrote.

    Attributes:
        directory: where the files are.
        files: what was written, the training model first.
        trained: names of the parameters with a gradient, in the order of the inputs.
        frozen: names of the other parameters, running statistics among them.
        num_trained: elements of those with a gradient.
        num_frozen: elements of the others.
        inputs: of the training model, those of the user: without parameters and buffers.
        outputs: of the training model, those before the gradients.
        notes: what a user should know.
        duration_ms: wall time by stage.
        proof: how far the files are from PyTorch; None where there was nothing to compare with.
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
    opset: int
    notes: tuple[str, ...]
    duration_ms: dict[str, float]
    proof: Proof | None = None


def describe(
    block: TrainingBlock,
    files: ArtifactFiles,
    *,
    loss: str,
    optimizer: str,
    duration_ms: dict[str, float],
    proof: Proof | None,
) -> ArtifactReport:
    """Say what a training block and the files that were written of it hold."""
    training = block.to_model_proto()[0]
    trained, frozen = block.parameters()
    parameters = {tensor.name for tensor in (*trained, *frozen)}
    hidden = {LAZY_RESET, *parameters}
    hidden |= {make(name) for name in parameters for make in (buffer_name, accumulated_name, updated_name)}
    wanted = {tensor.name for tensor in trained}
    left = [name for name in block.choice.trained if name not in wanted]
    return ArtifactReport(
        directory=files.directory,
        files=files.written,
        loss=loss,
        optimizer=optimizer,
        trained=tuple(tensor.name for tensor in trained),
        frozen=tuple(tensor.name for tensor in frozen),
        num_trained=sum(_size(tensor) for tensor in trained),
        num_frozen=sum(_size(tensor) for tensor in frozen),
        inputs=tuple(_tensor_info(value) for value in training.graph.input if value.name not in hidden),
        outputs=tuple(_tensor_info(value) for value in training.graph.output if value.name not in hidden),
        opset=next(opset.version for opset in training.opset_import if not opset.domain),
        notes=(_frozen(left),) if left else (),
        duration_ms=duration_ms,
        proof=proof,
    )


def _frozen(names: Sequence[str]) -> str:
    """Say of parameters that have no gradient that they are not trained."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (
        f"no gradient comes back to {', '.join(names[:_LISTED])}{more}: the loss does not depend on "
        f"{'it' if len(names) == 1 else 'them'}, or through steps such as Round alone; frozen"
    )


def _size(tensor: onnx.TensorProto) -> int:
    size = 1
    for dim in tensor.dims:
        size *= dim
    return size


def _tensor_info(value: Any) -> TensorInfo:
    from onnx import helper

    kind = value.type.tensor_type
    shape = tuple(getattr(dim, dim.WhichOneof("value") or "", None) for dim in kind.shape.dim)
    return TensorInfo(value.name, helper.tensor_dtype_to_np_dtype(kind.elem_type).name, shape)
