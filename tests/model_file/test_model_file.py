"""A model file is opened with its data checked, inside its folder, and stamped so that others still read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from onnxtool.errors import ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import STEPS_KEY, parse_steps, stamp, step_entry
from tests.graphs import NUM_BYTES, make_addition, refer_to, run, save_external, weight_of


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "../outside.bin",
        "data/../../outside.bin",
        "data/../inside.bin",
        "..\\outside.bin",
        "data\\inside.bin",
        "C:\\outside.bin",
        "C:inside.bin",
        "link.bin",
        "linked_folder/outside.bin",
    ],
)
def test_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    """Absolute paths, parents, Windows paths and links that lead out of the folder are refused, there or not."""
    folder = tmp_path / "models"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(NUM_BYTES))
    (folder / "inside.bin").write_bytes(bytes(NUM_BYTES))
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    (folder / "linked_folder").symlink_to(tmp_path)
    refer_to(folder / "model.onnx", location)
    with pytest.raises(ModelFileError, match="outside its folder") as caught:
        ModelFile.open(folder / "model.onnx")
    assert repr(location) in caught.value.message
    assert caught.value.hint


def test_data_in_the_folder_is_accepted(tmp_path: Path) -> None:
    """Data in a folder below the model, and links within the folder, are fine; sizes count each file once."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "weights.bin").write_bytes(bytes(NUM_BYTES))
    (tmp_path / "link.bin").symlink_to(tmp_path / "data" / "weights.bin")
    path = tmp_path / "model.onnx"
    for location in ("data/weights.bin", "./data/weights.bin", "link.bin"):
        refer_to(path, location)
        model = ModelFile.open(path)
        assert model.external_locations == (location,)
        assert model.size_bytes == path.stat().st_size + NUM_BYTES


@pytest.mark.parametrize("location", ["missing.bin", "folder", "n" * 300, "nul\0.bin", "loop.bin", "\x1b[31m.bin"])
def test_data_that_is_missing_is_named(tmp_path: Path, location: str) -> None:
    """No file, a folder, an impossible name and a loop of links are missing data, named without control codes."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop.bin").symlink_to(tmp_path / "loop.bin")
    refer_to(tmp_path / "model.onnx", location)
    with pytest.raises(ModelFileError, match="is missing") as caught:
        ModelFile.open(tmp_path / "model.onnx")
    assert repr(location) in caught.value.message
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("length", [NUM_BYTES, None])
def test_truncated_data_is_refused(tmp_path: Path, length: int | None) -> None:
    """Data shorter than the elements need is refused, also where the model does not say its length."""
    refer_to(tmp_path / "model.onnx", "weights.bin", length)
    (tmp_path / "weights.bin").write_bytes(bytes(NUM_BYTES))
    ModelFile.open(tmp_path / "model.onnx")
    (tmp_path / "weights.bin").write_bytes(bytes(NUM_BYTES - 1))
    with pytest.raises(ModelFileError, match=f"has {NUM_BYTES - 1} bytes; the model refers to bytes up to {NUM_BYTES}"):
        ModelFile.open(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "write", [lambda path: onnx.save(make_addition(5.0), path), lambda path: save_external(path, 5.0, "w")]
)
def test_a_stamped_model_is_still_read_by_others(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """After a stamp, onnx and onnxruntime read the metadata and the same weights."""
    path = tmp_path / "model.onnx"
    write(path)
    model = ModelFile.open(path)
    assert not model.steps
    model.stamp({"onnxtool.source": "a/b", "unicode": "ü\n"})
    model.stamp(step_entry("export", None, opset=17, previous=({"step": "before"},)))
    assert [step["step"] for step in model.steps] == ["before", "export"]
    metadata = {item.key: item.value for item in onnx.load(path).metadata_props}
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == metadata
    assert ModelFile.open(path).metadata == model.metadata == metadata
    assert metadata["unicode"] == "ü\n"
    assert weight_of(path) == run(path) == 5.0
    steps = ModelFile.open(path).steps
    assert [step["step"] for step in steps] == ["before", "export"]
    assert json.loads(metadata[STEPS_KEY]) == list(steps)


def test_a_model_of_another_tool_has_no_steps(tmp_path: Path) -> None:
    """Without the metadata there are no steps."""
    onnx.save(make_addition(1.0), tmp_path / "model.onnx")
    assert ModelFile.open(tmp_path / "model.onnx").steps == ()


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", "3", "[" * 100_000, "[" + "9" * 5000 + "]"], ids=lambda text: text[:5]
)
def test_steps_that_were_edited_are_refused(tmp_path: Path, text: str) -> None:
    """What is not a list of objects is no record of steps, however it is broken."""
    path = tmp_path / "model.onnx"
    onnx.save(make_addition(1.0), path)
    stamp(path, {STEPS_KEY: text})
    assert parse_steps(text) is None
    with pytest.raises(ModelFileError, match="onnxtool.steps of .* cannot be read"):
        _ = ModelFile.open(path).steps
