"""A file of another format that is given as a model is called what it is."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile


def torch_file() -> bytes:
    """Return what torch.save writes."""
    import torch

    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    return buffer.getvalue()


def safetensors_file() -> bytes:
    """Return a file of one tensor."""
    from safetensors.numpy import save

    return save({"w": np.zeros(2, np.float32)})


def archive(make: Callable[[io.BytesIO], zipfile.ZipFile | tarfile.TarFile]) -> bytes:
    """Return an archive of one file."""
    buffer = io.BytesIO()
    with make(buffer) as archive:
        if isinstance(archive, zipfile.ZipFile):
            archive.writestr("model.onnx", "x")
        else:
            archive.addfile(tarfile.TarInfo("model.onnx"))
    return buffer.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "PyTorch": (torch_file, "is a file of PyTorch, and no ONNX model"),
    "a pickle": (lambda: pickle.dumps({"w": 1}), "is a pickle, as older PyTorch"),
    "safetensors": (safetensors_file, "is a file of safetensors"),
    "GGUF": (lambda: b"GGUF\x03\x00\x00\x00\x01", "is a GGUF file"),
    "TensorFlow Lite": (lambda: b"\x1c\x00\x00\x00TFL3\x14\x00", "is a TensorFlow Lite model"),
    "ORT format": (lambda: b"\x18\x00\x00\x00ORTM\x00\x00", "in onnxruntime's own format"),
    "ZIP": (lambda: archive(lambda file: zipfile.ZipFile(file, "w")), "is a ZIP archive"),
    "tar": (lambda: archive(lambda file: tarfile.TarFile(fileobj=file, mode="w")), "is a tar archive"),
    "gzip": (lambda: gzip.compress(b"x"), "is a file packed by gzip"),
    "a pointer": (lambda: POINTER, "is a Git LFS pointer to a file that was not fetched"),
    "a page": (lambda: b"\n<!DOCTYPE html>\n<html>", "is a web page"),
    "OpenVINO": (lambda: b'<?xml version="1.0"?>\n<net/>', "is an XML file, as OpenVINO"),
    "a configuration": (lambda: json.dumps({"model_type": "bert"}).encode(), "is a JSON file"),
}


@pytest.mark.parametrize("name", FILES)
def test_another_format_is_called_what_it_is(tmp_path: Path, name: str) -> None:
    """Whatever the file is called, with the way out for this format."""
    make, message = FILES[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(make())
    with pytest.raises(ModelFileError, match=message) as caught:
        ModelFile.open(path)
    assert caught.value.hint
