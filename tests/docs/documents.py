"""The Markdown documents of the repository: their code blocks, and how a reader would run them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import unittest.mock
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cli.entry_point import run_onnxtool

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = "…"  # lines of the output that a document leaves out

# Pages of measured results, which scripts write and which show no commands, are checked for their links only.
_WRITTEN_BY_SCRIPTS = (
    "coverage.md",
    "gradients.md",
    "operators.md",
    "onnxoptimizer.md",
    "measured.md",
    "figures.md",
    "figures_details.md",
    "foreign_files.md",
)


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str
    text: str


def documents() -> list[Path]:
    """Return all Markdown files of the project."""
    folders = (ROOT / "docs", ROOT / "examples", ROOT / "models")
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in _markdown_files(folder))])


def guides() -> list[Path]:
    """Return the documents that are written by hand for users: README and docs/, without the examples."""
    pages = [path for path in _markdown_files(ROOT / "docs") if path.name not in _WRITTEN_BY_SCRIPTS]
    return [ROOT / "README.md", *pages]


def name_of(document: Path) -> str:
    """Return the path of a document in the repository."""
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path, language: str = "") -> list[Block]:
    """Return the code blocks of a document in their order, of one language if it is given."""
    found = re.findall(r"^```([a-z]*)\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(name, text) for name, text in found if not language or name == language]


def run_console(document: Path, folder: Path, known: dict[str, str]) -> None:
    """Run each command of the console blocks in `folder`, and compare what it prints with what the document shows.

    Numbers differ between machines and are not compared. `known` has the output of commands that were run already.
    """
    for block in blocks(document, "console"):
        command, *shown = block.text.splitlines()
        assert command.startswith("$ "), f"{command!r} is no command"
        printed = known.get(_without_names(command[2:])) or run_command(command[2:], folder)
        if shown:
            _compare(command, shown, printed)


def run_command(command: str, folder: Path) -> str:
    """Run one command in `folder` and return its stdout.

    onnxtool and Python scripts run in this process, which has imported PyTorch already; so does what `make` would run.
    All others run in a shell.
    """
    words = shlex.split(command)
    if words[0] == "python":
        return _run_script(folder / words[1], words[2:], folder)
    if words[0] == "make" and not {"--dry-run", "--question"} & set(words):
        planned = run_command(shlex.join(["make", "--dry-run", *words[1:]]), folder).splitlines()
        return "".join(run_command(line, folder) for line in planned)
    if words[0] == "onnxtool" and "|" not in command:
        done = run_onnxtool(folder, *words[1:])
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # A make inside of `make test` would speak of the folders that it enters.
        inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
        variables = {**inherited, "PATH": path, "PYTHONPATH": str(ROOT)}
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=variables, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def run_python(code: str, folder: Path) -> str:
    """Run `code` as a program in `folder`, in this process, and return what it prints."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("default")
        exec(compile(code, "document", "exec"), {"__name__": "__main__"})  # noqa: S102  our own documents
    return printed.getvalue()


def _run_script(script: Path, arguments: list[str], folder: Path) -> str:
    printed = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
        unittest.mock.patch.object(sys, "argv", [str(script), *arguments]),
    ):
        warnings.simplefilter("default")
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    return printed.getvalue()


def make_reader(folder: Path, checkpoints: dict[str, Path], commands: tuple[str, ...]) -> None:
    """Make the folder of a reader with these checkpoints, run `commands` in it, and keep their output beside it."""
    for name, checkpoint in checkpoints.items():
        shutil.copytree(checkpoint, folder / "models" / "checkpoints" / name)
    outputs = {command: run_command(command, folder) for command in commands}
    (folder / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")


def outputs_of(reader: Path) -> dict[str, str]:
    """Return the output of the commands that were run while the folder was made."""
    found: dict[str, str] = json.loads((reader / "outputs.json").read_text(encoding="utf-8"))
    return {_without_names(command): printed for command, printed in found.items()}


def _without_names(command: str) -> str:
    """Write a command with the model as an argument, however a document does it."""
    return re.sub(r"^(onnxtool \w+) --model_(?:path|name) ", r"\1 ", command)


def _markdown_files(folder: Path) -> Iterator[Path]:
    """Yield the Markdown files under `folder` that belong to the project."""
    return (path for path in sorted(folder.rglob("*.md")) if "checkpoints" not in path.parts)


def _compare(command: str, shown: list[str], printed: str) -> None:
    """Assert that the lines `shown` were printed in this order, and nothing else but where `…` stands."""
    lines = iter(printed.splitlines())
    skipping = False
    for line in shown:
        if line == SKIPPED:
            skipping = True
            continue
        if skipping:
            assert any(_form_of(line) == _form_of(found) for found in lines), f"{command}\nno line {line!r}:\n{printed}"
        else:
            found = next(lines, "")
            assert _form_of(found) == _form_of(line), f"{command}\n{line!r} is {found!r}:\n{printed}"
        skipping = False
    if not skipping:
        assert list(lines) == [], f"{command} prints more:\n{printed}"


def _form_of(line: str) -> str:
    """Return a line without its numbers, their units of time and size, and the width of its columns.

    How many sessions a graph has depends on which products the machine computes faster in PyTorch.
    """
    line = re.sub(r"-?\d+(,\d{3})*(\.\d+)?(e-?\d+)?", "0", line)
    line = re.sub(r"\b0 (ms|s)\b", "0 s", re.sub(r"\b0 ([kMG]?B|[kMG])\b", "0 B", line))
    return re.sub(r"\s+", " ", line.replace("0 sessions", "0 session")).strip()
