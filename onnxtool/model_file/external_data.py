"""Locate a model's external data through links, and restrict where it may lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from onnxtool.errors import ModelFileError
from onnxtool.options import checked

if TYPE_CHECKING:
    import onnx
    from google.protobuf.message import Message


@checked
def external_file(path: Path, location: str) -> Path:
    """Return the external data file at `location` of the model at `path`, following links.

    The rule for all commands: the location names a file below the folder of `path`, and that file, links followed,
    lies below this folder or below the folder of the file that `path` leads to. In the hub's cache, model and data are
    links into one folder of blobs; a data file that leads anywhere else is not read.

    Raises:
        ModelFileError: it lies outside, or is missing.
    """
    # A location is POSIX by specification, but a hostile one may be written for Windows.
    pure = PurePosixPath(location)
    outside = pure.is_absolute() or PureWindowsPath(location).drive or ".." in pure.parts or "\\" in location
    try:
        file = (path.parent / pure).resolve()
        if outside or not any(file.is_relative_to(folder) for folder in (path.parent.resolve(), path.resolve().parent)):
            raise ModelFileError(
                f"{path} refers to external data outside its folder: {location!r}",
                "onnxtool reads data beside the model only; move it there, or do not trust this file",
            )
        if file.is_file():
            return file
    except (OSError, RuntimeError, ValueError):  # a name that is too long, a loop of links, or a NUL: no such file
        pass
    raise ModelFileError(
        f"the external data {location!r} of {path} is missing", "copy it beside the model under this name"
    )


def relocate(proto: onnx.ModelProto, path: Path) -> Path:
    """Refer to the external data of the model at `path` by its location after following links; return its folder.

    onnx_ir does not read data through links, nor does onnxruntime for a model in memory; in the hub's cache all files
    are links. The message is only changed if there are links.

    Raises:
        ModelFileError: the data is missing or outside (`external_file`).
    """
    entries = [entry for tensor in _external_tensors(proto) for entry in tensor.external_data]
    entries = [entry for entry in entries if entry.key == "location"]
    files = {path.name: path.resolve()}  # whatever its name: weights inside the file itself
    for location in {entry.value for entry in entries} - {path.name}:
        files[location] = external_file(path, location)
    folder = path.parent.resolve()
    if all(file == folder / location for location, file in files.items()):
        return folder
    folder = Path(os.path.commonpath([file.parent for file in files.values()]))
    for entry in entries:
        entry.value = files[entry.value].relative_to(folder).as_posix()
    return folder


def _external_tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield all tensors with external data in a message: in graphs, attributes and functions."""
    import onnx

    if isinstance(message, onnx.TensorProto):
        if message.data_location == onnx.TensorProto.EXTERNAL:
            yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if isinstance(value, Iterable) else (value,):
                yield from _external_tensors(inner)
