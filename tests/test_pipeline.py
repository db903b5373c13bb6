"""The whole pipeline on a model of real widths: a SPLADE-shaped BERT-base of two layers, for texts of 128 tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.entry_point import run_onnxtool
from tests.workshop import Workshop, load_script

NAME = "splade-bert-base"


def shallow(folder: Path) -> None:
    """Write the model with two layers, and for a quarter of its tokens, into a folder of its name in `folder`."""
    make_models = load_script("make_models")
    recipe = make_models.load_recipes()[NAME]
    recipe["config"] |= {"num_hidden_layers": 2, "max_position_embeddings": 128}
    with mock.patch.object(make_models, "load_recipes", return_value={NAME: recipe}):
        make_models.make_model(NAME, folder)


@pytest.mark.slow
def test_a_model_of_bert_base_widths_goes_through_export_optimize_stats_and_infer(
    workshop: Workshop, tmp_path: Path
) -> None:
    """155 MB of weights, 39 million parameters; tied weights, which are most of them, stay one tensor."""
    checkpoint = workshop.made("shallow", shallow) / NAME
    exported = run_onnxtool(tmp_path, "export", "--model_name", checkpoint, "--format", "json", "--quiet")
    assert exported.returncode == 0, exported.stderr
    report = json.loads(exported.stdout)
    assert report["outputs"] == [{"name": "sparse", "dtype": "float32", "shape": ["batch_size", 30522]}]
    assert report["verification"]["max_abs_error"] <= 1e-4
    assert len(report["verification"]["cases"]) >= 6
    model = tmp_path / "models" / "splade-bert-base.onnx"
    assert model.stat().st_size < 156e6

    optimized = run_onnxtool(tmp_path, "optimize", "--model_path", model, "--stats", "--quiet")
    assert optimized.returncode == 0, optimized.stderr
    before, after = (int(count) for count in re.findall(r"^Number of nodes: (\d+)$", optimized.stdout, re.MULTILINE))
    assert after < before
    for line in ("Number of inputs: 3", "Number of outputs: 1"):
        assert optimized.stdout.count(f"\n{line}\n") == 2
    assert len(re.findall(r"^Initializers: \d+$", optimized.stdout, re.MULTILINE)) == 2

    stats = json.loads(run_onnxtool(tmp_path, "stats", model, "--format", "json").stdout)
    assert stats["num_parameters"] == pytest.approx(38.6e6, rel=0.01)
    assert stats["duplicate_bytes"] < 1e6

    answer = run_onnxtool(
        tmp_path, "infer", "--model_path", model.with_name("splade-bert-base-optimized.onnx"), "--text", "what is AI?"
    )
    assert answer.returncode == 0, answer.stderr
    assert "Task: sparse-encoding" in answer.stdout
