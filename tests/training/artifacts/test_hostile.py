"""Files that lie, and models that are none: one clear error each, and nothing outside the folder is touched."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxtool.errors import ArtifactError, CheckpointError, GradientError, ModelFileError, OutputWriteError
from onnxtool.training.checkpoints.checkpoint import load_checkpoint
from tests.training.small_models import batch, load, make, perceptron

_DOCUMENT: dict[str, Any] = {
    "version": 1,
    "trainable": {"w": ["float32", [2]]},
    "frozen": {},
    "moments": {},
    "step": 0,
    "learning_rate": 0.1,
    "properties": {},
    "aliases": {},
    "nominal": False,
}
_TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def safetensors(path: Path, *, document: object = _DOCUMENT, tensor: object = _TENSOR, size: int | None = None) -> Path:
    """Write a checkpoint byte by byte, as no library would."""
    text = document if isinstance(document, str) else json.dumps(document)
    header = json.dumps({"__metadata__": {"onnxtool_checkpoint": text}, "w": tensor}).encode()
    path.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header + bytes(8))
    return path


def test_the_honest_one_is_read(tmp_path: Path) -> None:
    """So that the lies below are what is refused."""
    assert load_checkpoint(safetensors(tmp_path / "checkpoint")).trainable["w"].tolist() == [0, 0]


LIES: dict[str, dict[str, Any]] = {
    "a header of exabytes": {"size": 2**62},
    "a header of a negative size": {"size": 2**64 - 1},
    "a header that ends early": {"size": 20},
    "data beyond the end": {"tensor": {**_TENSOR, "data_offsets": [0, 8000]}},
    "data behind a gap": {"tensor": {**_TENSOR, "data_offsets": [4, 12]}},
    "a shape of terabytes": {"tensor": {**_TENSOR, "shape": [2**40]}},
    "a shape beyond any number": {"tensor": {**_TENSOR, "shape": [2**62, 4]}},
    "a negative shape": {"tensor": {**_TENSOR, "shape": [-2]}},
    "a dtype that nobody knows": {"tensor": {**_TENSOR, "dtype": "F99"}},
    "a dtype that numpy lacks": {"tensor": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}},
    "another shape than the checkpoint says": {"document": {**_DOCUMENT, "trainable": {"w": ["float32", [1, 2]]}}},
    "another dtype than it says": {"document": {**_DOCUMENT, "trainable": {"w": ["int32", [2]]}}},
    "a parameter that is not there": {"document": {**_DOCUMENT, "trainable": {"v": ["float32", [2]]}}},
    "metadata without end": {"document": "[" * 100_000},
    "steps without end": {"document": {**_DOCUMENT, "step": float("inf")}},
    "more steps than int64": {"document": {**_DOCUMENT, "step": 2**70}},
    "steps before the first": {"document": {**_DOCUMENT, "step": -1}},
    "a learning rate that is no number": {"document": {**_DOCUMENT, "learning_rate": float("nan")}},
    "objects of Python": {"document": {**_DOCUMENT, "nominal": True, "trainable": {"w": ["O", [2]]}}},
    "a nominal shape beyond memory": {
        "document": {**_DOCUMENT, "nominal": True, "trainable": {"w": ["float32", [2**40, 2**40]]}}
    },
}


@pytest.mark.parametrize("lie", LIES)
def test_a_checkpoint_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    """Before anything of what it claims is allocated."""
    path = safetensors(tmp_path / "checkpoint", **LIES[lie])
    with pytest.raises(CheckpointError, match="truncated or damaged") as caught:
        load_checkpoint(path)
    assert caught.value.hint


def test_a_nominal_checkpoint_takes_no_memory_for_what_it_claims(tmp_path: Path) -> None:
    """Four terabytes by its own account."""
    document = {**_DOCUMENT, "nominal": True, "trainable": {"w": ["float32", [2**40]]}}
    array = load_checkpoint(safetensors(tmp_path / "checkpoint", document=document)).trainable["w"]
    assert (array.shape, array.strides) == ((2**40,), (0,))


def _without_a_node() -> onnx.ModelProto:
    model = perceptron()
    del model.graph.node[0]
    return model


def _in_a_circle() -> onnx.ModelProto:
    model = perceptron()
    model.graph.node[0].input[0] = "a"
    return model


def _without_opset() -> onnx.ModelProto:
    model = perceptron()
    del model.opset_import[:]
    return model


def _of_opset(version: int) -> onnx.ModelProto:
    model = perceptron()
    model.opset_import[0].version = version
    return model


def _without_outputs() -> onnx.ModelProto:
    model = perceptron()
    del model.graph.output[:]
    return model


def _with_a_lost_output() -> onnx.ModelProto:
    model = perceptron()
    model.graph.output.append(helper.make_tensor_value_info("lost", TensorProto.FLOAT, [1]))
    return model


def _with_few_bytes() -> onnx.ModelProto:
    model = perceptron()
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-3]
    return model


def _with_a_negative_shape() -> onnx.ModelProto:
    model = perceptron()
    model.graph.initializer[0].dims[0] = -7
    return model


def _with_labels_of_float() -> onnx.ModelProto:
    model = perceptron()
    model.graph.input.append(helper.make_tensor_value_info("labels", TensorProto.FLOAT, ["N"]))
    return model


UNSOUND: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "nothing at all": (onnx.ModelProto, "does not say which opset"),
    "no opset": (_without_opset, "does not say which opset"),
    "an opset of the future": (lambda: _of_opset(99), "is of opset 99, and the installed onnx knows"),
    "an opset of the past": (lambda: _of_opset(3), "is of opset 3 and cannot be converted"),
    "a node is missing": (_without_a_node, "node relu reads 'h', which no node computes"),
    "a circle": (_in_a_circle, "node fc1 reads 'a', which is computed after it"),
    "no outputs": (_without_outputs, "has no outputs"),
    "an output of nothing": (_with_a_lost_output, "no node computes the output 'lost'"),
    "bytes are missing": (_with_few_bytes, "fc1.weight has 137 bytes, and 140 are its shape"),
    "a negative shape": (_with_a_negative_shape, r"fc1.weight has the shape \[-7, 5\]"),
    "labels that are no classes": (_with_labels_of_float, "labels of the model is float"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_a_model_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    """Though onnx.checker is never asked, as it does not know onnxruntime's operators."""
    model, message = UNSOUND[name]
    with pytest.raises((ArtifactError, GradientError), match=message) as caught:
        make(tmp_path / "out", model())
    assert caught.value.hint
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("prefix", ["../", "/", "a/b", ".", "\0", "a\nb", "x" * 300])
def test_no_prefix_leaves_the_folder(tmp_path: Path, prefix: str) -> None:
    """Nor is one taken that no file can begin with."""
    with pytest.raises((ArtifactError, OutputWriteError)):
        make(tmp_path / "deep" / "deeper", perceptron(), prefix=prefix)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_parameters_may_be_called_like_paths(tmp_path: Path) -> None:
    """Their names name no file: artifacts, a step and an export stay in the folder."""
    evil = "../../evil/../w"
    model = perceptron()
    model.graph.initializer[0].name = model.graph.node[0].input[1] = evil
    folder = tmp_path / "deep" / "deeper"
    assert evil in make(folder, model).trained
    state, module, optimizer = load(folder)
    module(*batch())
    optimizer.step()
    module.export_model_for_inferencing(folder / "inference.onnx", ["y"])
    assert evil in state.checkpoint.trainable
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {folder}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("location", "../../../../etc/passwd", "external data outside its folder"),
        ("location", "/etc/passwd", "external data outside its folder"),
        ("offset", str(2**60), "the model refers to bytes up to"),
        ("offset", "-5", "does not say where its external data lies"),
    ],
)
def test_external_data_that_lies_is_refused(tmp_path: Path, key: str, value: str, message: str) -> None:
    """A file from somewhere else must not end up in a checkpoint."""
    path = tmp_path / "model.onnx"
    onnx.save(perceptron(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match=message):
        make(tmp_path / "out", path)
    assert not (tmp_path / "out").exists()


def test_the_second_file_of_a_checkpoint_is_the_one_beside_it(tmp_path: Path) -> None:
    """The file beside a checkpoint of the reference has a name that the checkpoint does not choose."""
    from tests.training.checkpoints.test_odtc import large_checkpoint

    path = large_checkpoint(tmp_path)
    moved = path.rename(tmp_path / "renamed")
    with pytest.raises(CheckpointError, match="in renamed.data"):
        load_checkpoint(moved)


def test_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    """What the tests above refuse is not what is usual: an int64, a number without axes, an empty one."""
    from onnxtool.training.checkpoints.checkpoint import Checkpoint, save_checkpoint

    frozen: dict[str, Any] = {"i": np.arange(3), "n": np.float32(2).reshape(()), "e": np.zeros((0, 4), np.float16)}
    save_checkpoint(Checkpoint(frozen=frozen), tmp_path / "checkpoint")
    found = load_checkpoint(tmp_path / "checkpoint").frozen
    for name, array in frozen.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
