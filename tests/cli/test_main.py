"""The command line as a whole: help, spelling, exit codes."""

from __future__ import annotations

import importlib
import io
import re
import shlex
import sys
from pathlib import Path

import click
import pytest

from onnxtool.cli import COMMANDS, main
from onnxtool.cli.commands import RUNNABLE, SUBCOMMANDS
from onnxtool.cli.entry import find_command
from onnxtool.cli.render import Table, emit
from onnxtool.version import __version__, commit
from tests.cli.entry_point import run_onnxtool


def test_help_lists_every_command() -> None:
    """With the sentence that each command has for itself."""
    done = run_onnxtool(Path(), "--help")
    assert done.returncode == 0
    for name, sentence in COMMANDS.items():
        assert re.search(rf"^\s+{name}\s+{re.escape(sentence)}$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_a_group_lists_its_commands(name: str) -> None:
    """Likewise; and the group alone is a mistake, which says what is missing."""
    group = find_command(name)
    assert isinstance(group, click.Group)
    assert {inner: command.short_help for inner, command in group.commands.items()} == SUBCOMMANDS[name]
    alone = run_onnxtool(Path(), name)
    assert alone.returncode == 2
    assert alone.stderr == f"error: Missing command.\nhint: see onnxtool {name} --help\n"


def test_the_command_alone_shows_its_help() -> None:
    """Which is no mistake; and the id of its example is in one piece."""
    done = run_onnxtool(Path())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_onnxtool(Path(), "--help").stdout
    assert "--model_name naver/splade-cocondenser-ensembledistil\n" in done.stdout


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_command_is_like_the_others(name: str) -> None:
    """Its help ends with an example that parses, each option has a help and underscores, and the common ones are there.

    Hyphens are accepted and not shown; a script for a shell is no report.
    """
    command = find_command(name)
    epilog = (command.epilog or "").strip("\b\n")
    assert epilog.startswith(f"Example: onnxtool {name}")
    arguments = shlex.split(epilog.removeprefix(f"Example: onnxtool {name}"))
    command.make_context(name, arguments, token_normalize_func=main.context_settings["token_normalize_func"])
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    names = {option for parameter in options for option in parameter.opts}
    assert all(parameter.help for parameter in options)
    assert not [option for option in names if option.startswith("--") and "-" in option.removeprefix("--")]
    # What several machines share is begun anew by none of them.
    forced = set() if name in ("encode part", "encode merge", "encode status") else {"--force"}
    assert names >= {"--format", "--output", "--quiet"} | forced or name == "completion"


def test_hyphens_are_accepted_in_every_option() -> None:
    """--model-path is --model_path."""
    done = run_onnxtool(Path(), "optimize", "--model-path", "missing.onnx", "--require-fusion")
    assert done.returncode == 1
    assert "no such model file: missing.onnx" in done.stderr


def test_the_version_is_printed() -> None:
    """For bug reports, with the commit where it is known."""
    known = f" ({commit()})" if commit() else ""
    assert run_onnxtool(Path(), "--version").stdout == f"onnxtool, version {__version__}{known}\n"


def test_a_command_without_pytorch_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkpoint is refused before anything is read, and what else needs it fails with the same remedy."""
    remedy = "is not installed\nhint: pip install 'onnxtool-cli[export]'\n"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_onnxtool(tmp_path, "export", ".").stderr == f"error: checkpoints are read with torch, which {remedy}"
    describe = "onnxtool.runtime.environment.describe_environment"
    monkeypatch.setattr(describe, lambda: importlib.import_module("torch"))
    assert run_onnxtool(tmp_path, "env").stderr == f"error: this needs torch, which {remedy}"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("infer --stats", "--stats is an option of onnxtool export, optimize; see onnxtool infer --help"),
        ("infer --no-verify", "--no_verify is an option of onnxtool export, optimize, "),
        ("encode merge --opset 14", "--opset is an option of onnxtool export; see onnxtool encode merge --help"),
        ("stats --path m.onnx", "write onnxtool stats [OPTIONS] MODEL [BASE]; see onnxtool stats --help"),
        (
            "stats m.onnx --stats",
            "write onnxtool stats [OPTIONS] MODEL [BASE]; --stats is an option of onnxtool export",
        ),
        ("export --crown", "see onnxtool export --help"),
        ("completion", "write onnxtool completion [OPTIONS] {bash|zsh|fish}; see onnxtool completion --help"),
        ("release notes.toml", "write e.g. onnxtool release --config release.toml; see onnxtool release --help"),
        ("encode status vectors", "write e.g. onnxtool encode status --output vectors/; see"),
        ("encode small-model.onnx", "see onnxtool encode --help"),
        (
            "optimize m.onnx --sizes 1by2",
            "write --sizes 1x32,8x128, or NAME=VALUE,NAME=VALUE; see onnxtool ",
        ),
    ],
)
def test_a_usage_error_is_one_line_with_the_way_out_in_the_hint(arguments: str, hint: str) -> None:
    """Options of other commands or of none, arguments where a command takes none, and values of the wrong form."""
    done = run_onnxtool(Path(), *arguments.split())
    assert done.returncode == 2
    assert f"\nhint: {hint}" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_an_unknown_subcommand_is_quoted_as_it_was_typed() -> None:
    done = run_onnxtool(Path(), "encode", "small-model.onnx")
    assert done.stderr.startswith("error: No such command 'small-model.onnx'. There are run, part, merge, status.\n")


@pytest.mark.usefixtures("workers_here")
@pytest.mark.parametrize(
    "command", ["export", "optimize", "infer", "encode run", "encode part", "evaluate", "artifacts"]
)
def test_a_model_needs_no_option(tmp_path: Path, command: str) -> None:
    """It is an argument, or the value of its option, and not both."""
    name = "--model_name" if command == "export" else "--model_path"
    more = {"evaluate": "--data .", "encode": "--input texts.txt --output vectors", "infer": "--text cat"}
    words = [*command.split(), *more.get(command.split()[0], "").split()]
    alone, named = (run_onnxtool(tmp_path, *words, *given) for given in (["none.onnx"], [name, "none.onnx"]))
    assert (alone.returncode, alone.stderr) == (named.returncode, named.stderr)
    twice = run_onnxtool(tmp_path, *words, "one.onnx", name, "other.onnx")
    assert (twice.returncode, twice.stderr.splitlines()[0]) == (
        2,
        f"error: {'CHECKPOINT' if command == 'export' else 'MODEL'} is given twice: one.onnx, and other.onnx by {name}",
    )
    missing = run_onnxtool(tmp_path, *words)
    assert missing.returncode == 2
    if command != "artifacts":  # which takes a checkpoint as well
        assert f"write onnxtool {command} [OPTIONS] [{twice.stderr.split()[1]}]" in missing.stderr


def test_a_misspelled_command_is_understood() -> None:
    """It is an error of usage all the same."""
    done = run_onnxtool(Path(), "optimise")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'optimize'?" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal")
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_figure_is_cut_on_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Titles break and names fold; where the figures alone are wider, so are the lines."""
    figures = [f"{10**place + 0.25:.2f}" for place in range(9)]
    table = Table(("a_long_name", *(f"p{place}_ms" for place in range(9))), [("word " * 9, *figures)])
    table = table._replace(numbers=frozenset(table.columns[1:]))
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(width))
    emit({}, [table], "text")
    assert set(figures) <= set(out.getvalue().split())
    assert out.getvalue().count("word") == 9


@pytest.mark.parametrize("command", RUNNABLE)
def test_help_fits_each_terminal_and_says_the_same(command: str) -> None:
    """Lines are longer than the terminal only where the choices of an option or a command to copy are."""
    pages = {
        width: run_onnxtool(Path(), *command.split(), "--help", COLUMNS=str(width)).stdout for width in (60, 80, 120)
    }
    assert len({"".join(page.split()) for page in pages.values()}) == 1
    for width, page in pages.items():
        assert not [line for line in page.splitlines() if len(line) > width and not re.search(r"\||Example:", line)]
