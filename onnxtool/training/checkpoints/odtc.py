"""Read and write onnxruntime-training checkpoints: flatbuffers with the identifier ODTC.

The schema is ort_training_checkpoint.fbs and ort.fbs of onnxruntime 1.19. Files are untrusted: every offset and length
is checked against the file before anything is read or allocated, and arrays are views of the file. Checkpoints larger
than 1.8 GB keep their parameters in a second file, NAME.data in the same folder; such files are read but not written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import flatbuffers
import flatbuffers.table
import numpy as np
import onnx_ir as ir
from flatbuffers import number_types as types
from numpy.typing import NDArray

from onnxtool.errors import CheckpointError
from onnxtool.reading import read_bytes
from onnxtool.training.checkpoints import Array, Checkpoint, Property

# A flatbuffers builder method that writes a value to a slot, and the value.
Field: TypeAlias = "tuple[Callable[[int, Any, Any], None], Any]"

IDENTIFIER = b"ODTC"
VERSIONS = (1, 2)  # the last one is used for writing
MAX_NAME_BYTES = 4096
MAX_RANK = 64
_MAX_ELEMENTS = 2**48
_MAX_BYTES = 2**31 - 2**20  # flatbuffer offsets are signed 32-bit numbers


class _DamageError(Exception):
    """An offset points outside the file, or the content violates the schema."""


def from_odtc(path: Path) -> Checkpoint:
    """Read the checkpoint at `path`.

    Raises:
        CheckpointError: it is truncated, damaged or has another version, or its data file is missing.
    """
    try:
        data = read_bytes(path, _MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}", "check the path") from error
    try:
        return _read(data, path)
    except (_DamageError, struct.error, TypeError, ValueError) as error:  # of flatbuffers and NumPy, for wild offsets
        raise CheckpointError(
            f"the checkpoint {path} is truncated or damaged: {error}", "copy it again, or make the artifacts again"
        ) from error


class _Table(flatbuffers.table.Table):  # type: ignore[misc]  # flatbuffers has no types
    """A table of which fields are read by their number in the schema; absent ones have a default."""

    def number(self, field: int, kind: Any, default: float = 0) -> Any:
        """Return the number in a field; `kind` describes its type in `flatbuffers.number_types`."""
        return self.GetSlot(_slot(field), default, kind)

    def text(self, field: int) -> str:
        """Return a string; empty if absent."""
        content = self.content(field)
        if content.nbytes > MAX_NAME_BYTES:
            raise _DamageError(f"a name of {content.nbytes} bytes")
        return content.tobytes().decode()

    def content(self, field: int, kind: Any = types.Uint8Flags) -> NDArray[Any]:
        """Return a numeric vector; empty if absent. It raises if the vector ends outside the file."""
        place = self.Offset(_slot(field))
        vector: NDArray[Any] = self.GetVectorAsNumpy(kind, place) if place else np.empty(0, np.uint8)
        return vector

    def table(self, field: int) -> _Table | None:
        """Return a nested table."""
        place = self.Offset(_slot(field))
        return _Table(self.Bytes, self.Indirect(self.Pos + place)) if place else None

    def tables(self, field: int) -> Iterator[_Table]:
        """Yield the tables in a vector."""
        place = self.Offset(_slot(field))
        for index in range(len(self.content(field, types.Uint32Flags))):
            yield _Table(self.Bytes, self.Indirect(self.Vector(place) + 4 * index))


def _slot(field: int) -> int:
    return 4 + 2 * field


def _read(data: bytes, path: Path) -> Checkpoint:
    if len(data) < 8 or data[4:8] != IDENTIFIER:
        raise _DamageError("it does not begin with the identifier of one")
    root = _Table(data, struct.unpack_from("<I", data)[0])
    version = root.number(0, types.Int32Flags)
    if version not in VERSIONS:
        raise CheckpointError(
            f"the checkpoint {path} is of version {version}, and versions {VERSIONS} are known",
            "write it with onnxruntime-training 1.17 to 1.19",
        )
    checkpoint = Checkpoint()
    if (module := root.table(1)) is not None:
        checkpoint.is_nominal = module.number(2, types.BoolFlags)
        outside = _data_file(path) if module.number(3, types.BoolFlags) else None
        checkpoint.trainable = dict(_read_tensor(table, checkpoint.is_nominal, outside) for table in module.tables(0))
        checkpoint.frozen = dict(_read_tensor(table, checkpoint.is_nominal, outside) for table in module.tables(1))
    for group in root.tables(2):
        _read_group(group, checkpoint)
    if (bag := root.table(3)) is not None:
        checkpoint.properties = _read_properties(bag)
    return checkpoint


def _data_file(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a checkpoint's data file, memory-mapped."""
    data = path.with_name(f"{path.name}.data")
    try:
        size = data.stat().st_size
        return np.memmap(data, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} has its parameters in {data.name}, which cannot be read: {error.strerror}",
            f"copy {data.name} to the same folder",
        ) from error


