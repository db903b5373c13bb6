"""A disk that is full, a stream that is closed, bytes that are no text: each is one line, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.entry_point import run_onnxtool, run_process
from tests.graphs import save_operators

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="of POSIX shells and file names")

STATS = ["stats", "model.onnx"]
JSON = [*STATS, "--format", "json"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small model."""
    save_operators(tmp_path / "model.onnx", ["Relu"])
    return tmp_path


def run_in_shell(folder: Path, redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run onnxtool with streams as a shell sets them up."""
    command = f'exec "$@" {redirection}'
    words = ["bash", "-c", command, "bash", sys.executable, "-m", "onnxtool", *arguments]
    return subprocess.run(words, cwd=folder, capture_output=True, encoding="utf-8", check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [STATS, JSON, ["--help"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_an_error(folder: Path, arguments: list[str]) -> None:
    """One line says so, and the exit code is 1."""
    done = run_in_shell(folder, "> /dev/full", *arguments)
    assert (done.returncode, done.stderr) == (1, "error: cannot write to stdout: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("redirection", ["2> /dev/full", "2>&-"])
def test_wrong_usage_exits_with_2_though_nobody_reads_why(folder: Path, redirection: str) -> None:
    """A script reads the exit code alone."""
    assert run_in_shell(folder, redirection, "stats", "--no_such_option").returncode == 2


@pytest.mark.parametrize("arguments", [STATS, JSON], ids=" ".join)
def test_a_reader_that_goes_away_ends_a_command_quietly(folder: Path, arguments: list[str]) -> None:
    """As other tools end behind `| head -1`: with the code of the signal that it would be."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "onnxtool", *arguments]
    done = subprocess.run(words, cwd=folder, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [STATS, JSON], ids=" ".join)
def test_a_closed_stdout_is_no_error(folder: Path, arguments: list[str]) -> None:
    """Whoever closes it asks for the exit code alone."""
    done = run_in_shell(folder, ">&-", *arguments)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [STATS, JSON, ["infer", "--model_path", "model.onnx"]], ids=" ".join)
def test_an_argument_that_is_no_text_is_a_usage_error(folder: Path, arguments: list[str]) -> None:
    """Such a file is there, and no library that reads models could open it."""
    done = run_onnxtool(folder, *arguments, os.fsdecode(b"\xff.onnx"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the argument '\\udcff.onnx' is not valid UTF-8\n")


def test_json_is_utf_8_in_every_locale(folder: Path) -> None:
    """Names are of any script, and JSON knows no other encoding."""
    (folder / "model.onnx").rename(folder / "é→.onnx")
    done = run_process(folder, "stats", "é→.onnx", "--format", "json", PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout)["path"] == "é→.onnx"


@pytest.mark.parametrize("format_name", ["text", "json"])
def test_a_removed_working_folder_is_no_traceback(folder: Path, format_name: str) -> None:
    """There are no settings to be found, and the path of the model needs none."""
    (folder / "gone").mkdir()
    command = 'cd gone && rmdir ../gone && exec "$@"'
    model = str(folder / "model.onnx")
    words = ["bash", "-c", command, "bash", sys.executable, "-m", "onnxtool", "stats", model, "--format", format_name]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_gate_that_is_met_cannot_control_the_terminal(folder: Path) -> None:
    """A repository's own gates are as untrusted as its models."""
    done = run_onnxtool(folder, *STATS, "--fail_if", "ops.\x1b[31m==0")
    assert done.returncode == 1
    assert done.stderr == "gate failed: ops.\\x1b[31m is 0, fails if ops.\\x1b[31m==0\n"
