"""Compute the cost of one run of a model on inputs of a given shape: MACs, and activation memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.errors import ModelFileError
from onnxtool.graph.elements import Scope
from onnxtool.graph.inference import Inference
from onnxtool.graph.operator_rules import Value
from onnxtool.model_file.domains import settle_domains
from onnxtool.model_file.weights import LARGE_BYTES, externalized
from onnxtool.stats.settings import Shape
from onnxtool.summary.figures import Cost

if TYPE_CHECKING:
    import onnx

# The meaning of an axis, by the names that exporters give it; a first axis with another name counts as the batch.
_ROWS = ("batch",)
_PAST = ("past",)
_PIXELS = ("height", "width")
_SAMPLES = ("sample",)
_NUM_PIXELS = 224
_NUM_SAMPLES = 16_000
_MOST_DIGITS = 10
_MOST = (1 << 63) - 1
_FLOAT = 1
_MAX_ELEMENTS = 1 << 12  # of a computed value: an untrusted file must not fill the memory


def estimate_cost(path: Path, shape: Shape) -> Cost:
    """Return the cost of a run of the model at `path` on a batch of `shape`.

    Axes that the file fixes keep their size. Images are 224 x 224 pixels, audio is one second at 16 kHz, and the
    key-value cache is empty.

    Raises:
        ModelFileError: the file is malformed, or its cost exceeds what any computer could run.
    """
    model = _load(path)
    scope = Scope()
    for value in model.graph.input:
        tensor = value.type.tensor_type
        sizes = tuple(_size(dim, axis, shape) for axis, dim in enumerate(tensor.shape.dim))
        scope.values[value.name] = Value(sizes, tensor.elem_type or _FLOAT)
    inference = Inference(model, max_elements=_MAX_ELEMENTS, estimates=True)
    totals = inference.follow(model.graph, scope)
    if max(sum(totals.macs.values()), totals.num_bytes) > _MOST:
        raise ModelFileError(
            f"a run of {path} costs more than a number of 64 bits can say", "give smaller sizes, or do not trust it"
        )
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

    try:
        model = settle_domains(onnx.ModelProto.FromString(externalized(path)))
    except DecodeError as error:
        raise ModelFileError(f"{path} is no model that onnx reads: {error}", "export or copy it again") from error
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            del tensor.external_data[:]  # meaningless here, and not checked
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        length = int(place.get("length") or 0)
        if 0 < length <= LARGE_BYTES:
            # Not with onnx, which refuses links, although ModelFile has checked that this one stays in the folder.
            with (path.parent / place["location"]).open("rb") as file:
                file.seek(int(place.get("offset") or 0))
                tensor.raw_data = file.read(length)
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
    return model


def _size(dim: Any, axis: int, shape: Shape) -> int:
    if dim.HasField("dim_value") and dim.dim_value >= 0:  # some exporters say -1 for any size
        return int(dim.dim_value)
    # protobuf returns bytes for a name that is not valid text.
    name = dim.dim_param if isinstance(dim.dim_param, str) else ""
    return sum(_size_of_name(part.strip().lower(), axis, shape) for part in name.split("+"))


def _size_of_name(name: str, axis: int, shape: Shape) -> int:
    if name.isascii() and name.isdecimal() and len(name) < _MOST_DIGITS:  # of `past_sequence_length + 1`
        return int(name)
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
