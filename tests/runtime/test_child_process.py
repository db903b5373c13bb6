"""A Python process of a module finds what its parent finds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from onnxtool.runtime.child_process import module_command, module_environment


def test_a_module_runs_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be a folder of somebody, with a module that is called like one of Python's."""
    (tmp_path / "json.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.setenv("PYTHONPATH", "")
    ended = subprocess.run(
        module_command("onnxtool", "--version"),
        env=module_environment(),
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_module_is_found_where_the_parent_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path of modules, or by the variable."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"module_{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "one"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "two"))
    (tmp_path / "one" / "both.py").write_text("import json, module_one, module_two; print('found')")
    ended = subprocess.run(module_command("both"), env=module_environment(), capture_output=True, check=True, text=True)
    assert ended.stdout == "found\n"
