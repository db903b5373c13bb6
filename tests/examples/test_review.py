"""examples/review works: its commands, its gates, and its workflow on a repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from onnxtool.summary.gates import parse_gate
from tests.cli.entry_point import run_onnxtool
from tests.docs.documents import ROOT, run_console
from tests.graphs import save_operators, value

FOLDER = ROOT / "examples" / "review"
GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
STUB = """#!/bin/sh
case "$*" in
    *--jq*) cat "$STUB_FOLDER/id" ;;
    *--body-file*) cp review.md "$STUB_FOLDER/created" ;;
    *PATCH*) cp review.md "$STUB_FOLDER/updated" ;;
esac
"""


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, **more}


def test_the_commands_run_as_written(tmp_path: Path) -> None:
    """Each of them, on two models of these names."""
    for name in ("new.onnx", "old.onnx"):
        save_operators(tmp_path / name, ["Relu"])
    run_console(FOLDER / "README.md", tmp_path, {})
    assert (tmp_path / "page.html").exists()


def test_the_gates_are_gates(tmp_path: Path) -> None:
    """All of them are read, and one that holds fails a review."""
    shutil.copy(FOLDER / ".onnxtool.toml", tmp_path)
    gates = tomllib.loads((tmp_path / ".onnxtool.toml").read_text())["stats"]["fail_if"]
    assert len(gates) == 5
    for gate in gates:
        assert parse_gate(gate).expression == gate
    save_operators(tmp_path / "new.onnx", ["Relu"])
    save_operators(tmp_path / "old.onnx", ["Relu"], [value("x", [1]), value("y", [1])])
    done = run_onnxtool(tmp_path, "stats", "new.onnx", "old.onnx")
    assert done.returncode == 1
    met = "gate failed: count(delta.inputs.removed) is 1, fails if count(delta.inputs.removed)>0"
    assert done.stderr.splitlines() == [met]


@pytest.mark.skipif(sys.platform == "win32", reason="the workflow runs on Linux")
def test_the_workflow_comments_on_a_pull_request(tmp_path: Path) -> None:
    """Every model that differs is in one comment, which is updated the next time; a met gate fails the job after it."""
    workflow = yaml.safe_load((FOLDER / "review.yml").read_text(encoding="utf-8"))
    script = workflow["jobs"]["review"]["steps"][-1]["run"]
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("gh", "git-lfs"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    (stubs / "id").write_text("")
    repository = tmp_path / "repository"
    (repository / "a folder").mkdir(parents=True)

    def git(*words: str) -> str:
        done = subprocess.run([*GIT, *words], cwd=repository, capture_output=True, encoding="utf-8", check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    for name in ("changed.onnx", "same.onnx"):
        save_operators(repository / name, ["Relu"])
    git("add", ".")
    git("commit", "--quiet", "--message", "base")
    base = git("rev-parse", "HEAD")
    save_operators(repository / "changed.onnx", ["Relu", "Exp"])
    save_operators(repository / "a folder" / "new.onnx", ["Tanh"])
    git("add", ".")
    git("commit", "--quiet", "--message", "change")

    def review() -> int:
        variables = {"BASE": base, "NUMBER": "7", "GITHUB_REPOSITORY": "o/r", "STUB_FOLDER": str(stubs)}
        variables = environment(**variables)
        variables["PATH"] = f"{stubs}{os.pathsep}{variables['PATH']}"
        # As GitHub runs a step whose shell is bash.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=repository, env=variables, capture_output=True, encoding="utf-8", check=False
        )
        assert "Traceback" not in done.stderr
        git("worktree", "remove", "--force", "base")
        return done.returncode

    assert review() == 0
    comment = (stubs / "created").read_text(encoding="utf-8")
    assert comment.startswith("<!-- onnxtool review -->\n")
    assert "### `changed.onnx` against `base/changed.onnx`" in comment
    assert "| Number of nodes | 1 | 2 | +1, +100.0% |" in comment
    assert "### `a folder/new.onnx`" in comment
    assert "same.onnx" not in comment
    (stubs / "id").write_text("42\n")
    (repository / ".onnxtool.toml").write_text("[stats]\nfail_if = ['num_nodes>+0']\n")
    assert review() == 1
    assert "fails if num_nodes>+0" in (stubs / "updated").read_text(encoding="utf-8")
