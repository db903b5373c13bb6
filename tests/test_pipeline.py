"""The whole pipeline on models of real size: a SPLADE-shaped BERT-base, and an encoder with trained weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
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


@pytest.mark.slow
def test_trained_weights_tell_paraphrases_from_unrelated_sentences(
    workshop: Workshop, minilm: Path, tmp_path: Path
) -> None:
    """Every pair that means the same is closer than every pair that does not, after export and fp16."""
    output = tmp_path / "minilm.onnx"
    done = run_onnxtool(
        tmp_path, "export", "--model_name", minilm, "--exporter", "torchscript", "--output", output, "--quiet"
    )
    assert done.returncode == 0, done.stderr
    done = run_onnxtool(tmp_path, "optimize", "--model_path", output, "--precision", "fp16", "--require_fusion")
    assert done.returncode == 0, done.stderr
    texts = (
        "How do I reset my password?",
        "What are the steps to change my login credentials?",
        "The recipe needs two eggs and a cup of flour.",
        "You will need 200 g of flour and two eggs.",
        "The train to Berlin leaves at noon.",
        "At twelve there is a train that goes to Berlin.",
    )
    arguments = [argument for text in texts for argument in ("--text", text)]
    done = run_onnxtool(
        tmp_path, "infer", "--model_path", tmp_path / "minilm-fp16.onnx", *arguments, "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    similarities = np.array(json.loads(done.stdout)["similarities"])
    paraphrases = [similarities[i, i + 1] for i in (0, 2, 4)]
    same = np.kron(np.eye(3), np.ones((2, 2))).astype(bool)
    assert min(paraphrases) > similarities[~same].max() + 0.2
