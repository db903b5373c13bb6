"""Settings of `stats`, from the command line or a repository's configuration file."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

from onnxtool.errors import InputError
from onnxtool.options import Option

OWN_FILE = ".onnxtool.toml"
_PROJECT_FILE = "pyproject.toml"


class Shape(NamedTuple):
    """The size of the axes of a batch; an axis that the file fixes keeps its own size."""

    batch_size: int = 1
    sequence_length: int = 128


class Settings(NamedTuple):
    """What applies to every run in a repository.

    Attributes:
        source: the file that says so; None where there is none.
        fail_if: gates. Those relative to a base hold only where there is one.
    """

    source: Path | None = None
    fail_if: Annotated[
        tuple[str, ...],
        Option(
            "Exit with 1 where this holds: any number of the JSON report, one of > >= < <= == !=, and a number; with a "
            "sign, and optionally %, it is relative to BASE. E.g. 'num_nodes>500', 'ops.MatMul!=98', 'size_bytes>+5%', "
            "'count(delta.inputs.removed)>0'. May be given several times.",
            metavar="EXPR",
        ),
    ] = ()
    batch_size: Annotated[
        int | None, Option("Report what a run of this batch size costs: MACs and activations.", minimum=1)
    ] = None
    sequence_length: Annotated[
        int | None, Option("The same for this sequence length.", minimum=1, default="128 with --batch_size")
    ] = None
    weights: Annotated[bool, Option("Compare the values of weights with BASE as well; reads both files whole.")] = False


def find_settings(folder: Path) -> Settings:
    """Return the settings for `folder`: [stats] of .onnxtool.toml, or [tool.onnxtool.stats] of pyproject.toml.

    Looked for in `folder` and those above it, up to the root of a git repository.

    Raises:
        InputError: a file cannot be read, or has unknown settings.
    """
    try:
        here = folder.absolute()
    except FileNotFoundError:  # the folder in which we are was removed
        return Settings()
    for parent in (here, *here.parents):
        for name in (OWN_FILE, _PROJECT_FILE):
            file = parent / name
            if file.is_file() and (settings := _read(file)) is not None:
                return settings
        if (parent / ".git").exists():
            break
    return Settings()


def read_settings(file: Path) -> Settings:
    """Return the settings of `file`.

    Raises:
        InputError: it cannot be read, has no settings, or has unknown settings.
    """
    settings = _read(file)
    if settings is None:
        raise InputError(f"{file} has no table [{_table(file)}]", "add one, with e.g. fail_if = ['num_nodes>500']")
    return settings


def _read(file: Path) -> Settings | None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}", "check the path and its permissions") from error
    if file.name == _PROJECT_FILE and not ("onnxtool" in text and "stats" in text):  # spares most projects the parser
        return None
    import tomllib

    try:
        table: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not valid TOML: {error}", "correct the file") from error
    for part in _table(file).split("."):
        table = table.get(part) if isinstance(table, dict) else None
    if table is None:
        return None
    return _settings(file, table)


def _table(file: Path) -> str:
    return "tool.onnxtool.stats" if file.name == _PROJECT_FILE else "stats"


def _settings(file: Path, table: Any) -> Settings:
    known = {"fail_if": (list,), "batch_size": (int,), "sequence_length": (int,), "weights": (bool,)}
    name = _table(file)
    if not isinstance(table, dict):
        raise InputError(f"{name} of {file} is not a table", f"write it as [{name}]")
    for key, value in table.items():
        if key not in known:
            raise InputError(f"{file} has {name}.{key}, which is not a setting", f"use one of {', '.join(known)}")
        if type(value) not in known[key]:
            raise InputError(f"{name}.{key} of {file} is {value!r}", f"a {known[key][0].__name__} goes there")
    gates = table.get("fail_if", [])
    if not all(isinstance(gate, str) for gate in gates):
        raise InputError(f"{name}.fail_if of {file} is {gates!r}", "a list of texts goes there")
    for key in ("batch_size", "sequence_length"):
        if table.get(key, 1) < 1:
            raise InputError(f"{name}.{key} of {file} is {table[key]}", "a positive number goes there")
    return Settings(
        file, tuple(gates), table.get("batch_size"), table.get("sequence_length"), table.get("weights", False)
    )
