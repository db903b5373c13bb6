"""A fixture: the folder in which a reader of the documentation runs its commands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.docs.documents import make_reader
from tests.workshop import Workshop, load_script, make_shallow, trained_model

# The commands that many documents begin with; they are run once, and their output is compared in each document.
PREPARED = (
    "onnxtool export --model_name models/checkpoints/all-MiniLM-L6-v2",
    "onnxtool optimize --model_path models/all-MiniLM-L6-v2.onnx",
    "onnxtool export models/checkpoints/splade --head splade --force",
    "onnxtool optimize models/splade.onnx --force",
)


@pytest.fixture(scope="session")
def reader(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that the documents name, and with MiniLM and SPLADE exported and optimized.

    MiniLM has two of its six layers here: no document shows a number that is compared.
    All documents run in it, also those of another process: each writes files of its own.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reader"
    checkpoints = {"tiny-classifier": workshop.checkpoint("tiny-classifier")}
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "outputs.json").exists():
            load_script("make_models").place_trained(folder / "models" / "checkpoints")
            make_shallow(trained_model(), folder / "models" / "checkpoints" / "all-MiniLM-L6-v2", layers=2)
            make_reader(folder, checkpoints, PREPARED)
    return folder
