"""Keep translated graphs on disk: ONNX models, and reasons as JSON; reading executes no code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

import onnx
import onnxruntime
import torch

import onnxtool
from onnxtool.errors import OutputWriteError
from onnxtool.reading import parse_json
from onnxtool.torch_backend.nodes import called

_SYMBOL = re.compile(r"\b[suz]+\d+\b")
_KEY = re.compile(r"[0-9a-f]{64}")


def fingerprint(module: torch.fx.GraphModule, salt: str) -> str:
    """Return the SHA-256 of a graph (operators, arguments, types, shapes, strides, devices) and what compiles it.

    Names of nodes and symbolic sizes are not included.
    """
    lines = [salt, versions()]
    number = {node: _Reference(index) for index, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        target = "" if node.op == "placeholder" else called(node.target)
        lines.append(f"{node.op} {target} {arguments!r} {_description(node.meta.get('val'))}")
    symbols: dict[str, str] = {}
    text = _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"size{len(symbols)}"), "\n".join(lines))
    return hashlib.sha256(text.encode()).hexdigest()


class _Reference:
    """Prints as a node's position in the graph."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __repr__(self) -> str:
        return f"%{self._index}"


def _description(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    if isinstance(value, tuple | list):
        return " ".join(map(_description, value))
    return f"{type(value).__name__} {value}"


@functools.cache
def versions() -> str:
    """Name all libraries that a translated graph depends on, with versions."""
    libraries = [f"{name} {version(name)}" for name in ("onnx-ir", "onnxscript", "onnx")]
    return (
        f"onnxtool {onnxtool.__version__} torch {torch.__version__} onnxruntime {onnxruntime.__version__} {libraries}"
    )


def _checksum_entry(key: str, model: bytes) -> bytes:
    """Return the bytes to append to a cached model: an ONNX metadata entry with the checksum of everything before.

    It detects damage and wrong names, but not attacks: anyone who can write to the folder can write any model.
    """
    checksum = hashlib.sha256(key.encode() + model).hexdigest()
    entry = onnx.StringStringEntryProto(key="onnxtool.checksum", value=checksum)
    appended: bytes = onnx.ModelProto(metadata_props=[entry]).SerializeToString()
    return appended


class Cache:
    """A folder of models by fingerprint; without a folder, it is always empty."""

    def __init__(self, folder: Path | str | None) -> None:
        self.folder = Path(folder) if folder else None

    def read(self, key: str) -> bytes:
        """Return the model with this fingerprint; empty bytes if the file is damaged or belongs to another graph."""
        data = self._read(key, ".onnx")
        length = len(_checksum_entry(key, b""))
        model, entry = data[:-length], data[-length:]
        return model if entry == _checksum_entry(key, model) else b""

    def write(self, key: str, model: bytes) -> None:
        """Store a model.

        Raises:
            OutputWriteError: the folder cannot be written to.
        """
        self._write(key, ".onnx", model + _checksum_entry(key, model))

    def read_json(self, key: str) -> object:
        """Return a record; None if there is none, or the file is damaged."""
        try:
            return parse_json(self._read(key, ".json") or b"null")
        except ValueError:
            return None

    def write_json(self, key: str, record: object) -> None:
        """Store a record.

        Raises:
            OutputWriteError: the folder cannot be written to.
        """
        self._write(key, ".json", json.dumps(record).encode())

    def _read(self, key: str, suffix: str) -> bytes:
        if self.folder is None or not _KEY.fullmatch(key):
            return b""
        path = self.folder / f"{key}{suffix}"
        try:
            return path.read_bytes() if path.is_file() else b""  # a pipe would wait for a writer
        except OSError:
            return b""  # writing will fail too, with an error

    def _write(self, key: str, suffix: str, data: bytes) -> None:
        if self.folder is None or not key:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{key[:8]}-")
        except OSError as error:
            raise OutputWriteError(f"cannot write to {self.folder}: {error.strerror}", "pass another folder") from error
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).replace(self.folder / f"{key}{suffix}")
        except OSError as error:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise OutputWriteError(f"cannot write to {self.folder}: {error.strerror}", "pass another folder") from error
