"""Whoever made a model file cannot control the terminal of whoever looks at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import helper

from onnxtool.model_file.metadata import STEPS_KEY
from tests.cli.entry_point import run_onnxtool
from tests.graphs import make_model, save_operators, value

HOSTILE = "a\x1b[31mred\x1b[0m\nNumber of nodes: 7\r\x07\x7f\x9b31m\u202etxt\u2028"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model with control characters wherever a name can be."""
    nodes = [helper.make_node(HOSTILE, ["x"], ["y"], domain=HOSTILE)]
    model = make_model(nodes, inputs=[value(HOSTILE, [HOSTILE, 3])])
    model.opset_import.add(domain=HOSTILE, version=3)
    model.producer_name = HOSTILE
    helper.set_model_props(model, {HOSTILE: HOSTILE, STEPS_KEY: json.dumps([{"step": HOSTILE, HOSTILE: HOSTILE}])})
    onnx.save(model, tmp_path / "hostile.onnx")
    save_operators(tmp_path / "base.onnx", ["Relu"])
    save_operators(tmp_path / "model.onnx", ["Relu", "MatMul"])
    return tmp_path


@pytest.mark.parametrize("arguments", [["hostile.onnx"], ["hostile.onnx", "base.onnx"]], ids=["summary", "difference"])
@pytest.mark.parametrize("format_name", ["text", "markdown", "json", "html"])
def test_names_of_a_model_cannot_control_the_terminal(hostile: Path, arguments: list[str], format_name: str) -> None:
    """Control characters are shown as escapes in every format, and JSON still says the true name."""
    result = run_onnxtool(hostile, "stats", *arguments, "--format", format_name)
    assert (result.returncode, result.stderr) == (0, "")
    assert all(line.isprintable() for line in result.stdout.split("\n"))
    assert len([line for line in result.stdout.splitlines() if line.startswith("Number of nodes: ")]) <= 1
    if format_name == "json":
        report = json.loads(result.stdout)
        assert HOSTILE in report.get("model", report)["metadata"]


def test_names_in_errors_cannot_control_the_terminal(hostile: Path) -> None:
    """A gate that resembles a hostile name quotes it."""
    result = run_onnxtool(hostile, "stats", "hostile.onnx", "--fail_if", f"opsets.{HOSTILE}s>3")
    assert result.returncode == 2
    assert "did you mean 'opsets.a\\x1b[31mred" in result.stderr
    assert all(line.isprintable() for line in result.stderr.split("\n"))


@pytest.mark.parametrize("format_name", ["text", "json"])
def test_a_record_that_is_nested_without_end_is_metadata_like_any(tmp_path: Path, format_name: str) -> None:
    """What is written out level by level must not be of a thousand levels."""
    model = make_model([helper.make_node("Relu", ["x"], ["y"])])
    helper.set_model_props(model, {STEPS_KEY: f'[{{"step":"a","x":{"[" * 800}{"]" * 800}}}]'})
    onnx.save(model, tmp_path / "deep.onnx")
    result = run_onnxtool(tmp_path, "stats", "deep.onnx", "--format", format_name)
    assert (result.returncode, result.stderr) == (0, "")
    assert "[[[[" in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_on_a_terminal_the_same_lines_are_shown(hostile: Path) -> None:
    """A terminal gets the same facts, and no control characters but those of the layout."""
    import pty

    shown = []
    for name in ("model.onnx", "hostile.onnx"):
        terminal, side = pty.openpty()
        command = [sys.executable, "-m", "onnxtool", "stats", name]
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "200"}
        with subprocess.Popen(command, cwd=hostile, env=environment, stdout=side, stderr=side) as process:
            os.close(side)
            shown.append(_read_all(terminal))
        assert process.returncode == 0
    assert "Number of nodes: 2" in shown[0].splitlines()
    assert "MatMul" in shown[0]
    bold = ("\x1b[1m", "\x1b[0m")
    for text in shown:
        plain = text.replace(bold[0], "").replace(bold[1], "").replace("\r\n", "\n")
        assert all(line.isprintable() for line in plain.split("\n"))


def _read_all(terminal: int) -> str:
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says that the other side is closed
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)
