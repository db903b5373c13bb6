"""The page of common mistakes shows what the commands say to each."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.entry_point import run_onnxtool
from tests.docs.documents import ROOT

PAGE = (ROOT / "docs" / "guide" / "mistakes.md").read_text("utf-8")
MISTAKES = re.findall(r"\(exit code (\d)\)\n\n```text\n\$ onnxtool (.*)\n((?:.*\n)*?)```", PAGE)
UNKNOWN_KEY = "fail_iff"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder without a checkpoint, another one, and a pointer of Git LFS."""
    for name in ("empty", "encoder"):
        (tmp_path / name).mkdir()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 438000000\n"
    (tmp_path / "pointer.onnx").write_text(pointer)
    return tmp_path


def test_the_page_has_mistakes() -> None:
    """Each one that it names is run below."""
    assert len(MISTAKES) == PAGE.count("(exit code ") > 15


@pytest.mark.parametrize(("code", "command", "said"), MISTAKES, ids=[command for _, command, _ in MISTAKES])
def test_a_mistake_gets_the_answer_of_the_page(code: str, command: str, said: str, folder: Path) -> None:
    """The exit code, the error and its hint, to the letter."""
    if UNKNOWN_KEY in said:
        (folder / ".onnxtool.toml").write_text(f'[stats]\n{UNKNOWN_KEY} = ["nodes>+10%"]\n')
    done = run_onnxtool(folder, *shlex.split(command))
    assert done.returncode == int(code)
    assert done.stderr[done.stderr.index("error:") :].strip() == said.strip()
