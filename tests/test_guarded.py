"""A guarded child does what it is asked for, and whatever becomes of it is one exception in its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtool import guarded
from onnxtool.guarded import ChildEndedError, ChildError, GuardedChild, module_command, module_environment

EVERYTHING = 1 << 40
limited = pytest.mark.skipif(sys.platform == "win32", reason="no limits of processes there")


@pytest.fixture(scope="module")
def child() -> GuardedChild:
    """It evaluates what it is given."""
    return GuardedChild("builtins:eval", ("json",), {"ONNXTOOL_TEST": "set"})


def ask(child: GuardedChild, code: str, num_bytes: int = EVERYTHING) -> object:
    """Evaluate `code` within a second."""
    return child.call(code, seconds=1, num_bytes=num_bytes)


def test_answers_and_errors_come_back(child: GuardedChild) -> None:
    """From one process, whose prints are no answers; the texts may be any."""
    process = ask(child, "__import__('os').getpid()")
    assert ask(child, "[print('a'), 'naïve\\ud800\\n', {'b': None}]") == [None, "naïve\ud800\n", {"b": None}]
    with pytest.raises(ChildError, match="^division by zero$"):
        ask(child, "1 / 0")
    assert ask(child, "__import__('os').environ['ONNXTOOL_TEST']") == "set"
    assert ask(child, "__import__('os').getpid()") == process != os.getpid()


@limited
@pytest.mark.parametrize(
    ("code", "kind", "detail"),
    [
        ("[0 for a in iter(int, 1)]", "time", ""),
        ("len(b'x' * 2**31)", "memory", ""),
        ("__import__('os').kill(__import__('os').getpid(), 11)", "death", "SIGSEGV"),
        ("__import__('os')._exit(7)", "death", "exit code 7"),
    ],
)
def test_the_end_of_a_child_says_what_ended_it(child: GuardedChild, code: str, kind: str, detail: str) -> None:
    """And the next request is answered by another one."""
    with pytest.raises(ChildEndedError) as raised:
        ask(child, code, num_bytes=1 << 30)
    assert (raised.value.kind, raised.value.detail) == (kind, detail)
    assert ask(child, "1 + 1") == 2


def test_a_child_that_only_waits_is_ended_by_its_parent(child: GuardedChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses no processor time."""
    ask(child, "1")
    monkeypatch.setattr(guarded, "_PATIENCE", 0.2)
    with pytest.raises(ChildEndedError, match="time"):
        ask(child, "__import__('time').sleep(60)")


def test_an_answer_that_is_too_long_to_read_is_not_read(child: GuardedChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's memory is bounded as well."""
    monkeypatch.setattr(guarded, "_MOST_REPLY_BYTES", 1000)
    with pytest.raises(ChildEndedError, match="memory"):
        ask(child, "'x' * 1000")


def test_a_process_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a machine has no more of them."""
    monkeypatch.setattr(guarded, "module_command", lambda *_arguments: ["/missing"])
    with pytest.raises(ChildEndedError, match="start"):
        ask(GuardedChild("builtins:eval"), "1")


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
