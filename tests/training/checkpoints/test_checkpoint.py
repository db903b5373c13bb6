"""Checkpoints come back as they were written, or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper
from safetensors.numpy import save_file

from onnxtool.errors import CheckpointError
from onnxtool.training import onnxblock
from onnxtool.training.checkpoints import checkpoint as module
from onnxtool.training.checkpoints.checkpoint import Checkpoint, Format, load_checkpoint, save_checkpoint
from tests.training.small_models import make, perceptron

FORMATS: tuple[Format, ...] = ("safetensors", "odtc")


def example() -> Checkpoint:
    draw = np.random.default_rng(0)
    weights = {"w": draw.standard_normal((3, 4)).astype(np.float32), "b": draw.standard_normal(3).astype(np.float32)}
    frozen: dict[str, Any] = {"running": draw.standard_normal(3).astype(np.float32), "ids": np.arange(5)}
    moments = {name: {key: array * factor for key, array in weights.items()} for name, factor in MOMENTS.items()}
    properties: dict[str, Any] = {"epoch": 3, "loss": 0.25, "name": "größer"}
    return Checkpoint(weights, frozen, moments, step=7, learning_rate=0.5, properties=properties)


MOMENTS = {"momentum0": np.float32(2), "momentum1": np.float32(3)}


def assert_same(found: Checkpoint, wanted: Checkpoint) -> None:
    pairs = [(found.trainable, wanted.trainable), (found.frozen, wanted.frozen)]
    pairs += [(found.moments[name], wanted.moments[name]) for name in wanted.moments]
    for mine, other in pairs:
        assert set(mine) == set(other)
        for name, array in other.items():
            np.testing.assert_array_equal(mine[name], array)
            assert mine[name].dtype == array.dtype
    assert found.properties == wanted.properties
    assert (found.step, found.learning_rate) == (wanted.step, wanted.learning_rate)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_checkpoint_comes_back(tmp_path: Path, format_name: Format) -> None:
    """Parameters, moments, step, learning rate and properties; the format is found by the content."""
    save_checkpoint(example(), tmp_path / "checkpoint", format_name=format_name)
    assert_same(load_checkpoint(tmp_path / "checkpoint"), example())


def test_aliases_come_back(tmp_path: Path) -> None:
    """Of tied parameters, one is in the file."""
    saved = example()
    saved.aliases = {"head.w": "w"}
    save_checkpoint(saved, tmp_path / "checkpoint")
    assert load_checkpoint(tmp_path / "checkpoint").aliases == {"head.w": "w"}


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_nominal_checkpoint_is_small(tmp_path: Path, format_name: Format) -> None:
    """It knows names and takes no memory for values."""
    weights = {"w": np.ones((1000, 1000), np.float32)}
    save_checkpoint(Checkpoint(weights, is_nominal=True), tmp_path / "checkpoint", format_name=format_name)
    assert (tmp_path / "checkpoint").stat().st_size < 1000
    found = load_checkpoint(tmp_path / "checkpoint")
    assert found.is_nominal
    assert list(found.trainable) == ["w"]
    assert found.trainable["w"].strides in ((0, 0), ())


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, format_name: Format) -> None:
    """Wherever it ends."""
    path = tmp_path / "checkpoint"
    save_checkpoint(example(), path, format_name=format_name)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path)
        assert caught.value.hint


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_damaged_checkpoint_does_no_harm(tmp_path: Path, format_name: Format) -> None:
    """Bytes changed at random give an error of one kind, or other numbers."""
    path = tmp_path / "checkpoint"
    save_checkpoint(example(), path, format_name=format_name)
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    for _ in range(600):
        damaged = bytearray(whole)
        for place in draw.integers(8, len(whole), 4):
            damaged[place] = draw.integers(256)
        path.write_bytes(damaged)
        try:
            found = load_checkpoint(path)
        except CheckpointError:
            continue
        arrays = [*found.trainable.values(), *found.frozen.values()]
        assert all(found.is_nominal or array.nbytes <= len(whole) for array in arrays)


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    """Weights of a model, a version of the future, metadata that is no list of names, and nothing at all."""
    path = tmp_path / "checkpoint"
    with pytest.raises(CheckpointError, match="cannot read the checkpoint"):
        load_checkpoint(path)
    save_file({"w": np.zeros(3, np.float32)}, path)
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        load_checkpoint(path)
    key = "onnxtool_checkpoint"
    for document, message in (
        ({"version": 99}, "version 99"),
        ({"version": 1, "trainable": 3}, "damaged"),
        ([], "None"),
    ):
        save_file({"w": np.zeros(3, np.float32)}, path, {key: json.dumps(document)})
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in the night must not cost the training."""
    path = tmp_path / "checkpoint"
    save_checkpoint(example(), path)
    before = path.read_bytes()

    def fail(_checkpoint: object, path: Path, **_options: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_checkpoint", fail)
    with pytest.raises(Exception, match="no space"):
        save_checkpoint(example(), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such modes there")
def test_a_checkpoint_is_read_by_whom_the_user_lets(tmp_path: Path) -> None:
    """As the models beside it: a server of web pages is another user."""
    make(tmp_path, perceptron())
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir() if path.is_file()}
    assert modes["checkpoint"] == modes["training_model.onnx"]


def test_parameters_of_a_block_go_into_a_model_again(tmp_path: Path) -> None:
    """The helpers of onnxblock: saved from one model, loaded into another."""
    model, other = perceptron(), perceptron()
    tensors = list(model.graph.initializer)
    for tensor in other.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 0, tensor.name))
    onnxblock.save_checkpoint((tensors[:2], tensors[2:]), tmp_path / "checkpoint")
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", other)
    for mine, wanted in zip(other.graph.initializer, tensors, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(mine), numpy_helper.to_array(wanted))
    with pytest.raises(CheckpointError, match="at once"):
        onnxblock.save_checkpoint((tensors, tensors), tmp_path / "checkpoint")


def test_a_checkpoint_of_another_model_is_not_loaded(tmp_path: Path) -> None:
    """A shape says so."""
    model, other = perceptron(), perceptron()
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((2, 2), np.float32), "fc1.weight"))
    onnxblock.save_checkpoint((list(model.graph.initializer), []), tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="belongs to another|fc1.weight is"):
        onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", other)
    onnxblock.save_checkpoint((list(model.graph.initializer), []), tmp_path / "nominal", nominal_checkpoint=True)
    with pytest.raises(CheckpointError, match="has no values"):
        onnxblock.load_checkpoint_to_model(tmp_path / "nominal", other)
