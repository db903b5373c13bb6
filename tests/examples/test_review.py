"""examples/review works: its commands and gates; and action.yml reviews real repositories, for a stand-in of GitHub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from onnxtool.summary.gates import parse_gate
from tests.cli.entry_point import run_onnxtool
from tests.docs.documents import ROOT, run_console
from tests.graphs import save_external, save_operators, value

FOLDER = ROOT / "examples" / "review"
GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
MARKER = "<!-- onnxtool review -->"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the action runs on Linux")


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


class GitHub(ThreadingHTTPServer):
    """Comments of a pull request, a page of two at a time."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Calls)
        self.comments: list[dict[str, Any]] = []
        self.refuses = False

    def add(self, body: str, login: str = "github-actions[bot]") -> None:
        self.comments.append({"id": len(self.comments) + 1, "body": body, "user": {"login": login}})


class Calls(BaseHTTPRequestHandler):
    server: GitHub

    def answer(self, content: object, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self) -> None:
        assert self.path.startswith("/repos/o/r/issues/7/comments?per_page=100&page=")
        page = int(self.path.rpartition("=")[2])
        self.answer(self.server.comments[2 * page - 2 : 2 * page])

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["Authorization"] == "Bearer secret"
        if self.server.refuses:
            self.answer({}, 403)
            return
        if self.command == "POST":
            self.server.add(content["body"])
        else:
            self.server.comments[int(self.path.rpartition("/")[2]) - 1]["body"] = content["body"]
        self.answer({})

    do_PATCH = do_POST  # noqa: N815  by the name of the method

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def github() -> Iterator[GitHub]:
    with GitHub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Repository:
    """A repository whose working tree is the merge of a pull request."""

    def __init__(self, folder: Path, github: GitHub) -> None:
        folder.mkdir()
        self.folder, self.github = folder, github
        self.git("init", "--quiet")

    def git(self, *words: str) -> str:
        done = subprocess.run([*GIT, *words], cwd=self.folder, capture_output=True, encoding="utf-8", check=True)
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "m")
        return self.git("rev-parse", "HEAD")

    def review(self, base: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the step of action.yml as GitHub does, with its variables filled in."""
        (step,) = (
            one
            for one in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
            if "review" in str(one.get("run"))
        )
        given = {
            "REVIEW_PATHS": "*.onnx",
            "REVIEW_BASE": base,
            "REVIEW_NUMBER": "7",
            "REVIEW_FAIL_IF": "",
            "REVIEW_COMMENT": "true",
            "REVIEW_PAGES": str(self.folder.parent / "pages"),
            "GITHUB_TOKEN": "secret",
        }
        assert given.keys() == step["env"].keys()
        address = f"http://127.0.0.1:{self.github.server_port}"
        runner = {
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_API_URL": address,
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_STEP_SUMMARY": str(self.folder.parent / "summary.md"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        environment = {**os.environ, **runner, **given, **variables}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, encoding="utf-8", check=False
        )
        assert "Traceback" not in done.stderr
        assert "base" not in self.git("worktree", "list", "--porcelain")
        return done


@pytest.fixture
def repository(tmp_path: Path, github: GitHub) -> Repository:
    return Repository(tmp_path / "repository", github)


def test_what_became_of_each_model_is_in_one_comment_that_is_updated(repository: Repository, github: GitHub) -> None:
    folder = repository.folder
    for number, name in enumerate(("changed", "same", "gone", "moved", "moved and changed")):
        save_operators(folder / f"{name}.onnx", ["Relu"] * (40 + number))
    save_external(folder / "apart.onnx", 2.0, "apart.data")
    base = repository.commit()
    save_operators(folder / "changed.onnx", ["Relu"] * 40 + ["Exp"])
    (folder / "gone.onnx").unlink()
    (folder / "a folder").mkdir()
    (folder / "moved.onnx").rename(folder / "a folder" / "moved.onnx")
    (folder / "moved and changed.onnx").unlink()
    save_operators(folder / "renamed.onnx", ["Relu"] * 44 + ["Tanh"])
    save_operators(folder / "--new|`.onnx", ["Tanh"])
    save_external(folder / "apart.onnx", 3.0, "apart.data")
    repository.commit()
    github.add("hello", "a person")
    github.add(f"{MARKER} not ours", "a person")
    assert repository.review(base).returncode == 0
    first, second, comment = (one["body"] for one in github.comments)
    assert (first, second) == ("hello", f"{MARKER} not ours")
    rows = [line for line in comment.splitlines() if line.startswith("| ")][1:7]
    assert rows == [
        "| <code>&#45;&#45;new&#124;&#96;&#46;onnx</code> | added | passed |",
        "| `a folder/moved.onnx` from `moved.onnx` | moved, the same bytes | |",
        "| `apart.onnx` | changed | passed |",
        "| `changed.onnx` | changed | passed |",
        "| `gone.onnx` | deleted | |",
        "| `renamed.onnx` from `moved and changed.onnx` | moved and changed | passed |",
    ]
    assert "### `changed.onnx` against `changed.onnx`" in comment
    assert "| Number of nodes | 40 | 41 | +1, +2.5% |" in comment
    assert "same.onnx" not in comment
    assert comment in (folder.parent / "summary.md").read_text()
    assert len(list((folder.parent / "pages").glob("*.html"))) == 4
    done = repository.review(base, REVIEW_FAIL_IF="num_nodes>+0\n")
    assert done.returncode == 1
    assert len(github.comments) == 3
    assert "| `changed.onnx` | changed | ❌ met |" in github.comments[2]["body"]
    assert "fails if num_nodes>+0" in github.comments[2]["body"]
    repository.git("checkout", "--quiet", base)
    assert repository.review(base).returncode == 0
    assert github.comments[2]["body"] == f"{MARKER}\n\nNo ONNX file differs from the base.\n"


def test_a_pull_request_without_changed_models_gets_no_comment(repository: Repository, github: GitHub) -> None:
    save_operators(repository.folder / "m.onnx", ["Relu"])
    base = repository.commit()
    (repository.folder / "text.md").write_text("x")
    repository.commit()
    assert repository.review(base).returncode == 0
    assert not github.comments


def test_what_cannot_be_read_is_said_and_fails(repository: Repository, github: GitHub) -> None:
    """A damaged model, and a pointer of Git LFS; the others are still reviewed."""
    base = repository.commit()
    (repository.folder / "broken.onnx").write_bytes(b"\xff" * 40)
    (repository.folder / "pointer.onnx").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    )
    save_operators(repository.folder / "right.onnx", ["Relu"])
    repository.commit()
    assert repository.review(base).returncode == 2
    (comment,) = (one["body"] for one in github.comments)
    assert "| `broken.onnx` | added | ❌ `" in comment
    assert "| `pointer.onnx` | added | ❌ a pointer of Git LFS: check out with `lfs: true` |" in comment
    assert "### `right.onnx`" in comment


def test_a_token_of_a_fork_leaves_the_summary(repository: Repository, github: GitHub) -> None:
    base = repository.commit()
    save_operators(repository.folder / "m.onnx", ["Relu"])
    repository.commit()
    github.refuses = True
    done = repository.review(base)
    assert done.returncode == 0
    assert "the token may not write one (403)" in done.stdout
    assert "### `m.onnx`" in (repository.folder.parent / "summary.md").read_text()


@pytest.mark.parametrize("count", [5, 40])
def test_a_comment_fits_whatever_the_number_of_models(repository: Repository, github: GitHub, count: int) -> None:
    """Each model keeps its row; figures come before details, and what is left out is counted."""
    for stage in ("Relu", "Tanh"):
        for number in range(count):
            model = onnx.parser.parse_model(
                '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Relu(x) }'
            )
            model.graph.node[0].op_type = stage
            for entry in range(60):
                model.metadata_props.add(key=f"a key that has a long name {entry}", value=f"{stage} {entry}" * 6)
            onnx.save(model, repository.folder / f"model {number:02}.onnx")
        if stage == "Relu":
            base = repository.commit()
    repository.commit()
    assert repository.review(base).returncode == 0
    (comment,) = (one["body"] for one in github.comments)
    assert len(comment) < 65_536
    assert comment.count("| changed | passed |") == count
    assert comment.count("<details>") == comment.count("</details>")
    assert comment.count("### `model") == count
    assert ("left out for their length" in comment) == (count == 40)
