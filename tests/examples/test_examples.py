"""The examples run as their READMEs say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, outputs_of, run_command, run_console

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of a POSIX shell"),
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, reader: Path) -> Path:
    """The folder of the example that the test is named after, in a repository with the reader's models."""
    name = request.node.name.removeprefix("test_")
    return Path(shutil.copytree(ROOT / "examples" / name, reader / "examples" / name))


def test_release(folder: Path) -> None:
    """Two models and their reviews; the second make does nothing, and new weights rebuild one of the models."""
    shutil.copytree(ROOT / "scripts", folder.parents[1] / "scripts", dirs_exist_ok=True)
    shutil.copy(ROOT / "models" / "recipes.json", folder.parents[1] / "models")
    run_console(folder / "README.md", folder, {})
    assert "Number of nodes" in (folder / "models" / "tiny-splade-review.md").read_text(encoding="utf-8")
    (folder.parents[1] / "models" / "checkpoints" / "tiny-splade" / "model.safetensors").touch()
    planned = run_command("make --dry-run release", folder)
    assert "models/tiny-splade-optimized.onnx" in planned
    assert "tiny-encoder" not in planned


def test_fine_tune(folder: Path) -> None:
    """The classifier learns its task in the steps of the README, is exported, and gives the label that it learned."""
    run_console(folder / "README.md", folder, {})
    text = "to be honest the soup was not worth the trip"
    printed = run_command(f"onnxtool infer --model_path classifier-optimized.onnx --text '{text}' --top_k 1", folder)
    assert "negative" in printed


def test_train_splade(folder: Path) -> None:
    """A sparse encoder of two steps is exported with its head, and a text's own words are among its terms."""
    shutil.copytree(ROOT / "scripts", folder.parents[1] / "scripts", dirs_exist_ok=True)
    run_console(folder / "README.md", folder, {})
    text = "copy the files of a directory"
    printed = run_command(f"onnxtool infer --model_path splade-int8.onnx --text '{text}' --top_k 8", folder)
    assert "directory" in printed
    assert "copy" in printed


def test_search(folder: Path, reader: Path) -> None:
    """A query finds the text that answers it."""
    run_console(folder / "README.md", folder, outputs_of(reader))
