"""A model of more than 2 GB becomes artifacts, and is in memory once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from onnxtool.errors import ArtifactError
from onnxtool.training.artifacts import generation
from tests.training.small_models import make, perceptron

GIGABYTES = 2.2
WIDTH, CLASSES = 1024, 8
PROGRAM = """
import sys
from onnxtool.runtime.machine import peak_rss_bytes
from onnxtool.training import artifacts
artifacts.generate_artifacts(
    sys.argv[1], requires_grad=["*"], loss=artifacts.LossType.CrossEntropyLoss,
    optimizer=artifacts.OptimType.SGD, artifact_directory=sys.argv[2],
)
print(peak_rss_bytes())
"""


def write_large(path: Path, gigabytes: float) -> None:
    """Write int64 [N, S] -> embedding -> mean over S -> scores [N, 8], with a data file full of holes."""
    rows = int(gigabytes * 1e9 / 4 / WIDTH)
    data = path.with_suffix(".data")
    tensors, place = [helper.make_tensor("axes", TensorProto.INT64, [1], [1])], 0
    for name, shape in (("words.weight", (rows, WIDTH)), ("out.weight", (CLASSES, WIDTH)), ("out.bias", (CLASSES,))):
        tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", data.name), ("offset", place), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
        place += size
    with data.open("wb") as file:
        file.truncate(place)
    nodes = [
        helper.make_node("Gather", ["words.weight", "ids"], ["embedded"], name="words"),
        helper.make_node("ReduceMean", ["embedded", "axes"], ["pooled"], keepdims=0, name="pool"),
        helper.make_node("Gemm", ["pooled", "out.weight", "out.bias"], ["scores"], transB=1, name="out"),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", "S"])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", CLASSES])
    graph = helper.make_graph(nodes, "large", [ids], [scores], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


@pytest.mark.slow
def test_a_model_of_more_than_two_gigabytes_becomes_artifacts(tmp_path: Path) -> None:
    """Passed by its path; the checkpoint has it all, the graphs nothing of it, and memory holds it at most once.

    A process of its own makes them, whose peak is its own.
    """
    path, folder = tmp_path / "model.onnx", tmp_path / "training"
    write_large(path, GIGABYTES)
    command = [sys.executable, "-c", PROGRAM, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1.5 * GIGABYTES * 1e9  # the libraries take 0.2 GB
    size = (folder / "checkpoint").stat().st_size
    path.with_suffix(".data").unlink()  # nothing refers to it any more
    for name in ("training_model", "eval_model"):
        graph = folder / f"{name}.onnx"
        onnx.checker.check_model(graph)
        assert graph.stat().st_size < 1e5
    assert size > GIGABYTES * 0.999e9
    (folder / "checkpoint").unlink()  # temporary folders of past sessions are kept


def test_one_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol buffers end at 2 GB; here the end is lower."""
    monkeypatch.setattr(generation, "MAX_MODEL_BYTES", 100)
    with pytest.raises(ArtifactError, match="more than 2 GB") as caught:
        make(tmp_path, perceptron())
    assert "pass the path" in caught.value.hint
