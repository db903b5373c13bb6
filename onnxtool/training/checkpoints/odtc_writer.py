"""Write checkpoints that onnxruntime-training 1.19 reads: flatbuffers with the identifier ODTC, version 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxtool.errors import CheckpointError
from onnxtool.training.checkpoints.contents import Array, Checkpoint

if TYPE_CHECKING:
    import flatbuffers


_VERSION = 2
_MAX_BYTES = 2**31 - 2**20  # offsets of a flatbuffer are signed 32-bit numbers


def to_odtc(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint; the format has no aliases.

    Raises:
        CheckpointError: it has more than 2 GB.
    """
    import flatbuffers

    arrays = [*checkpoint.trainable.values(), *checkpoint.frozen.values()]
    arrays += [array for moment in checkpoint.moments.values() for array in moment.values()]
    size = 0 if checkpoint.is_nominal else sum(array.nbytes for array in arrays)
    if size > _MAX_BYTES:
        raise CheckpointError(f"{size / 1e9:.1f} GB do not fit into an ODTC checkpoint", "save it as safetensors")
    build = flatbuffers.Builder(size + 4096)
    module = _module(build, checkpoint)
    groups = _tables(build, [_group(build, checkpoint)] if checkpoint.moments or checkpoint.step else [])
    properties = _properties(build, checkpoint) if checkpoint.properties else 0
    build.StartObject(4)
    build.PrependInt32Slot(0, _VERSION, 0)
    build.PrependUOffsetTRelativeSlot(1, module, 0)
    build.PrependUOffsetTRelativeSlot(2, groups, 0)
    build.PrependUOffsetTRelativeSlot(3, properties, 0)
    build.Finish(build.EndObject(), b"ODTC")
    return bytes(build.Output())


def _module(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    nominal = checkpoint.is_nominal
    trainable = _tables(build, [_tensor(build, *item, nominal) for item in sorted(checkpoint.trainable.items())])
    frozen = _tables(build, [_tensor(build, *item, nominal) for item in sorted(checkpoint.frozen.items())])
    build.StartObject(4)
    build.PrependUOffsetTRelativeSlot(0, trainable, 0)
    build.PrependUOffsetTRelativeSlot(1, frozen, 0)
    build.PrependBoolSlot(2, nominal, False)
    return int(build.EndObject())


def _group(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    parameters = dict.fromkeys(name for moment in checkpoint.moments.values() for name in moment)
    states = []
    for parameter in sorted(parameters):
        moments = [
            _tensor(build, name, arrays[parameter], nominal=False)
            for name, arrays in sorted(checkpoint.moments.items())
            if parameter in arrays
        ]
        vector, name = _tables(build, moments), build.CreateString(parameter)
        build.StartObject(2)
        build.PrependUOffsetTRelativeSlot(0, name, 0)
        build.PrependUOffsetTRelativeSlot(1, vector, 0)
        states.append(int(build.EndObject()))
    vector, group = _tables(build, states), build.CreateString("group0")
    build.StartObject(4)
    build.PrependUOffsetTRelativeSlot(0, group, 0)
    build.PrependInt64Slot(1, checkpoint.step, 0)
    build.PrependFloat32Slot(2, checkpoint.learning_rate, 0.0)
    build.PrependUOffsetTRelativeSlot(3, vector, 0)
    return int(build.EndObject())


def _properties(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    numbers: list[int] = []
    floats: list[int] = []
    texts: list[int] = []
    for name, value in sorted(checkpoint.properties.items()):
        if isinstance(value, str):
            texts.append(_property(build, name, build.CreateString(value), build.PrependUOffsetTRelativeSlot))
        elif isinstance(value, float):
            floats.append(_property(build, name, value, build.PrependFloat32Slot))
        else:
            numbers.append(_property(build, name, int(value), build.PrependInt64Slot))
    vectors = [_tables(build, tables) for tables in (numbers, floats, texts)]
    build.StartObject(3)
    for slot, vector in enumerate(vectors):
        build.PrependUOffsetTRelativeSlot(slot, vector, 0)
    return int(build.EndObject())


def _property(build: flatbuffers.Builder, name: str, value: float, put: Callable[[int, Any, Any], None]) -> int:
    key = build.CreateString(name)
    build.StartObject(2)
    build.PrependUOffsetTRelativeSlot(0, key, 0)
    put(1, value, 0)
    return int(build.EndObject())


def _tensor(build: flatbuffers.Builder, name: str, array: Array, nominal: bool) -> int:
    """Add a tensor; a nominal checkpoint has only its name, as in onnxruntime-training."""
    content = None if nominal else build.CreateNumpyVector(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    dims = None if nominal else build.CreateNumpyVector(np.array(array.shape, np.int64)) if array.ndim else None
    key = build.CreateString(name)
    build.StartObject(7)
    build.PrependUOffsetTRelativeSlot(0, key, 0)
    if dims is not None:
        build.PrependUOffsetTRelativeSlot(2, dims, 0)
    if not nominal:
        build.PrependInt32Slot(3, int(ir.DataType.from_numpy(array.dtype)), 0)
    if content is not None:
        build.PrependUOffsetTRelativeSlot(4, content, 0)
    return int(build.EndObject())


def _tables(build: flatbuffers.Builder, tables: Sequence[int]) -> int:
    """Add a vector of tables."""
    build.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        build.PrependUOffsetTRelative(table)
    return int(build.EndVector())
