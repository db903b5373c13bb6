"""A model of more than 2 GB becomes artifacts, and is in memory once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_large_training

from onnxtool.errors import ArtifactError
from onnxtool.training.artifacts import generation
from tests.training.small_models import make, perceptron

GIGABYTES = 2.2


@pytest.mark.slow
def test_a_model_of_more_than_two_gigabytes_becomes_artifacts(tmp_path: Path) -> None:
    """Passed by its path; the checkpoint has it all, the graphs nothing of it, and memory holds it at most once.

    The step of the script runs in a process of its own, whose peak is its own.
    """
    bench_large_training.make_model(tmp_path / "model.onnx", GIGABYTES)
    command = [sys.executable, bench_large_training.__file__, "--step", "artifacts", "--folder", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(bench_large_training.ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"]
    assert peak < 1.5 * GIGABYTES * 1e9  # the libraries take 0.2 GB
    folder = tmp_path / "training"
    size = (folder / "checkpoint").stat().st_size
    (tmp_path / "model.data").unlink()  # nothing refers to it any more
    for name in ("training_model", "eval_model"):
        path = folder / f"{name}.onnx"
        onnx.checker.check_model(path)
        assert path.stat().st_size < 1e5
    assert size > GIGABYTES * 0.999e9
    (folder / "checkpoint").unlink()  # temporary folders of past sessions are kept


def test_one_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol buffers end at 2 GB; here the end is lower."""
    monkeypatch.setattr(generation, "MAX_MODEL_BYTES", 100)
    with pytest.raises(ArtifactError, match="more than 2 GB") as caught:
        make(tmp_path, perceptron())
    assert "pass the path" in caught.value.hint
