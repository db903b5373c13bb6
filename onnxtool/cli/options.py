"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

FORMATS = ("text", "markdown", "json")


def report_options(command: Command) -> Command:
    """Add --format and --quiet: how the result and the progress are shown."""
    return format_options(FORMATS)(command)


def format_options(formats: Sequence[str], more: str = "") -> Callable[[Command], Command]:
    """Add --format, which takes one of `formats`, and --quiet; `more` is said of the formats."""

    def decorate(command: Command) -> Command:
        quiet = click.option("--quiet", is_flag=True, help="No progress on stderr; the result is still printed.")
        return click.option(
            "--format",
            "format_name",
            type=click.Choice(formats),
            default="text",
            show_default=True,
            help=f"How to print the result on stdout{more}.",
        )(quiet(command))

    return decorate


def output_options(meaning: str, path_type: PathType | None = None) -> Callable[[Command], Command]:
    """Add --output, whose help is `meaning`, and --force."""

    def decorate(command: Command) -> Command:
        command = click.option("--force", is_flag=True, help="Replace an output that exists.")(command)
        return click.option("--output", type=path_type or PathType(), help=meaning)(command)

    return decorate


class PathType(click.Path):
    """A path as a pathlib.Path; whether it exists is for the library to say, with a hint."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)


class NameChoice(click.Choice[str]):
    """One of several names, shown as they are written; the hyphens in them are no option's."""

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """List the names as the help shows them."""
        return f"[{'|'.join(map(str, self.choices))}]"


class CountList(click.ParamType[tuple[int, ...]]):
    """A comma-separated list of positive integers up to a highest, e.g. `1,8,32`."""

    name = "1,8,…"

    def __init__(self, highest: int) -> None:
        self.highest = highest

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse the list, or fail with what was wrong."""
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of positive integers such as 1,8,32", param, ctx)
        if not all(len(part.strip()) < 20 and int(part) <= self.highest for part in parts):
            self.fail(f"{value!r} has a number above {self.highest}", param, ctx)
        return tuple(int(part) for part in parts)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that says on stderr what is being done: a spinner on a terminal, else a line a stage."""
    if quiet:
        yield lambda _stage: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console

        # Bound to the stream itself: what is run may replace sys.stderr to keep others quiet.
        with Console(file=sys.stderr).status("starting") as status:
            yield lambda stage: status.update(f"{stage} …")
    else:
        yield lambda stage: click.echo(f"{stage} …", err=True)
