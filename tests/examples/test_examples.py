"""The examples run as their READMEs say."""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT, outputs_of, run_command, run_console
from tests.workshop import Workshop, load_script, make_shallow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of a POSIX shell"),
]


def example_in(repository: Path, request: pytest.FixtureRequest) -> Path:
    """Copy the folder of the example that the test is named after into a repository."""
    name = request.node.originalname.removeprefix("test_")
    return Path(shutil.copytree(ROOT / "examples" / name, repository / "examples" / name))


@pytest.fixture
def folder(request: pytest.FixtureRequest, reader: Path) -> Path:
    """The folder of the example, in a repository with the reader's models."""
    return example_in(reader, request)


@pytest.fixture
def shallow_folder(request: pytest.FixtureRequest, minilm: Path, tmp_path: Path) -> Path:
    """The folder of the example, in a repository whose MiniLM has a layer of six and half of its words, or fewer.

    It is enough to learn from a few texts.
    """
    make_shallow(
        minilm,
        tmp_path / "models" / "checkpoints" / "all-MiniLM-L6-v2",
        layers=1,
        words=getattr(request, "param", 14_500),
    )
    return example_in(tmp_path, request)


def test_release(folder: Path, workshop: Workshop) -> None:
    """Two models and their reviews; the second make does nothing, and new weights rebuild one of the models."""
    for name in ("tiny-splade", "tiny-encoder"):  # make_models.py leaves them, and they have fewer words
        shutil.copytree(workshop.checkpoint(name), folder.parents[1] / "models" / "checkpoints" / name)
    shutil.copytree(ROOT / "scripts", folder.parents[1] / "scripts", dirs_exist_ok=True)
    shutil.copy(ROOT / "models" / "recipes.json", folder.parents[1] / "models")
    run_console(folder / "README.md", folder, {})
    assert "Number of nodes" in (folder / "models" / "tiny-splade-review.md").read_text(encoding="utf-8")
    (folder.parents[1] / "models" / "checkpoints" / "tiny-splade" / "model.safetensors").touch()
    planned = run_command("make --dry-run release", folder)
    assert "models/tiny-splade-optimized.onnx" in planned
    assert "tiny-encoder" not in planned


def test_fine_tune(shallow_folder: Path) -> None:
    """The classifier learns its task in the steps of the README, is exported, and gives the label that it learned."""
    run_console(shallow_folder / "README.md", shallow_folder, {})
    text = "to be honest the soup was not worth the trip"
    printed = run_command(
        f"onnxtool infer --model_path classifier-optimized.onnx --text '{text}' --top_k 1", shallow_folder
    )
    assert "negative" in printed


@pytest.mark.parametrize("shallow_folder", [5_000], indirect=True)
def test_train_splade(shallow_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse encoder of two steps is exported with its head, and a text's own words are among its terms."""
    texts = load_script("documentation_texts")  # 400 of each kind are enough for 120 documents
    for name in ("documented_objects", "manual_pages"):
        every = getattr(texts, name)
        monkeypatch.setattr(texts, name, lambda *given, every=every: itertools.islice(every(*given), 400))
    shutil.copytree(ROOT / "scripts", shallow_folder.parents[1] / "scripts", dirs_exist_ok=True)
    run_console(shallow_folder / "README.md", shallow_folder, {})
    text = "return the list of numbers"
    printed = run_command(f"onnxtool infer --model_path splade-int8.onnx --text '{text}' --top_k 8", shallow_folder)
    assert "list" in printed
    assert "numbers" in printed


def test_search(folder: Path, reader: Path) -> None:
    """A query finds the text that answers it."""
    run_console(folder / "README.md", folder, outputs_of(reader))
