"""Say what one run of a model costs on inputs of a given shape: MACs, and memory of activations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.errors import ModelFileError
from onnxtool.figures import Cost
from onnxtool.stats.contrib import Value
from onnxtool.stats.known import Names
from onnxtool.stats.propagation import Propagation
from onnxtool.stats.settings import Shape
from onnxtool.wire import LARGE_BYTES, externalized

if TYPE_CHECKING:
    import onnx

# What an axis is, by the names that exporters give it; an axis of no telling name is the rows where it is the first.
_ROWS = ("batch",)
_PAST = ("past",)
_PIXELS = ("height", "width")
_SAMPLES = ("sample",)
_NUM_PIXELS = 224
_NUM_SAMPLES = 16_000
_FLOAT = 1


def estimate_cost(path: Path, shape: Shape) -> Cost:
    """Return what a run of the model at `path` costs on a batch of `shape`.

    Axes that the file fixes keep their size; pictures have 224 pixels a side, sounds a second of 16 kHz, and there is
    no past.

    Raises:
        ModelFileError: the file is malformed.
    """
    model = _load(path)
    names = Names()
    for value in model.graph.input:
        tensor = value.type.tensor_type
        sizes = tuple(_size(dim, axis, shape) for axis, dim in enumerate(tensor.shape.dim))
        names.values[value.name] = Value(sizes, tensor.elem_type or _FLOAT)
    totals = Propagation(model).follow(model.graph, names)
    return Cost(
        batch_size=shape.batch_size,
        sequence_length=shape.sequence_length,
        macs=sum(totals.macs.values()),
        macs_by_op=dict(sorted(totals.macs.items(), key=lambda item: (-item[1], item[0]))),
        activation_bytes=totals.num_bytes,
        peak_activation_bytes=totals.peak_bytes,
        num_unknown_nodes=sum(totals.unknown.values()),
        unknown_ops=dict(sorted(totals.unknown.items(), key=lambda item: (-item[1], item[0]))),
    )


def _load(path: Path) -> onnx.ModelProto:
    """Load a model without its weights, but with the small tensors that shapes are computed from."""
    import onnx
    from google.protobuf.message import DecodeError
    from onnx.external_data_helper import load_external_data_for_tensor

    try:
        model = onnx.ModelProto.FromString(externalized(path))
    except DecodeError as error:
        raise ModelFileError(f"{path} is no model that onnx reads: {error}", "export or copy it again") from error
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place and place.get("location") != path.name and int(place.get("length") or LARGE_BYTES + 1) <= LARGE_BYTES:
            load_external_data_for_tensor(tensor, str(path.parent))
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
    return model


def _size(dim: Any, axis: int, shape: Shape) -> int:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    # protobuf gives bytes for a name that is no text.
    name = dim.dim_param if isinstance(dim.dim_param, str) else ""
    return sum(_size_of_name(part.strip().lower(), axis, shape) for part in name.split("+"))


def _size_of_name(name: str, axis: int, shape: Shape) -> int:
    if any(part in name for part in _PAST):
        return 0
    if any(part in name for part in _ROWS):
        return shape.batch_size
    if name in _PIXELS:
        return _NUM_PIXELS
    if any(part in name for part in _SAMPLES):
        return _NUM_SAMPLES
    known_length = any(part in name for part in ("seq", "length", "token", "time", "frame"))
    return shape.sequence_length if known_length or axis else shape.batch_size
