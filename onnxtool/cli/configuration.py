"""Options of commands from configuration files and the environment, given to click as its `default_map`.

The nearest folder that has a table for the command wins, from the working directory up to the root of its git
repository; outside a repository only the working directory is searched, because anyone may be able to write to its
parents. A file found this way does not speak for the user: it sets only options without an `Option.effect`, and names
only paths in its own folder. A file named with --config was chosen by the user and may set the rest, except what runs
code or replaces files.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from onnxtool.cli.choices import CheckpointType, CountList, PathType
from onnxtool.cli.commands import TABLES
from onnxtool.errors import OptionError
from onnxtool.options import Effect, check
from onnxtool.reading import MOST_CONFIG_BYTES, note_input, parse_toml, read_text

Command = TypeVar("Command", bound=Callable[..., Any])

OWN_FILE = ".onnxtool.toml"
PROJECT_FILE = "pyproject.toml"
PREFIX = "ONNXTOOL_"
PRECEDENCE = ("the command line", f"{PREFIX}COMMAND_OPTION in the environment", OWN_FILE, PROJECT_FILE, "the defaults")
"""The sources of an option, in order of precedence."""

_EFFECTS: dict[Effect, str] = {
    "check": "it can lower a check",
    "code": "it runs code of a checkpoint, or reads files that can run code",
    "library": "it can load libraries and write files",
    "replace": "it replaces files",
    "send": "it sends something",
    "source": "it chooses the checkpoint whose code --trust_remote_code runs",
    "write": "it says where to write",
}


class Configured(NamedTuple):
    """A configured option with a valid value."""

    command: str
    option: str
    value: Any
    source: str


class RawSetting(NamedTuple):
    """A value from a file, as parsed, with the folder of the file; or text from the environment, without one."""

    value: Any
    source: str
    folder: Path | None = None


def config_option(command: Command) -> Command:
    """Add --config, and apply configured values to options that are not on the command line."""
    return click.option(
        "--config",
        type=PathType(),
        is_eager=True,
        expose_value=False,
        callback=_configure,
        help=f"Read this command's options from this TOML file, instead of {OWN_FILE} and {PROJECT_FILE} in the "
        "working directory or above it, up to the root of a git repository. Options are resolved in this order; the "
        "first one that is set wins: "
        f"{', '.join(PRECEDENCE)}.",
    )(command)


def all_of(context: click.Context) -> tuple[Configured, ...]:
    """Return what is configured for the running command."""
    return tuple(context.meta.get(__name__, ()))


def sources_of(context: click.Context, text: str) -> str:
    """Name the source of each configured option that the error `text` mentions, one per line."""
    mentioned = (
        setting
        for setting in all_of(context)
        if f"--{setting.option}" in text
        or (re.search(rf"(?<![a-z_]){setting.option}(?![a-z_])", text) and str(setting.value) in text)
    )
    return "\n".join(f"--{setting.option} is set in {setting.source}" for setting in mentioned)


def all_configured(context: click.Context) -> tuple[list[Configured], list[str]]:
    """Return what is configured here for all commands, and the problems found."""
    configured: list[Configured] = []
    problems: dict[str, None] = {}
    for table, command in _commands(context):
        try:
            configured += _resolve(click.Context(command), table, None).values()
        except click.UsageError as error:
            problems[error.message.replace("\n", ": ")] = None
    return configured, [*problems, *unknown_variables(context)]


def unknown_variables(context: click.Context) -> list[str]:
    """Say which variables are of no command, each with the closest one that is."""
    beginnings = tuple(f"{PREFIX}{table}_".upper() for table in TABLES)
    names = sorted(name for name in os.environ if name.startswith(PREFIX) and not name.startswith(beginnings))
    options = ((table, name) for table, command in _commands(context) for name in options_of(command))
    known = [f"{PREFIX}{table}_{name}".upper() for table, name in options] if names else []
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0)[0] for name in names}
    return [f"the environment variable {name} is of no command. Did you mean {near}?" for name, near in close.items()]


def _commands(context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that can be configured, by the names of their tables."""
    root = context.find_root()
    for table, path in TABLES.items():
        command: Any = root.command
        for name in path.split():
            command = command.get_command(root, name)
        yield table, command


