"""`onnxtool env` from its entry point: what is installed, what runs, what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

from onnxtool.runtime.providers import cuda_problem
from onnxtool.version import DISTRIBUTION, commit
from tests.cli.entry_point import run_onnxtool, run_process


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_onnxtool(folder, "env", *arguments, PYTHONWARNINGS="error")


def test_json_tells_versions_and_providers(tmp_path: Path) -> None:
    """Versions are those of the installed packages; a machine without a GPU is no problem of the installation."""
    process = _run(tmp_path, "--format", "json")
    assert (process.returncode, process.stderr) == (0, "")
    report = json.loads(process.stdout)
    assert set(report) == {
        *("commit", "python", "platform", "packages", "providers", "problems"),
        *("configuration", "precedence"),
    }
    assert report["commit"] == commit()
    assert report["python"] == platform.python_version()
    for name, version in report["packages"].items():
        package = DISTRIBUTION if name == "onnxtool" else name
        assert version == "not installed" or version == importlib.metadata.version(package)
    assert report["providers"]["cpu"] == "ok"
    assert report["providers"]["cuda"] == (cuda_problem() or "ok")
    assert not any("CUDA" in problem or "NVIDIA" in problem for problem in report["problems"])


def test_text_lists_packages_providers_and_problems(tmp_path: Path) -> None:
    """In plain columns where stdout is no terminal."""
    process = _run(tmp_path)
    assert process.returncode == 0
    for heading in ("Packages:", "Execution providers:", "Problems:"):
        assert heading in process.stdout.splitlines()
    assert f"Python: {platform.python_version()}" in process.stdout


def test_torch_and_transformers_are_not_imported(tmp_path: Path) -> None:
    """Their versions are in the packages' metadata; importing them takes seconds."""
    process = run_process(tmp_path, "env", "-v", PYTHONPROFILEIMPORTTIME="1")
    assert process.returncode == 0
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in process.stderr.splitlines()}
    assert "onnxruntime" in names
    assert not {"torch", "transformers"} & names
