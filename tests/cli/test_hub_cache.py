"""Every command reads a model whose file and data are links into one folder, and none reads data from elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.cli.entry_point import run_onnxtool
from tests.encoding.corpora import make_texts, write_corpus
from tests.evaluation.collections import random_texts, write_beir
from tests.infer.tiny_models import model_for, table, write_model

pytestmark = [
    pytest.mark.usefixtures("workers_here"),
    pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there"),
]
V, H = 15, 32  # a table of more than 1 KB, which stays where it is on the disk
QUIET = ("--format", "json", "--quiet")
BRIEF = ("--runs", "2", "--warmup", "1", "--batch_size", "1", "--sequence_length", "8")
COMMANDS: dict[str, tuple[str, ...]] = {
    "stats": ("stats", "MODEL", "--format", "json"),
    "infer": ("infer", "--model_path", "MODEL", "--text", "the red cat", "--text", "a dog", *QUIET),
    "benchmark": ("infer", "--benchmark", "--model_path", "MODEL", *BRIEF, *QUIET),
    "optimize": ("optimize", "--model_path", "MODEL", "--output", "o.onnx", *QUIET),
    "encode": ("encode", "part", "--model_path", "MODEL", "--input", "corpus.jsonl", "--output", "vectors/", *QUIET),
    "evaluate": ("evaluate", "--model_path", "MODEL", "--data", "data", "--cache", "cache", *QUIET),
    "artifacts": ("artifacts", "--model_path", "MODEL", "--output", "artifacts", "--train", "word*", *QUIET),
}


def link_into(folder: Path, blobs: Path, data: Path) -> Path:
    """Make the file of the model in `folder` a link to a blob, and its data a link to `data`, as the hub's cache does.

    Returns:
        The link that is called as the model was.
    """
    path = folder / "model.onnx"
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    blobs.mkdir(parents=True)
    path.rename(blobs / "aa11")
    (folder / "model.onnx_data").rename(data)
    path.symlink_to(blobs / "aa11")
    (folder / "model.onnx_data").symlink_to(data)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the snapshot of an embedder, a corpus and a collection."""
    pytest.importorskip("pyarrow")
    snapshot = tmp_path / "models--org--name" / "snapshots" / "ab12"
    snapshot.mkdir(parents=True)
    model = model_for("sentence-similarity", table(V, H), "last_hidden_state")
    path = write_model(snapshot, model, modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}})
    path.rename(snapshot / "model.onnx")
    write_corpus(tmp_path / "corpus.jsonl", make_texts(10))
    write_beir(tmp_path / "data", random_texts(4, 8, seed=0))
    return tmp_path


def run(root: Path, name: str) -> Any:
    words = ["models--org--name/snapshots/ab12/model.onnx" if word == "MODEL" else word for word in COMMANDS[name]]
    return run_onnxtool(root, *words)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_in_the_hubs_cache_is_read(root: Path, name: str) -> None:
    """Both links lead into the folder of blobs."""
    blobs = root / "models--org--name" / "blobs"
    link_into(root / "models--org--name" / "snapshots" / "ab12", blobs, blobs / "bb22")
    done = run(root, name)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_data_that_a_link_takes_from_elsewhere_is_refused(root: Path, name: str) -> None:
    """Though the model itself is a link into the blobs: a downloaded folder must not show the user's own files."""
    blobs = root / "models--org--name" / "blobs"
    link_into(root / "models--org--name" / "snapshots" / "ab12", blobs, root / "secret.bin")
    done = run(root, name)
    assert done.returncode == 1
    assert "refers to external data outside its folder: 'model.onnx_data'" in done.stderr


def test_the_answers_are_those_of_the_plain_file(root: Path) -> None:
    """The weights are found by other names, and are the same."""
    plain = json.loads(run(root, "infer").stdout)
    blobs = root / "models--org--name" / "blobs"
    link_into(root / "models--org--name" / "snapshots" / "ab12", blobs, blobs / "bb22")
    for name in ("infer", "optimize"):
        done = run(root, name)
        assert done.returncode == 0, done.stderr
    assert json.loads(run(root, "infer").stdout)["answers"] == plain["answers"]
    weights = onnx.load(root / "o.onnx").graph.initializer
    found = next(onnx.numpy_helper.to_array(one) for one in weights if one.name == "word_embeddings.weight")
    np.testing.assert_array_equal(found, table(V, H))
