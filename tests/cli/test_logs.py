"""-v, -vv and --log_level: what is logged on stderr."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.entry_point import run_onnxtool
from tests.graphs import save_operators
from tests.infer.tiny_models import VOCABULARY, TinyModel, table

RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO) +onnxtool[.\w]*: .+")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small model."""
    TinyModel(table(len(VOCABULARY), 4), "last_hidden_state").write(tmp_path / "model.onnx")
    return tmp_path


def log_of(folder: Path, *options: str) -> list[str]:
    """Return the lines of stderr of an optimization that is done."""
    done = run_onnxtool(folder, "optimize", "--model_path", "model.onnx", "--force", *options)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_each_level_says_more(folder: Path) -> None:
    """With the time, the level and the module; without any of them it is the progress alone."""
    logger = logging.getLogger("onnxtool")
    before = list(logger.handlers), logger.level, logger.propagate
    info, debug = log_of(folder, "-v"), log_of(folder, "-vv")
    assert (logger.handlers, logger.level, logger.propagate) == before  # of whoever runs it in a process of their own
    assert all(RECORD.fullmatch(line) for line in (*info, *debug))
    assert any("INFO    onnxtool.runtime.comparison: " in line for line in info)
    assert not any("DEBUG" in line for line in info)
    assert any("onnxtool.optimize.pipeline: pass attention: 0 changes in" in line for line in debug)
    assert any("onnxruntime" in line and "loaded" in line for line in debug)
    assert not any(RECORD.fullmatch(line) for line in log_of(folder))


def test_what_libraries_log_is_not_ahead_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints warnings of loggers without a handler; those of onnxtool itself stay."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import atexit, logging\n"
        "for name in ('onnx_ir.serde', 'onnxtool.training'):\n"
        "    atexit.register(logging.getLogger(name).warning, 'said by %s', name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    command = [sys.executable, "-m", "onnxtool", "stats", "missing.onnx"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    assert "said by onnxtool.training" in found
    assert "onnx_ir" not in found


def test_a_level_by_name_stands_above_the_count(folder: Path) -> None:
    """Hyphens are as good as underscores; --quiet leaves the log."""
    assert any("DEBUG" in line for line in log_of(folder, "--log-level", "debug", "-v", "--quiet"))
    assert not any("INFO" in line for line in log_of(folder, "-v", "--log_level", "error"))


@pytest.mark.skipif(sys.platform == "win32", reason="of names of files on POSIX")
def test_a_log_cannot_control_the_terminal(tmp_path: Path) -> None:
    """Names of files and models are untrusted."""
    save_operators(tmp_path / "a\x1b[31m.onnx", ["Relu"])
    done = run_onnxtool(tmp_path, "optimize", "--model_path", "a\x1b[31m.onnx", "-v")
    assert "loading a\\x1b[31m.onnx" in done.stderr
    assert "\x1b" not in done.stderr