def options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options that can be configured, by name; --config is read before."""
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    names = ((name, option) for option in options for name in option.opts if name.startswith("--"))
    return {name[2:]: option for name, option in names if name != "--config"}


def effect_of(option: click.Option, value: Any = None) -> Effect:
    """Return the effect that bars an option from files found in a folder; empty for a harmless option."""
    if getattr(option.type, "writes", ""):
        return "write"
    effect: Effect | Callable[[Any], Effect] = option.field.described.effect if hasattr(option, "field") else ""
    return effect if isinstance(effect, str) else effect(value)


def _configure(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    if context.resilient_parsing:
        return
    table = "_".join(context.command_path.split()[1:])
    try:
        resolved = _resolve(context, table, file)
    except click.UsageError:
        if table != "env" or file is not None:
            raise
        resolved = {}  # `onnxtool env` lists what is wrong with a configuration
    context.default_map = {name: setting.value for name, setting in resolved.items()}
    context.meta[__name__] = resolved.values()


def _resolve(context: click.Context, command: str, path: Path | None) -> dict[str, Configured]:
    """Return what is configured for a command, by the parameter's name.

    Raises:
        UsageError: a file cannot be read, or a value is not valid for its option.
    """
    options = options_of(context.command)
    resolved = {}
    for name, setting in settings_of(command, path).items():
        place = f"{setting.source}: {name}"
        if name not in options:
            known = [key for key, option in options.items() if setting.folder is None or not effect_of(option)]
            raise click.UsageError(f"{place} is not an option of onnxtool {command}{_suggestion(name, known)}", context)
        option = options[name]
        effect = "" if setting.folder is None else effect_of(option, setting.value)
        is_for_people = effect in ("code", "replace")
        if effect and (path is None or is_for_people):
            ways = f"pass --{name}, or set {PREFIX}{command.upper()}_{name.upper()}"
            raise click.UsageError(
                f"{place} cannot be set in {'this' if path is None else 'a'} file, because {_EFFECTS[effect]}\n"
                f"{ways if is_for_people else f'{ways}, or name the file by --config'}",
                context,
            )
        try:
            value = _value(context, option, setting, is_own=path is not None)
        except (click.BadParameter, OptionError) as error:
            raise click.UsageError(f"{place}: {error.message}", context) from error
        resolved[str(option.name)] = Configured(command, name, value, setting.source)
    return resolved


def settings_of(command: str, path: Path | None = None) -> dict[str, RawSetting]:
    """Return the settings of `command` by option name: from a file or the found ones, overridden by the environment.

    Raises:
        UsageError: a file cannot be read, or has other tables than those of commands, or not this one.
    """
    settings: dict[str, RawSetting] = {}
    nearest: Path | None = None
    for file in _find_files() if path is None else [path]:
        table = _read_tables(file).get(command)
        if table is not None and nearest in (None, file.parent):
            nearest, settings = file.parent, table | settings
    if path is not None and nearest is None:
        raise click.UsageError(f"{path} has no table [{_prefix(path)}{command}]\nadd one, or leave --config out")
    beginning = f"{PREFIX}{command}_".upper()
    variables = ((name, value) for name, value in os.environ.items() if name.startswith(beginning))
    return settings | {name.removeprefix(beginning).lower(): RawSetting(value, name) for name, value in variables}


def _find_files() -> list[Path]:
    """Return the files that may configure onnxtool here, in order of precedence."""
    try:
        folder_here = Path.cwd()
    except FileNotFoundError:  # the working directory was removed
        return []
    above = (folder_here, *folder_here.parents)
    root = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), 0)
    paths = (folder / name for folder in above[: root + 1] for name in (OWN_FILE, PROJECT_FILE))
    return [Path(os.path.relpath(path, folder_here)) for path in paths if path.is_file()]


def _prefix(path: Path) -> str:
    """Return what precedes the command's name in a table header."""
    return "tool.onnxtool." if path.name == PROJECT_FILE else ""


def _read_tables(path: Path) -> dict[str, dict[str, RawSetting]]:
    """Return the settings in a file by command; none for a pyproject.toml without any."""
    try:
        note_input(path)
        text = read_text(path, MOST_CONFIG_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"cannot read {path}: {error}\ncheck the path and its permissions") from error
    if _prefix(path) and "onnxtool" not in text:  # most projects never need the parser
        return {}
    try:
        tables: Any = parse_toml(text)
    except ValueError as error:
        raise click.UsageError(f"{path} is not valid TOML: {error}\ncorrect the file") from error
    for part in _prefix(path).split(".")[:-1]:
        tables = tables.get(part, {}) if isinstance(tables, dict) else {}
    commands = {}
    for name, table in tables.items() if isinstance(tables, dict) else [("COMMAND", tables)]:
        place = f"[{_prefix(path)}{name}]"
        if not isinstance(table, dict):
            raise click.UsageError(f"{place[1:-1]} of {path} is not a table\nwrite it as {place}")
        if name not in TABLES:
            raise click.UsageError(f"{path} has {place}, and there is no such command{_suggestion(name, TABLES)}")
        commands[name] = {
            key.replace("-", "_"): RawSetting(value, f"{path} {place}", path.parent) for key, value in table.items()
        }
    return commands


def _suggestion(name: str, names: Iterable[str]) -> str:
    names = [*names]
    if name.removeprefix("no_") in names:
        return f"; write {name.removeprefix('no_')} = false"
    close = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {close[0]!r}?" if close else f"; use one of {', '.join(names)}"


def _value(context: click.Context, option: click.Option, setting: RawSetting, *, is_own: bool) -> Any:
    """Convert a setting to the option's type.

    Raises:
        BadParameter, OptionError: the type is wrong, or the option does not take the value.
    """
    value, folder = setting.value, setting.folder
    if folder is None:
        return option.type_cast_value(context, value.splitlines() if option.multiple else value)
    if not (isinstance(option.type, CountList) and type(value) in (int, str)):  # or spelled as on the command line
        plain = bool if option.is_flag else int if option.count else tuple[str, ...] if option.multiple else str
        check("", value, getattr(option, "hint", plain))
    if isinstance(option.type, PathType | CheckpointType):
        texts = [value] if isinstance(value, str) else value
        located = [_located(text, option.type, folder, is_own=is_own) for text in texts]
        value = located if option.multiple else located[0]
    elif isinstance(value, list) and not option.multiple:
        value = ",".join(map(str, value))
    return option.type_cast_value(context, value)


def _located(text: str, kind: PathType | CheckpointType, folder: Path, *, is_own: bool) -> str:
    """Return a path in a file as seen from the working directory; an id on the hub, or an address, stays as it is.

    Raises:
        OptionError: it leaves the folder of the file, or would be an id there and a path here.
    """
    from onnxtool.checkpoint.folder import is_path
    from onnxtool.encoding.locations import is_uri

    path = folder / Path(text).expanduser()
    if is_uri(text) or (isinstance(kind, CheckpointType) and not is_path(text) and not path.exists()):
        if Path(text).exists():
            raise OptionError(f"{text} is here, and not in the folder of the file, which paths are relative to", "")
        return text
    if not is_own and not path.resolve().is_relative_to(folder.resolve()):
        raise OptionError(f"{text} leaves the folder of the file, which may not be yours", "")
    return str(path)
