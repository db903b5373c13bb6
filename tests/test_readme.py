"""What README.md shows is true: its commands run, its output is what they print, its Makefile works twice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workshop import Workshop

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(workshop: Workshop, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would be: with the demo's checkpoint, and a small model under the id that the hub has."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(minilm, folder / "models" / "checkpoints" / "all-MiniLM-L6-v2")
    name = "naver/splade-cocondenser-ensembledistil"
    shutil.copytree(workshop.checkpoint("tiny-splade"), folder / name)
    shutil.copytree(workshop.checkpoint("tiny-splade"), folder / "checkpoints" / Path(name).name)
    return folder


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def shape_of(line: str) -> str:
    """A line without its figures, which differ from machine to machine, and without the width of its columns."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "0", line)).replace("0 s", "0 ms").strip()


@pytest.mark.slow
@pytest.mark.xdist_group("readme")
def test_the_four_commands_run_as_written(folder: Path) -> None:
    """In their order, each on what the one before it made."""
    (block,) = [block for block in code_blocks("sh") if "onnxtool export" in block]
    done = shell(f"set -e\n{block}", folder)
    assert done.returncode == 0, done.stderr
    assert "bert" in done.stdout
    assert done.stdout.count("Number of nodes: ") >= 3


@pytest.mark.slow
@pytest.mark.xdist_group("readme")
def test_commands_print_what_the_readme_shows(folder: Path) -> None:
    """Line by line, but for figures; `…` stands for lines left out."""
    for block in code_blocks("console"):
        command, *shown = block.splitlines()
        assert command.startswith("$ ")
        done = shell(command[2:], folder)
        assert done.returncode == 0, done.stderr
        printed = iter(shape_of(line) for line in done.stdout.splitlines())
        skipping = False
        for line in shown:
            if line == "…":
                skipping = True
                continue
            if skipping:
                assert any(shape_of(line) == found for found in printed), f"{command}\nnot printed: {line}"
            else:
                assert next(printed, None) == shape_of(line), f"{command}\nprinted otherwise: {line}"
            skipping = False


@pytest.mark.slow
@pytest.mark.xdist_group("readme")
def test_the_python_example_runs(folder: Path) -> None:
    """As a script, in the reader's folder."""
    (block,) = code_blocks("python")
    done = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "->" in done.stdout


@pytest.mark.slow
@pytest.mark.xdist_group("readme")
def test_the_release_makefile_builds_once(folder: Path) -> None:
    """The second time nothing is rebuilt; new weights rebuild what depends on them."""
    (block,) = code_blocks("make")
    (folder / "Makefile").write_text(block, encoding="utf-8")
    first = shell("make", folder)
    assert first.returncode == 0, first.stderr
    review = folder / "models" / "splade-cocondenser-ensembledistil-review.md"
    assert "Number of nodes" in review.read_text(encoding="utf-8")
    assert "Nothing to be done" in shell("make", folder).stdout
    assert shell("make --question", folder).returncode == 0
    (folder / "checkpoints" / "splade-cocondenser-ensembledistil" / "model.safetensors").touch()
    assert shell("make --question", folder).returncode == 1


def test_every_target_that_the_readme_names_is_in_the_makefile() -> None:
    """`make demo` and its kin."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z_]+)\b", "\n".join(code_blocks("sh")))):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
