"""Read a command's options from configuration files and the environment, unconverted and without click.

The nearest folder that has a table for the command wins, from the working directory up to the root of its git
repository; outside a repository only the working directory is searched, because anyone may be able to write to its
parents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from onnxtool.cli.commands import TABLES
from onnxtool.errors import InputError
from onnxtool.inputs import note_input
from onnxtool.reading import MOST_CONFIG_BYTES, parse_toml, read_text

OWN_FILE = ".onnxtool.toml"
PROJECT_FILE = "pyproject.toml"
PREFIX = "ONNXTOOL_"


class Setting(NamedTuple):
    """The setting of one option.

    Attributes:
        value: as parsed from TOML; text from the environment.
        source: the file and the table, or the variable.
        folder: the file's folder, which paths in it are relative to; None for the environment.
    """

    value: Any
    source: str
    folder: Path | None = None


class ConfigFile(NamedTuple):
    """A file with command tables.

    Attributes:
        prefix: what precedes the command's name in the table header.
    """

    path: Path
    prefix: str
    tables: dict[str, Any]


def find_files() -> list[ConfigFile]:
    """Return the files that configure onnxtool here, in order of precedence.

    Raises:
        InputError: a file cannot be read, or its tables are not TOML tables.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the working directory was removed
        return []
    above = (here, *here.parents)
    root = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), 0)
    paths = (folder / name for folder in above[: root + 1] for name in (OWN_FILE, PROJECT_FILE))
    found = (_read(Path(os.path.relpath(path, here))) for path in paths if path.is_file())
    return [file for file in found if file is not None]


def read_file(path: Path) -> ConfigFile:
    """Return the tables of one file.

    Raises:
        InputError: it cannot be read, or has no tables.
    """
    file = _read(path)
    if file is None:
        raise InputError(
            f"{path} has no table [tool.onnxtool]", "add [tool.onnxtool.COMMAND] with options of a command"
        )
    return file


def settings_of(command: str, files: list[ConfigFile]) -> dict[str, Setting]:
    """Return the settings of `command` by option name, from `files` in order, overridden by the environment.

    Raises:
        InputError: a table is not a TOML table.
    """
    variables = dict(_variables(command))
    nearest = next((file.path.parent for file in files if command in file.tables), None)
    found: dict[str, Setting] = {}
    for file in files:
        if file.path.parent == nearest and command in file.tables:
            table, name = file.tables[command], f"{file.prefix}{command}"
            if not isinstance(table, dict):
                raise InputError(f"{name} of {file.path} is not a table", f"write it as [{name}]")
            for key, value in table.items():
                found.setdefault(key.replace("-", "_"), Setting(value, f"{file.path} [{name}]", file.path.parent))
    return {**found, **variables}


def is_configured(command: str) -> bool:
    """Whether anything configures `command`, or a file may be wrong.

    Raises:
        InputError: a file cannot be read.
    """
    return bool(find_files()) or bool(unknown_variables()) or any(True for _ in _variables(command))


def unknown_variables() -> list[str]:
    """Return the variables that begin like those of onnxtool, and are of no command."""
    known = tuple(f"{PREFIX}{table.upper()}_" for table in TABLES)
    return sorted(name for name in os.environ if name.startswith(PREFIX) and not name.startswith(known))


def _variables(command: str) -> Iterator[tuple[str, Setting]]:
    beginning = f"{PREFIX}{command.upper()}_"
    for name, value in os.environ.items():
        if name.startswith(beginning):
            yield name.removeprefix(beginning).lower(), Setting(value, name)


def _read(path: Path) -> ConfigFile | None:
    """Return the tables of a file; None for a pyproject.toml that does not mention onnxtool."""
    try:
        note_input(path)
        text = read_text(path, MOST_CONFIG_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", "check the path and its permissions") from error
    is_project = path.name == PROJECT_FILE
    if is_project and "onnxtool" not in text:  # most projects never need the parser
        return None
    try:
        tables: Any = parse_toml(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid TOML: {error}", "correct the file") from error
    for part in ("tool", "onnxtool") if is_project else ():
        tables = tables.get(part) if isinstance(tables, dict) else None
    if tables is None:
        return None
    if not isinstance(tables, dict):
        raise InputError(f"tool.onnxtool of {path} is not a table", "write [tool.onnxtool.COMMAND]")
    return ConfigFile(path, "tool.onnxtool." if is_project else "", tables)
