"""Save and load checkpoints: parameters, moments, step, learning rate and properties in one file.

The format is safetensors: parameters under their names, moments under `optimizer/momentum0/NAME`, and the rest as
JSON metadata. onnxruntime-training files (ODTC) can also be read and written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from onnxtool.errors import CheckpointError
from onnxtool.model_file import staged
from onnxtool.reading import open_regular, parse_json
from onnxtool.training.checkpoints import Array as Array
from onnxtool.training.checkpoints import Checkpoint as Checkpoint
from onnxtool.training.checkpoints import Property as Property
from onnxtool.training.checkpoints.odtc import from_odtc, to_odtc

Format: TypeAlias = Literal["safetensors", "odtc"]

VERSION = 1
_KEY = "onnxtool_checkpoint"
_MOMENT = "optimizer/"


def save_checkpoint(checkpoint: Checkpoint, path: Path, *, format_name: Format = "safetensors") -> None:
    """Write a checkpoint atomically: `path` always holds either the old file or the new one.

    Raises:
        OutputWriteError: the file cannot be written.
        CheckpointError: the format cannot represent the checkpoint.
    """
    with staged(path, force=True) as staging:
        write_checkpoint(checkpoint, staging.model_path, format_name=format_name)


def write_checkpoint(checkpoint: Checkpoint, path: Path, *, format_name: Format = "safetensors") -> None:
    """Write a checkpoint directly to a file, for example in a staging folder."""
    if format_name == "odtc":
        path.write_bytes(to_odtc(checkpoint))
    else:
        _write_safetensors(checkpoint, path)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint in either format.

    Raises:
        CheckpointError: the file is missing, truncated, or not a checkpoint.
    """
    try:
        with open_regular(path) as file:
            start = file.read(8)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}", "check the path") from error
    if start[4:] == b"ODTC":
        return from_odtc(path)
    return _read_safetensors(path)


def _write_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    tensors = {} if checkpoint.is_nominal else {**checkpoint.trainable, **checkpoint.frozen}
    for moment, arrays in checkpoint.moments.items():
        tensors |= {f"{_MOMENT}{moment}/{name}": array for name, array in arrays.items()}
    document = {
        "version": VERSION,
        "trainable": {name: _type_of(array) for name, array in checkpoint.trainable.items()},
        "frozen": {name: _type_of(array) for name, array in checkpoint.frozen.items()},
        "moments": {moment: list(arrays) for moment, arrays in checkpoint.moments.items()},
        "step": checkpoint.step,
        "learning_rate": checkpoint.learning_rate,
        "properties": checkpoint.properties,
        "aliases": checkpoint.aliases,
        "nominal": checkpoint.is_nominal,
    }
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    try:
        # safetensors makes its files readable only by the owner; use the user's permissions as for the other files.
        path.touch()
        mode = path.stat().st_mode
        save_file(contiguous, path, {_KEY: json.dumps(document)})
        path.chmod(mode)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"safetensors has no dtype for {error}", "convert the parameter to float32") from error


def _read_safetensors(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="np") as file:
            document = _document(path, (file.metadata() or {}).get(_KEY, ""))
            present = set(file.keys())
            arrays: dict[str, Array] = {name: file.get_tensor(name) for name in present}
    except (SafetensorError, OSError, TypeError, AttributeError) as error:  # the last for dtypes NumPy does not have
        raise _broken(path, str(error)) from error
    try:
        return _checkpoint(document, arrays)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _broken(path, f"{type(error).__name__} {error}") from error


def _document(path: Path, text: str) -> dict[str, Any]:
    if not text:
        raise CheckpointError(
            f"{path} is a safetensors file, but not a training checkpoint",
            "make one with onnxtool artifacts, or read it with onnxtool export",
        )
    try:
        document = parse_json(text)
    except ValueError as error:
        raise _broken(path, "its metadata is not JSON") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        version = document.get("version") if isinstance(document, dict) else None
        raise CheckpointError(
            f"{path} is a checkpoint of version {str(version)[:20]}, and this onnxtool reads {VERSION}",
            "it was written by another version of onnxtool",
        )
    return document


def _checkpoint(document: Mapping[str, Any], stored: Mapping[str, Array]) -> Checkpoint:
    """Assemble a checkpoint; raise if an entry is missing or has the wrong type."""
    nominal = bool(document["nominal"])

    def arrays(kind: str) -> dict[str, Array]:
        group = {name: _nominal(entry) if nominal else stored[name] for name, entry in document[kind].items()}
        for name, entry in document[kind].items():
            if _type_of(group[name]) != entry:
                raise ValueError(f"{name} is {_type_of(group[name])}, not {entry}")
        return group

    moments = {
        str(moment): {str(name): stored[f"{_MOMENT}{moment}/{name}"] for name in names}
        for moment, names in document["moments"].items()
    }
    properties = dict(document["properties"])
    if not all(isinstance(value, int | float | str) for value in properties.values()):
        raise TypeError("a property is neither a number nor a string")
    step, learning_rate = int(document["step"]), float(document["learning_rate"])
    if not (0 <= step < 2**63 and math.isfinite(learning_rate)):
        raise ValueError(f"step {step} at a learning rate of {learning_rate}")
    aliases = {str(name): str(target) for name, target in document["aliases"].items()}
    return Checkpoint(
        trainable=arrays("trainable"),
        frozen=arrays("frozen"),
        moments=moments,
        step=step,
        learning_rate=learning_rate,
        properties=properties,
        aliases=aliases,
        is_nominal=nominal,
    )


def _type_of(array: Array) -> list[object]:
    return [array.dtype.name, list(array.shape)]


def _nominal(entry: list[Any]) -> Array:
    """Return zeros that take no memory, with the checkpoint's dtype and shape."""
    kind, shape = entry
    dtype = np.dtype(str(kind))
    if dtype.hasobject or dtype.fields:
        raise TypeError(f"no parameter is of the dtype {dtype}")
    return np.broadcast_to(np.zeros((), dtype), tuple(int(size) for size in shape))


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is truncated or damaged: {why[:200]}", "copy it again, or make the artifacts again"
    )
