"""Command-line types: choices, with a suggestion for a misspelled one, paths, and names of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
from click.shell_completion import CompletionItem

from onnxtool.encoding.locations import Location
from onnxtool.errors import OnnxtoolError
from onnxtool.options import Option, check, not_a_choice


class NameChoice(click.Choice[str]):
    """One of several names, shown verbatim: unlike in option names, hyphens are not converted."""

    def get_invalid_choice_message(self, value: object, ctx: click.Context | None) -> str:
        """List the names, and suggest a similar one."""
        return not_a_choice(value, self.choices)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """List the names for the help."""
        names = "|".join(map(str, self.choices))
        return f"{{{names}}}" if isinstance(param, click.Argument) and param.required else f"[{names}]"


class PathType(click.Path):
    """A path as a pathlib.Path; existence is checked by the library, which adds a hint.

    Attributes:
        writes: `file` or `folder` for an output, as in `Option`.
    """

    kind: Any = Path

    def __init__(self, writes: Literal["", "file", "folder"] = "") -> None:
        super().__init__(path_type=Path)
        self.writes = writes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, as the field of an options class would."""
        try:
            return check("", value, Annotated[self.kind, Option(writes=self.writes)])
        except OnnxtoolError as error:
            self.fail(f"{error.message}\nhint: {error.hint}" if error.hint else error.message, param, ctx)


class LocationType(PathType):
    """A path, or the address of a file or folder in an object store."""

    kind = Location


class CheckpointType(click.types.StringParamType):
    """An id on the hub, or a path."""

    writes = ""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return folders, which the shell lists itself."""
        return [CompletionItem(incomplete, type="dir")]


class CountList(click.ParamType[tuple[int, ...]]):
    """A comma-separated list of positive integers, e.g. `1,8,32`."""

    name = "1,8,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse the list, or fail with what was wrong."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and len(part) < 20 for part in parts):
            self.fail(f"{value!r} is not a list of positive integers such as 1,8,32", param, ctx)
        return tuple(map(int, parts))
