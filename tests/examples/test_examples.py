"""The examples run as their READMEs say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, copy_of, outputs_of, run_command, run_console

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of a POSIX shell"),
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, reader: Path, tmp_path: Path) -> Path:
    """The folder of the example that the test is about, in a copy of the repository with the reader's models."""
    name = request.node.name.removeprefix("test_")
    copy_of(reader, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "models" / "recipes.json", tmp_path / "models")
    shutil.copytree(ROOT / "examples" / name, tmp_path / "examples" / name)
    return tmp_path / "examples" / name


def test_release(folder: Path) -> None:
    """Two models and their reviews; the second make does nothing, and new weights rebuild one of the models."""
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
    printed = run_command(f"onnxtool infer --model_path opinions-optimized.onnx --text '{text}' --top_k 1", folder)
    assert "negative" in printed


def test_search(folder: Path, reader: Path) -> None:
    """A query finds the text that answers it."""
    run_console(folder / "README.md", folder, outputs_of(reader))
