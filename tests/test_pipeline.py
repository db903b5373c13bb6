"""The whole pipeline on a model of real size: a SPLADE-shaped BERT-base."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.entry_point import run_onnxtool
from tests.workshop import Workshop


@pytest.mark.slow
def test_a_model_of_bert_base_size_goes_through_export_optimize_stats_and_infer(
    workshop: Workshop, tmp_path: Path
) -> None:
    """438 MB of weights, 110 million parameters; tied weights stay one tensor."""
    checkpoint = workshop.checkpoint("splade-bert-base")
    exported = run_onnxtool(tmp_path, "export", "--model_name", checkpoint, "--format", "json", "--quiet")
    assert exported.returncode == 0, exported.stderr
    report = json.loads(exported.stdout)
    assert report["outputs"] == [{"name": "sparse", "dtype": "float32", "shape": ["batch_size", 30522]}]
    assert report["verification"]["max_abs_error"] <= 1e-4
    assert len(report["verification"]["cases"]) >= 6
    model = tmp_path / "models" / "splade-bert-base.onnx"
    assert model.stat().st_size < 440e6

    optimized = run_onnxtool(tmp_path, "optimize", "--model_path", model, "--stats", "--quiet")
    assert optimized.returncode == 0, optimized.stderr
    before, after = (int(count) for count in re.findall(r"^Number of nodes: (\d+)$", optimized.stdout, re.MULTILINE))
    assert after < before
    for line in ("Number of inputs: 3", "Number of outputs: 1"):
        assert optimized.stdout.count(f"\n{line}\n") == 2
    assert len(re.findall(r"^Initializers: \d+$", optimized.stdout, re.MULTILINE)) == 2

    stats = json.loads(run_onnxtool(tmp_path, "stats", model, "--format", "json").stdout)
    assert stats["num_parameters"] == pytest.approx(109.5e6, rel=0.01)
    assert stats["duplicate_bytes"] < 1e6

    answer = run_onnxtool(
        tmp_path, "infer", "--model_path", model.with_name("splade-bert-base-optimized.onnx"), "--text", "what is AI?"
    )
    assert answer.returncode == 0, answer.stderr
    assert "Task: sparse-encoding" in answer.stdout
