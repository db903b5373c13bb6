"""An option is a field of an options class: what the commands make of it, and the reference of all options."""

from __future__ import annotations

import gc
import runpy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner

from onnxtool.cli.options import derived_options
from onnxtool.options import Option, checked

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@dataclass(frozen=True)
class Loading:
    path: Annotated[Path, Option("The file.")]
    threads: Annotated[int, Option("Threads; 0: one per core.", minimum=0)] = 0
    verify: Annotated[bool, Option("Check it.")] = True
    seed: int = 0


@dataclass(frozen=True)
class Timing:
    sizes: Annotated[tuple[int, ...], Option("Sizes.", name="size", maximum=64)] = (1, 8)
    names: Annotated[tuple[str, ...], Option("Names.", name="name")] = ()
    threads: Annotated[int, Option("Not shown: the first class has it.")] = 0
    seconds: Annotated[float | None, Option("How long.", minimum=0, is_open=True, default="as long as it takes")] = None
    kind: Annotated[str, Option("Which.", choices=("one-way", "two"))] = "two"


@dataclass(frozen=True)
class Source:
    address: Annotated[str, Option("Where from.")]
    strict: Annotated[bool | None, Option("Be strict.")] = None


made: list[Any] = []


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("-", "_")})
@derived_options(loading=Loading, timing=Timing, source=Source)
@click.option("--quiet", is_flag=True)
def command(
    loading: Loading, timing: Callable[[], Timing], source: Callable[[], Source] | None, *, quiet: bool
) -> None:
    """A command."""
    made[:] = [loading, timing(), source and source(), quiet]


def run(*arguments: str) -> list[Any]:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    return made


def test_fields_get_their_defaults() -> None:
    """A field without an Option keeps its own; a class whose required option is missing is None."""
    assert run("--path", "a.onnx") == [Loading(Path("a.onnx")), Timing(), None, False]


def test_fields_get_what_was_given() -> None:
    """By the option's name; lists by commas or by repetition; classes that share an option get the same value."""
    words = "--path a --threads 2 --no-verify --size 1,2 --name x --name y --seconds 0.5 --kind one-way --quiet"
    loading, timing, source, quiet = run(*words.split(), "--address", "hub", "--no_strict")
    assert loading == Loading(Path("a"), threads=2, verify=False)
    assert timing == Timing((1, 2), ("x", "y"), threads=2, seconds=0.5, kind="one-way")
    assert (source, quiet) == (Source("hub", strict=False), True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--path'"),
        (["--path", "a", "--threads", "-1"], "-1 is not in the range x>=0"),
        (["--path", "a", "--size", "1,65"], "65 is not in the range x<=64"),
        (["--path", "a", "--seconds", "0"], "0.0 is not in the range x>0"),
        (["--path", "a", "--kind", "three"], "'three' is not one of"),
        (["--path", "a", "--kind", "ONE"], "Did you mean 'one-way'?"),
        (["--path", "a", "--seed", "1"], "No such option '--seed'"),
    ],
)
def test_values_are_held_to_their_bounds(arguments: list[str], message: str) -> None:
    """Wrong usage, named by click."""
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_the_help_tells_defaults_and_choices() -> None:
    """A default in words where the field's own says nothing."""
    text = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    assert "Threads; 0: one per core.  [default: 0; x>=0]" in text
    assert "Sizes.  [default: 1,8]" in text
    assert "How long.  [default: as long as it takes]" in text
    assert "--kind [one-way|two]" in text
    assert "--strict / --no_strict" in text
    assert "Not shown" not in text


def test_what_a_caller_holds_is_freed_when_it_returns() -> None:
    """Without a garbage collection: it may be a session with all weights."""

    class Held:
        pass

    @checked
    def takes(value: int | str) -> str:
        return str(value)

    def call() -> weakref.ref[Held]:
        held = Held()
        takes("not a number, which is tried first")
        return weakref.ref(held)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_the_reference_of_options_is_that_of_the_help() -> None:
    """Made by scripts/options_reference.py, which has to run after an option changes."""
    script = runpy.run_path(str(SCRIPTS / "options_reference.py"))
    assert script["PATH"].read_text(encoding="utf-8") == script["options_reference"]()