def _read_group(group: _Table, checkpoint: Checkpoint) -> None:
    """Read an optimizer group; onnxruntime-training has one, `group0`."""
    checkpoint.step = group.number(1, types.Int64Flags)
    checkpoint.learning_rate = group.number(2, types.Float32Flags)
    for state in group.tables(3):
        parameter = state.text(0)
        for table in state.tables(1):
            name, array = _read_tensor(table, nominal=False)
            checkpoint.moments.setdefault(name, {})[parameter] = array


def _read_properties(bag: _Table) -> dict[str, Property]:
    properties: dict[str, Property] = {table.text(0): table.number(1, types.Int64Flags) for table in bag.tables(0)}
    properties |= {table.text(0): table.number(1, types.Float32Flags) for table in bag.tables(1)}
    return properties | {table.text(0): table.text(1) for table in bag.tables(2)}


def _read_tensor(
    table: _Table, nominal: bool, outside: NDArray[np.uint8] | None = None
) -> tuple[str, NDArray[np.generic]]:
    """Return the name and a read-only array; for a nominal checkpoint, zeros that take no memory.

    `outside` holds the bytes of the data file, if there is one.
    """
    name = table.text(0)
    dims = table.content(2, types.Int64Flags).tolist()
    number = table.number(3, types.Int32Flags)
    dtype = np.dtype(np.float32) if nominal and not number else _dtype(number, name)
    if len(dims) > MAX_RANK or any(size < 0 for size in dims):
        raise _DamageError(f"{name} has the shape {dims[:8]}")
    content = table.content(4)
    if nominal and not len(content):
        return name, np.broadcast_to(np.zeros((), dtype), dims if prod(dims) < _MAX_ELEMENTS else ())
    count = prod(dims)
    place = table.number(6, types.Int64Flags, -1)
    if outside is not None and place >= 0:
        end = place + count * dtype.itemsize
        if end > len(outside):
            raise _DamageError(f"{name} ends at byte {end} of {len(outside)} of the data file")
        return name, np.frombuffer(outside[place:end], dtype).reshape(dims)
    if count * dtype.itemsize != len(content):
        raise _DamageError(f"{name} has {len(content)} bytes for the shape {dims[:8]}")
    return name, np.frombuffer(content, dtype).reshape(dims)


def _dtype(number: int, name: str) -> np.dtype[np.generic]:
    # ODTC numbers dtypes like ONNX.
    try:
        kind = ir.DataType(number)
        if kind in (ir.DataType.UNDEFINED, ir.DataType.STRING) or kind.bitwidth < 8:
            raise _DamageError(f"{name} has the dtype {kind.name.lower()}")
        return kind.numpy()
    except (ValueError, TypeError) as error:
        raise _DamageError(f"{name} has the unknown dtype {number}") from error


def to_odtc(checkpoint: Checkpoint) -> bytes:
    """Serialize a checkpoint; the format has no aliases.

    Raises:
        CheckpointError: it is larger than 2 GB.
    """
    arrays = [*checkpoint.trainable.values(), *checkpoint.frozen.values()]
    arrays += [array for moment in checkpoint.moments.values() for array in moment.values()]
    size = 0 if checkpoint.is_nominal else sum(array.nbytes for array in arrays)
    if size > _MAX_BYTES:
        raise CheckpointError(f"{size / 1e9:.1f} GB do not fit into an ODTC checkpoint", "save it as safetensors")
    build = flatbuffers.Builder(size + 4096)
    module = _add_module(build, checkpoint)
    groups = _add_tables(build, [_add_group(build, checkpoint)] if checkpoint.moments or checkpoint.step else [])
    properties = _add_properties(build, checkpoint) if checkpoint.properties else 0
    offset = build.PrependUOffsetTRelativeSlot
    fields = ((build.PrependInt32Slot, VERSIONS[-1]), (offset, module), (offset, groups), (offset, properties))
    build.Finish(_add_table(build, 4, dict(enumerate(fields))), IDENTIFIER)
    return bytes(build.Output())


