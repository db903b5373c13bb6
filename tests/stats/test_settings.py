"""A repository's gates come from its own files, and wrong ones are errors that say where."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxtool.errors import InputError
from onnxtool.stats import Settings, find_settings, read_settings
from tests.cli.entry_point import run_onnxtool
from tests.graphs import save_operators

GATES = "fail_if = ['num_nodes>2', 'size_bytes>+5%', 'count(delta.inputs.removed)>0']\n"


def test_settings_are_those_of_the_nearest_file(tmp_path: Path) -> None:
    """Its own file before pyproject.toml, a folder before those above it, and nothing above a repository."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert find_settings(inner) == Settings()
    (tmp_path / "pyproject.toml").write_text(f"[tool.onnxtool.stats]\n{GATES}batch_size = 2\nweights = true\n")
    found = find_settings(inner)
    assert (found.source, found.batch_size, found.weights) == (tmp_path / "pyproject.toml", 2, True)
    assert found.fail_if == ("num_nodes>2", "size_bytes>+5%", "count(delta.inputs.removed)>0")
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'onnxtool-user'\n")
    assert find_settings(inner).source == tmp_path / "pyproject.toml"
    (tmp_path / "a" / ".onnxtool.toml").write_text("[stats]\nsequence_length = 7\n")
    assert find_settings(inner).sequence_length == 7
    (inner / ".git").mkdir()
    assert find_settings(inner) == Settings()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[stats", "is not valid TOML"),
        ("[stats]\nfail_of = []", "stats.fail_of, which is not a setting"),
        ("[stats]\nfail_if = 'x'", "stats.fail_if of"),
        ("[stats]\nfail_if = [1]", "stats.fail_if of"),
        ("[stats]\nbatch_size = 0", "stats.batch_size of"),
        ("[stats]\nbatch_size = true", "stats.batch_size of"),
        ("[other]", "has no table [stats]"),
        ("stats = 3", "is not a table"),
        (b"\xff", "cannot read"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str | bytes, reason: str) -> None:
    """Each with the file, the key and the way out."""
    file = tmp_path / ".onnxtool.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        read_settings(file)
    assert reason in caught.value.message
    assert caught.value.hint
    with pytest.raises(InputError, match="cannot read"):
        read_settings(tmp_path / "gone.toml")


def test_gates_of_a_repository_hold_without_being_asked_for(tmp_path: Path) -> None:
    """Those relative to a base wait for one; the command line adds its own; --config names another file."""
    save_operators(tmp_path / "model.onnx", ["Relu"] * 3)
    save_operators(tmp_path / "base.onnx", ["Relu"])
    (tmp_path / ".onnxtool.toml").write_text("[stats]\n" + GATES)
    alone = run_onnxtool(tmp_path, "stats", "model.onnx")
    assert (alone.returncode, alone.stderr) == (1, "gate num_nodes>2 is met: num_nodes is 3\n")
    both = run_onnxtool(tmp_path, "stats", "model.onnx", "base.onnx", "--fail_if", "num_outputs==1")
    assert both.returncode == 1
    assert [line.split()[1] for line in both.stderr.splitlines()] == ["num_outputs==1", "num_nodes>2"]
    (tmp_path / "lax.toml").write_text("[stats]\nfail_if = ['num_nodes>9']\n")
    assert run_onnxtool(tmp_path, "stats", "model.onnx", "--config", "lax.toml").returncode == 0


def test_a_malformed_gate_of_a_repository_is_a_usage_error(tmp_path: Path) -> None:
    """With the file, and the place in the gate."""
    save_operators(tmp_path / "model.onnx", ["Relu"])
    (tmp_path / ".onnxtool.toml").write_text("[stats]\nfail_if = ['num_nodes>>2']\n")
    result = run_onnxtool(tmp_path, "stats", "model.onnx")
    assert (result.returncode, result.stdout) == (2, "")
    assert ".onnxtool.toml: no operator >>, at character 10 of the gate 'num_nodes>>2'" in result.stderr
    assert "\n  num_nodes>>2\n           ^\n" in result.stderr
