"""Read texts from a file: plain text, one a line, or JSON Lines with `id`, `contents` and, of a pair, `query`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onnxtool.errors import InputError


@dataclass(frozen=True)
class TextInput:
    """A text to run.

    Attributes:
        id: what the file calls this text; None where it has no name.
        query: the text that it makes a pair with, such as a question; None where it stands alone.
    """

    contents: str
    id: str | None = None
    query: str | None = None


def read_texts(path: Path) -> tuple[TextInput, ...]:
    """Read the texts of the file at `path`, skipping blank lines.

    Raises:
        InputError: the file cannot be read or has no text, its suffix is unknown, or a line is malformed.
    """
    parse = _FORMATS.get(path.suffix.lower())
    if parse is None:
        raise InputError(
            f"cannot tell the format of {path} from its suffix {path.suffix!r}",
            f"use {' or '.join(_FORMATS)}: a text a line, or a JSON object with id and contents a line",
        )
    texts = tuple(parse(line, f"{path}:{number}") for number, line in _lines(path) if line.strip())
    if not texts:
        raise InputError(f"{path} has no texts", "put one on each line")
    return texts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of the UTF-8 file at `path` and its number; only a line feed ends a line."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                yield number, _decoded(raw, f"{path}:{number}")
    except FileNotFoundError:
        raise InputError(f"no such input file: {path}", "check the path") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check the path and its permissions") from error


def _decoded(raw: bytes, place: str) -> str:
    try:
        # Editors on Windows begin a file with a byte order mark, which is no part of the first text.
        return raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{place} is not UTF-8: {error.reason} at byte {error.start} of the line", "convert the file to UTF-8"
        ) from None


def _plain(line: str, place: str) -> TextInput:
    return TextInput(line)


def _json_object(line: str, place: str) -> TextInput:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {error}", 'each line is an object such as {"id": "1", …}') from None
    if not isinstance(entry, dict):
        raise InputError(f"{place} is not a JSON object: {line[:60]}", 'write {"id": "1", "contents": "a text"}')
    name, contents = entry.get("id"), entry.get("contents")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError(f"{place} has no id that is a string or an integer", 'add "id" to the object')
    if not isinstance(contents, str):
        raise InputError(f"{place} has no contents that is a string", 'add "contents", the text, to the object')
    query = entry.get("query")
    if query is not None and not isinstance(query, str):
        raise InputError(f"{place} has a query that is no string", 'leave "query" out, or make it a text')
    return TextInput(contents, str(name), query)


_FORMATS: dict[str, Callable[[str, str], TextInput]] = {".txt": _plain, ".jsonl": _json_object}
