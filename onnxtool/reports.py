"""What reports consist of: JSON values, and the inputs and outputs of a graph.

Dtypes are written as numpy writes them (`float32`, `int64`). A dimension is an integer where it is fixed, its name
where it is dynamic, and None where the file says nothing.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from onnxtool.renamed import moved_name

Dimension = int | str | None
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class TensorInfo(NamedTuple):
    """An input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]


class PlannedFile(NamedTuple):
    """A file that a command would write.

    Attributes:
        change: `new`; `replaced`, for a file that is there; or `unchanged`, for one of the same content.
    """

    path: str
    change: str


class WritePlan(NamedTuple):
    """What a command would write, found without doing its work.

    Attributes:
        notes: what is known only once the work is done.
    """

    command: str
    files: tuple[PlannedFile, ...]
    notes: tuple[str, ...] = ()


def planned_files(paths: Iterable[Path]) -> tuple[PlannedFile, ...]:
    """Return what becomes of the files at `paths`."""
    return tuple(PlannedFile(str(path), "replaced" if path.exists() else "new") for path in paths)


def to_json(value: object) -> Json:
    """Turn a report into JSON values: dataclasses and named tuples into objects, tuples into arrays, paths into text.

    JSON knows no infinity and no NaN; a figure that is not finite becomes null.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    names = getattr(type(value), "_fields", None) or getattr(type(value), "__dataclass_fields__", None)
    if names is not None:
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")


def printable(text: str) -> str:
    """Escape control characters, line breaks and marks that reorder text as Python writes them in a string."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def code_span(text: str) -> str:
    """Write a name in Markdown as code; one that could end the span, or is empty, is spelled in entities instead."""
    text = printable(text)
    if text.strip() and "`" not in text and not text.endswith("\\"):
        return f"`{text}`".replace("|", "\\|")
    return f"<code>{''.join(map(html_entity, text))}</code>"


def html_entity(character: str) -> str:
    """Write a character for Markdown and HTML, where only letters and digits mean nothing else."""
    return character if character.isalnum() else f"&#{ord(character)};"


def __getattr__(name: str) -> object:
    return moved_name(__name__, name)
