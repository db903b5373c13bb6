"""What a shell is told when somebody presses the key for completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from onnxtool.cli import run_arguments


def completed(line: str, **variables: str) -> list[str]:
    """Return what bash is told for the last word of `line`."""
    words = line.split(" ")
    asked = {"_ONNXTOOL_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "onnxtool"], env={**os.environ, **asked, **variables}, capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands_options_and_choices_are_completed() -> None:
    """As far as they are written."""
    assert completed("onnxtool opt") == ["plain,optimize"]
    assert completed("onnxtool optimize --precision int") == ["plain,int8", "plain,int4", "plain,int4_fp16"]
    assert "plain,--model_path" in completed("onnxtool optimize --mod")
    assert completed("onnxtool stats mod") == ["file,mod"]


def test_checkpoints_are_completed_as_folders() -> None:
    """Of an option and of an argument."""
    assert completed("onnxtool export --model_name nav") == ["dir,nav"]
    assert completed("onnxtool verify model.onnx nav") == ["dir,nav"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The shell itself reads it, where it is installed."""
    assert run_arguments(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_ONNXTOOL_COMPLETE" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)
