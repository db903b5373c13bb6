"""`onnxtool artifacts` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.cli.entry_point import run_onnxtool
from tests.training.small_models import batch, load, parameters_of, perceptron
from tests.workshop import Workshop


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "perceptron.onnx"
    onnx.save(perceptron(), path)
    return path


def test_a_file_becomes_artifacts_that_train(tmp_path: Path, model: Path) -> None:
    """Beside it, in a folder of its name; the report is one JSON document."""
    done = run_onnxtool(
        tmp_path, "artifacts", "--model_path", model, "--freeze", "fc1.*", "--weight_decay", "0.1",
        "--max_grad_norm", "1", "--format", "json", "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["trained"] == ["fc2.weight", "fc2.bias"]
    assert [entry["name"] for entry in report["inputs"]] == ["x", "labels"]
    folder = tmp_path / "perceptron-training"
    assert {Path(file["path"]).name for file in report["files"]} == {file.name for file in folder.iterdir()}
    _, module, optimizer = load(folder)
    module(*batch())
    optimizer.step()


def test_artifacts_are_replaced_with_force_alone(tmp_path: Path, model: Path) -> None:
    """The checkpoint in there may be of a week's training."""
    arguments = ("artifacts", "--model_path", model, "--output", tmp_path / "out", "--quiet")
    assert run_onnxtool(tmp_path, *arguments).returncode == 0
    again = run_onnxtool(tmp_path, *arguments)
    assert again.returncode == 1
    assert "already exists" in again.stderr
    assert run_onnxtool(tmp_path, *arguments, "--force").returncode == 0


def test_wrong_names_and_wrong_usage_have_their_codes(tmp_path: Path, model: Path) -> None:
    """1 for what the model does not have, 2 for what the command does not take."""
    done = run_onnxtool(tmp_path, "artifacts", "--model_path", model, "--train", "fc1.wieght", "--quiet")
    assert (done.returncode, done.stdout) == (1, "")
    assert "hint: did you mean fc1.weight" in done.stderr
    assert run_onnxtool(tmp_path, "artifacts").returncode == 2
    assert run_onnxtool(tmp_path, "artifacts", "--model_path", model, "--model_name", "x").returncode == 2
    done = run_onnxtool(tmp_path, "artifacts", "--model_path", model, "--task", "fill-mask", "--quiet")
    assert (done.returncode, "--task applies to a checkpoint" in done.stderr) == (2, True)
    done = run_onnxtool(tmp_path, "artifacts", "--model_path", tmp_path / "nothing.onnx", "--quiet")
    assert done.returncode == 1
    assert not (tmp_path / "perceptron-training").exists()


@pytest.mark.slow
def test_a_checkpoint_becomes_artifacts_that_train(workshop: Workshop, tmp_path: Path) -> None:
    """With dropout, its parameters by name, and the tied ones once."""
    done = run_onnxtool(
        tmp_path, "artifacts", "--model_name", workshop.checkpoint("tiny-mlm"), "--freeze", "*.embeddings.LayerNorm.*",
        "--output", tmp_path / "out", "--format", "json", "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "bert.encoder.layer.0.attention.self.query.weight" in report["trained"]
    assert "bert.embeddings.LayerNorm.weight" in report["frozen"]
    assert report["proof"]["num_gradients"] == len(report["trained"])
    assert report["proof"]["gradient_error"] < 1e-4
    assert [entry["name"] for entry in report["inputs"]] == [
        "input_ids",
        "token_type_ids",
        "attention_mask",
        "labels",
    ]
    training = onnx.load(tmp_path / "out" / "training_model.onnx").graph
    assert any(node.op_type == "Dropout" for node in training.node)
    state, module, optimizer = load(tmp_path / "out")
    assert state.checkpoint.aliases["bert.embeddings.word_embeddings.weight"] == "cls.predictions.decoder.weight"
    import numpy as np

    ids = np.random.default_rng(0).integers(0, 1000, (2, 5))
    feeds = {"input_ids": ids, "labels": np.where(ids % 2, ids, -100)}
    feeds |= {"attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    optimizer.set_learning_rate(1e-2)
    losses = []
    for _ in range(12):
        module.lazy_reset_grad()
        losses.append(float(module(*(feeds[name] for name in module.input_names()))))
        optimizer.step()
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--train", "fc1.bias", "--freeze", "fc1.bias"), "fc1.bias cannot be trained and frozen at once", "one list"),
        (("--freeze", "*"), "there is no parameter to optimize", "freeze fewer"),
        (("--freeze", "fc2.wieght"), "no parameter called 'fc2.wieght'", "did you mean fc2.weight"),
        (("--loss_input", "logits"), "no value called 'logits'", "its outputs are"),
        (("--loss", "none"), "has the shape", "reduce it"),
        (("--loss", "none", "--loss_input", "best"), "'best' is int64", "take another output"),
        (("--loss", "MSELoss", "--shift_labels"), "has no classes", "leave them out"),
        (("--shift_labels",), "shifted with axis=-1", "ignore_index"),
        (("--loss", "none", "--ignore_index", "3"), "none has no classes", "leave them out"),
        (("--optimizer", "none", "--max_grad_norm", "1"), "no optimizer is written", "name one"),
        (("--prefix", "../"), "'../' is a path", "artifact_directory"),
    ],
)
def test_bad_input_gives_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], message: str, hint: str) -> None:
    """Two lines on stderr, nothing on stdout, no file and no traceback."""
    forward = perceptron()
    forward.graph.node.append(onnx.helper.make_node("ArgMax", ["y"], ["best"], axis=1, keepdims=0))
    path = tmp_path / "perceptron.onnx"
    onnx.save(forward, path)
    done = run_onnxtool(
        tmp_path, "artifacts", "--model_path", path, "--output", tmp_path / "out", "--quiet", *arguments
    )
    assert (done.returncode, done.stdout) == (1, "")
    error, way_out = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert way_out.startswith("hint: ")
    assert hint in way_out
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_the_description_for_a_browser_is_part_of_the_set(tmp_path: Path, model: Path) -> None:
    """It is planned, refused where it is, and taken away by artifacts for no browser."""
    arguments = ("artifacts", "--model_path", model, "--output", tmp_path / "out", "--quiet")
    planned = run_onnxtool(tmp_path, *arguments, "--target", "web", "--dry_run", "--format", "json")
    assert "training.json" in {Path(file["path"]).name for file in json.loads(planned.stdout)["files"]}
    assert run_onnxtool(tmp_path, *arguments, "--target", "web").returncode == 0
    description = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert description["inputs"][0] == {"name": "x", "dtype": "float32", "shape": ["N", 5]}
    assert [one["name"] for one in description["parameters"]["trained"]] == list(parameters_of(perceptron()))
    assert run_onnxtool(tmp_path, *arguments, "--force").returncode == 0
    assert not (tmp_path / "out" / "training.json").exists()
    refused = run_onnxtool(tmp_path, *arguments, "--target", "web")
    assert refused.returncode == 1
    named = run_onnxtool(tmp_path, *arguments, "--target", "web", "--prefix", "mine_")
    assert named.returncode == 1
    assert "web finds the files by their names, and the prefix is 'mine_'" in named.stderr
