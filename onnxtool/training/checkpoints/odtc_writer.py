"""Write checkpoints that onnxruntime-training 1.19 reads: flatbuffers with the identifier ODTC, version 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnxtool.errors import CheckpointError
from onnxtool.training.checkpoints.contents import Array, Checkpoint

if TYPE_CHECKING:
    import flatbuffers

# A method of the flatbuffers builder that writes a value into a slot, and the value.
Field: TypeAlias = "tuple[Callable[[int, Any, Any], None], Any]"

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
    offset = build.PrependUOffsetTRelativeSlot
    fields = ((build.PrependInt32Slot, _VERSION), (offset, module), (offset, groups), (offset, properties))
    build.Finish(_table(build, 4, dict(enumerate(fields))), b"ODTC")
    return bytes(build.Output())


def _module(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    nominal = checkpoint.is_nominal
    trainable = _tables(build, [_tensor(build, *item, nominal) for item in sorted(checkpoint.trainable.items())])
    frozen = _tables(build, [_tensor(build, *item, nominal) for item in sorted(checkpoint.frozen.items())])
    offset = build.PrependUOffsetTRelativeSlot
    return _table(build, 4, {0: (offset, trainable), 1: (offset, frozen), 2: (build.PrependBoolSlot, nominal)})


def _group(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    parameters = dict.fromkeys(name for moment in checkpoint.moments.values() for name in moment)
    offset = build.PrependUOffsetTRelativeSlot
    states = []
    for parameter in sorted(parameters):
        moments = [
            _tensor(build, name, arrays[parameter], nominal=False)
            for name, arrays in sorted(checkpoint.moments.items())
            if parameter in arrays
        ]
        vector, name = _tables(build, moments), build.CreateString(parameter)
        states.append(_table(build, 2, {0: (offset, name), 1: (offset, vector)}))
    vector, group = _tables(build, states), build.CreateString("group0")
    fields = {
        0: (offset, group),
        1: (build.PrependInt64Slot, checkpoint.step),
        2: (build.PrependFloat32Slot, checkpoint.learning_rate),
        3: (offset, vector),
    }
    return _table(build, 4, fields)


def _properties(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    offset = build.PrependUOffsetTRelativeSlot
    numbers: list[int] = []
    floats: list[int] = []
    texts: list[int] = []
    for name, value in sorted(checkpoint.properties.items()):
        if isinstance(value, str):
            texts.append(_property(build, name, (offset, build.CreateString(value))))
        elif isinstance(value, float):
            floats.append(_property(build, name, (build.PrependFloat32Slot, value)))
        else:
            numbers.append(_property(build, name, (build.PrependInt64Slot, int(value))))
    vectors = [(offset, _tables(build, tables)) for tables in (numbers, floats, texts)]
    return _table(build, 3, dict(enumerate(vectors)))


def _property(build: flatbuffers.Builder, name: str, value: Field) -> int:
    return _table(build, 2, {0: (build.PrependUOffsetTRelativeSlot, build.CreateString(name)), 1: value})


def _tensor(build: flatbuffers.Builder, name: str, array: Array, nominal: bool) -> int:
    """Add a tensor; a nominal checkpoint has only its name, as in onnxruntime-training."""
    content = None if nominal else build.CreateNumpyVector(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    dims = None if nominal else build.CreateNumpyVector(np.array(array.shape, np.int64)) if array.ndim else None
    offset = build.PrependUOffsetTRelativeSlot
    fields: dict[int, Field] = {0: (offset, build.CreateString(name))}
    if dims is not None:
        fields[2] = (offset, dims)
    if content is not None:
        fields |= {3: (build.PrependInt32Slot, int(ir.DataType.from_numpy(array.dtype))), 4: (offset, content)}
    return _table(build, 7, fields)


def _table(build: flatbuffers.Builder, num_slots: int, fields: Mapping[int, Field]) -> int:
    """Add a table with these fields by their slots."""
    build.StartObject(num_slots)
    for slot, (put, value) in fields.items():
        put(slot, value, 0)
    return int(build.EndObject())


def _tables(build: flatbuffers.Builder, tables: Sequence[int]) -> int:
    """Add a vector of tables."""
    build.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        build.PrependUOffsetTRelative(table)
    return int(build.EndVector())
