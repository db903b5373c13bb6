"""The commands and programs of README and docs/ run, and print what the documents show."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import pytest

from onnxtool.cli.commands import RUNNABLE, SUBCOMMANDS
from onnxtool.cli.entry import find_command
from onnxtool.summary.gates import parse_gate
from tests.docs.documents import (
    ROOT,
    blocks,
    guides,
    name_of,
    outputs_of,
    run_console,
    run_python,
)

# What comes before the program of a document: dropout draws from one generator of the process, whoever used it before,
# and TorchDynamo remembers what was compiled.
_BEFORE = {
    "docs/guide/artifacts.md": "import onnxruntime\nonnxruntime.set_seed(0)",
    "docs/guide/torch_backend.md": "import torch\ntorch._dynamo.reset()",
}
# What it prints.
_PRINTED = {
    "docs/guide/torch_backend.md": (
        "operators in 1 session of onnxruntime",
        "inference: 1 of 1 operators in 1 session of onnxruntime",
        "['layer0.onnx', 'layer0.txt', 'layer1.onnx', 'layer1.txt']",
    )
}
# What has to hold after the program of a document, beside that it runs.
_ASSERTIONS = {
    "README.md": "assert vectors.shape == (3, 384)",
    "docs/guide/artifacts.md": "assert max(losses[-3:]) < 0.8 * losses[0], losses",
    "docs/guide/torch_backend.md": "assert losses[-1] < losses[0]",
}
# Commands and options in the text that belong to other programs.
_OTHER_PROGRAMS = (
    "python ",
    "make ",
    "optimum-cli ",
    "olive ",
    "infinity_emb ",
    "text-embeddings-router ",
    "onnxslim ",
    "onnxsim ",
    "bin/run.sh ",
)
_FOREIGN_OPTIONS = {"--constraint", "--nproc-per-node", "--question", "--optimum"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="some commands are those of a POSIX shell")
@pytest.mark.parametrize(
    "document", [path for path in guides() if blocks(path, "console") or blocks(path, "python")], ids=name_of
)
def test_a_document_works(document: Path, reader: Path) -> None:
    """Its commands print what it shows, except for numbers; then its Python blocks run, as one program."""
    run_console(document, reader, outputs_of(reader))
    name = name_of(document)
    programs = [block.text for block in blocks(document, "python")]
    code = "\n".join([_BEFORE.get(name, ""), *programs, _ASSERTIONS.get(name, "")])
    printed = run_python(code, reader)
    for text in _PRINTED.get(name, ()):
        assert text in printed


def _shell_commands(document: Path) -> list[list[str]]:
    lines = [line for block in blocks(document, "sh") for line in block.text.splitlines()]
    if document.name == "coming_from.md":  # commands side by side with those of other programs
        lines += re.findall(r"`(onnxtool \w+ [^`]+)`", document.read_text(encoding="utf-8"))
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("document", [path for path in guides() if blocks(path, "sh")], ids=name_of)
def test_commands_that_are_not_run_are_commands(document: Path) -> None:
    """They name programs of the project with options that exist, targets of the Makefile, and extras."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for program, *words in _shell_commands(document):
        if program == "onnxtool":
            depth = 2 if words[0] in SUBCOMMANDS else 1
            command = find_command(" ".join(words[:depth]))
            command.make_parser(click.Context(command)).parse_args(words[depth:])
        elif program == "make":
            targets = [word for word in words if "=" not in word]
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), words
        else:
            assert (program, words[0]) == ("pip", "install"), program
    for names in re.findall(r"onnxtool-cli\[([a-z,-]+)\]", document.read_text(encoding="utf-8")):
        assert set(names.split(",")) <= set(extras)


@pytest.mark.parametrize("document", guides(), ids=name_of)
def test_options_in_the_text_exist(document: Path) -> None:
    """Every option in code of a sentence is one of a command, of a script, or of a program that is named there."""
    known = set(_FOREIGN_OPTIONS)
    for name in RUNNABLE:
        known |= {
            option for parameter in find_command(name).params for option in (*parameter.opts, *parameter.secondary_opts)
        }
    known |= {"--help", "--version"}
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    codes = [code for code in re.findall(r"`([^`]+)`", text) if not code.startswith(_OTHER_PROGRAMS)]
    used = {option for code in codes for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", code)}
    assert used <= known | {option.replace("_", "-") for option in known}, sorted(used - known)


def test_the_gates_of_the_guide_are_gates() -> None:
    """Each one of the settings in docs/guide/stats.md."""
    (block,) = blocks(ROOT / "docs" / "guide" / "stats.md", "toml")
    gates = tomllib.loads(block.text)["stats"]["fail_if"]
    assert [parse_gate(gate).expression for gate in gates] == gates