def _add_module(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    nominal = checkpoint.is_nominal
    trainable = _add_tables(
        build, [_add_tensor(build, *item, nominal) for item in sorted(checkpoint.trainable.items())]
    )
    frozen = _add_tables(build, [_add_tensor(build, *item, nominal) for item in sorted(checkpoint.frozen.items())])
    offset = build.PrependUOffsetTRelativeSlot
    return _add_table(build, 4, {0: (offset, trainable), 1: (offset, frozen), 2: (build.PrependBoolSlot, nominal)})


def _add_group(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    parameters = dict.fromkeys(name for moment in checkpoint.moments.values() for name in moment)
    offset = build.PrependUOffsetTRelativeSlot
    states = []
    for parameter in sorted(parameters):
        moments = [
            _add_tensor(build, name, arrays[parameter], nominal=False)
            for name, arrays in sorted(checkpoint.moments.items())
            if parameter in arrays
        ]
        vector, name = _add_tables(build, moments), build.CreateString(parameter)
        states.append(_add_table(build, 2, {0: (offset, name), 1: (offset, vector)}))
    vector, group = _add_tables(build, states), build.CreateString("group0")
    fields = {
        0: (offset, group),
        1: (build.PrependInt64Slot, checkpoint.step),
        2: (build.PrependFloat32Slot, checkpoint.learning_rate),
        3: (offset, vector),
    }
    return _add_table(build, 4, fields)


def _add_properties(build: flatbuffers.Builder, checkpoint: Checkpoint) -> int:
    offset = build.PrependUOffsetTRelativeSlot
    numbers: list[int] = []
    floats: list[int] = []
    texts: list[int] = []
    for name, value in sorted(checkpoint.properties.items()):
        if isinstance(value, str):
            texts.append(_add_property(build, name, (offset, build.CreateString(value))))
        elif isinstance(value, float):
            floats.append(_add_property(build, name, (build.PrependFloat32Slot, value)))
        else:
            numbers.append(_add_property(build, name, (build.PrependInt64Slot, int(value))))
    vectors = [(offset, _add_tables(build, tables)) for tables in (numbers, floats, texts)]
    return _add_table(build, 3, dict(enumerate(vectors)))


def _add_property(build: flatbuffers.Builder, name: str, value: Field) -> int:
    return _add_table(build, 2, {0: (build.PrependUOffsetTRelativeSlot, build.CreateString(name)), 1: value})


def _add_tensor(build: flatbuffers.Builder, name: str, array: Array, nominal: bool) -> int:
    """Add a tensor; in a nominal checkpoint only its name, as in onnxruntime-training."""
    content = None if nominal else build.CreateNumpyVector(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    dims = None if nominal else build.CreateNumpyVector(np.array(array.shape, np.int64)) if array.ndim else None
    offset = build.PrependUOffsetTRelativeSlot
    fields: dict[int, Field] = {0: (offset, build.CreateString(name))}
    if dims is not None:
        fields[2] = (offset, dims)
    if content is not None:
        fields |= {3: (build.PrependInt32Slot, int(ir.DataType.from_numpy(array.dtype))), 4: (offset, content)}
    return _add_table(build, 7, fields)


def _add_table(build: flatbuffers.Builder, num_slots: int, fields: Mapping[int, Field]) -> int:
    """Add a table with the given fields, keyed by slot."""
    build.StartObject(num_slots)
    for slot, (put, value) in fields.items():
        put(slot, value, 0)
    return int(build.EndObject())


def _add_tables(build: flatbuffers.Builder, tables: Sequence[int]) -> int:
    """Add a vector of tables."""
    build.StartVector(4, len(tables), 4)
    for table in reversed(tables):
        build.PrependUOffsetTRelative(table)
    return int(build.EndVector())
