"""Write the parameters of a block to a checkpoint, and read them back into a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onnxtool.errors import CheckpointError
from onnxtool.training.checkpoints.checkpoint import Checkpoint, load_checkpoint
from onnxtool.training.checkpoints.checkpoint import save_checkpoint as save


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | Path,
    nominal_checkpoint: bool = False,
) -> None:
    """Write the (trained, frozen) parameters of a TrainingBlock; a nominal checkpoint has no values.

    Raises:
        CheckpointError: a parameter is in both lists.
        OutputWriteError: it cannot be written.
    """
    save(checkpoint_of(*parameters, nominal=nominal_checkpoint), Path(path_to_checkpoint))


def load_checkpoint_to_model(path_to_checkpoint: str | Path, model: onnx.ModelProto) -> None:
    """Set the initializers of `model` to the values with the same names in the checkpoint.

    Raises:
        CheckpointError: it cannot be read, has no values, or a shape differs from that of the model.
    """
    checkpoint = load_checkpoint(Path(path_to_checkpoint))
    if checkpoint.is_nominal:
        raise CheckpointError(f"{path_to_checkpoint} is nominal and has no values", "load the complete checkpoint")
    arrays = {**checkpoint.trainable, **checkpoint.frozen}
    for tensor in model.graph.initializer:
        if (array := arrays.get(tensor.name)) is None:
            continue
        if tuple(tensor.dims) != array.shape:
            raise CheckpointError(
                f"{tensor.name} is {list(array.shape)} in {path_to_checkpoint} and {list(tensor.dims)} in the model",
                "the checkpoint belongs to another model",
            )
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def checkpoint_of(
    trainable: Sequence[onnx.TensorProto],
    frozen: Sequence[onnx.TensorProto],
    *,
    nominal: bool = False,
    folder: Path | None = None,
) -> Checkpoint:
    """Return a checkpoint of these parameters.

    Args:
        trainable: parameters with a gradient.
        frozen: parameters without a gradient.
        nominal: whether to leave out the values.
        folder: the folder of the model, if the tensors are in its external data.
    """
    both = sorted({tensor.name for tensor in trainable} & {tensor.name for tensor in frozen})
    if both:
        raise CheckpointError(f"{', '.join(both)} cannot be trained and frozen at once", "name them in one list only")
    base = "" if folder is None else str(folder)
    groups = [
        {tensor.name: ir.serde.deserialize_tensor(tensor, base).numpy() for tensor in tensors}
        for tensors in (trainable, frozen)
    ]
    return Checkpoint(trainable=groups[0], frozen=groups[1], is_nominal=nominal)
