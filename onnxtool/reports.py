"""Building blocks of reports: JSON values, and the inputs and outputs of a graph.

Dtypes use numpy's names (`float32`, `int64`). A dimension is an integer if fixed, a name if dynamic, and None if the
file does not specify it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")

Dimension = int | str | None
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def short_repr(owner: type[T]) -> type[T]:
    """Give a dataclass or named tuple a one-line `repr`: arrays by type and shape, long values by their size.

    Fields with their default value are omitted.
    """
    owner.__repr__ = _written_shortly  # type: ignore[method-assign]
    return owner


def _written_shortly(record: Any) -> str:
    fields = getattr(record, "__dataclass_fields__", None)
    defaults = record._field_defaults if fields is None else {name: field.default for name, field in fields.items()}
    values = ((name, getattr(record, name)) for name in (record._fields if fields is None else fields))
    parts = [f"{name}={_brief(value)}" for name, value in values if not _is_default(value, defaults.get(name, record))]
    text = ", ".join(parts)
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN].rpartition(', ')[0]}, …"
    return f"{type(record).__name__}({text})"


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and isinstance(value, _PLAIN) and value == default)


def _brief(value: Any) -> str:
    """Write a value in about forty characters."""
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    if hasattr(value, "__dataclass_fields__") or hasattr(value, "_fields"):
        return f"{type(value).__name__}(…)"
    is_many = isinstance(value, list | tuple | Mapping | set | frozenset)
    if is_many and (len(value) > _FEW or any(not isinstance(item, _PLAIN) for item in value)):
        return f"<{len(value)} {'entry' if len(value) == 1 else 'entries'}>"
    text = str(value) if isinstance(value, Path) else repr(value if not isinstance(value, str) else value[:_LONGEST])
    is_cut = len(text) > _LONGEST or (isinstance(value, str) and len(value) > _LONGEST)
    return f"{text[:_LONGEST]}…" if is_cut else text


_PLAIN = (str, int, float, tuple, NoneType)
_FEW, _LONGEST, _MOST_SHOWN = 4, 40, 400


class TensorInfo(NamedTuple):
    """An input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]


class PlannedFile(NamedTuple):
    """A file that a command would write.

    Attributes:
        change: `new`; `replaced` for an existing file; or `unchanged` for one with the same content.
    """

    path: str
    change: str


@short_repr
class WritePlan(NamedTuple):
    """Files that a command would write, found without doing the work.

    Attributes:
        notes: remarks on what is known only after the work.
    """

    command: str
    files: tuple[PlannedFile, ...]
    notes: tuple[str, ...] = ()


def planned_files(paths: Iterable[Path]) -> tuple[PlannedFile, ...]:
    """Return the planned change of each file in `paths`."""
    return tuple(PlannedFile(str(path), "replaced" if path.exists() else "new") for path in paths)


def to_json(value: object) -> Json:
    """Convert a report to JSON values: dataclasses and named tuples to objects, tuples to arrays, paths to text.

    JSON has no infinity or NaN; non-finite figures become null.
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


def from_json(kind: Any, value: Any, place: str = "it", is_text: Callable[[str], bool] = lambda _: True) -> Any:
    """Convert JSON values back to a report, the inverse of `to_json`; anything that it does not write is refused.

    Args:
        kind: the annotated type: a dataclass or named tuple, whose fields must all be there, or a part of one.
        value: the JSON value.
        place: the name of the value, for errors.
        is_text: whether a text may be in the report.

    Raises:
        ValueError: the value has another form.
    """
    inner = get_args(kind)
    if kind is Any:
        return value
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields"):
        hints, entries = get_type_hints(kind), _object(value, place)
        if odd := sorted(hints.keys() ^ entries.keys()):
            raise ValueError(f"{place} {'has' if odd[0] in entries else 'lacks'} {odd[0][:80]!r}")
        return kind(
            **{name: from_json(hints[name], item, f"{place}.{name}", is_text) for name, item in entries.items()}
        )
    if isinstance(kind, UnionType):
        return None if value is None else from_json(inner[0], value, place, is_text)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{place} is no list")
        return tuple(from_json(inner[0], item, f"{place}[{index}]", is_text) for index, item in enumerate(value))
    if get_origin(kind) in (dict, Mapping):
        entries = _object(value, place)
        return {name: from_json(inner[1], item, f"{place}[{name[:80]!r}]", is_text) for name, item in entries.items()}
    if not _fits(kind, value) or (kind is str and not is_text(value)):
        raise ValueError(f"{place} is {str(value)[:80]!r}, and no {kind.__name__} that belongs there")
    return value


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no object")
    return value


def _fits(kind: type, value: Any) -> bool:
    """Whether a JSON value is a plain one of a type; integers are counts, and stay integers where a float belongs."""
    if isinstance(value, bool | str):
        return type(value) is kind
    if isinstance(value, int):
        return (kind is int and 0 <= value < _MOST) or (kind is float and abs(value) < _MAX_WHOLE)
    return kind is float and isinstance(value, float) and math.isfinite(value)


_MOST = 1 << 62
_MAX_WHOLE = 1 << 53  # floats represent every integer only below this


def printable(text: str) -> str:
    """Escape control characters, line breaks and bidirectional marks as in Python string literals."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def code_span(text: str) -> str:
    """Write a name as a Markdown code span, or in entities if it is empty or could end the span."""
    text = printable(text)
    if text.strip() and "`" not in text and not text.endswith("\\"):
        return f"`{text}`".replace("|", "\\|")
    return f"<code>{''.join(map(html_entity, text))}</code>"


def html_entity(character: str) -> str:
    """Escape a character for Markdown and HTML, where only letters and digits are safe."""
    return character if character.isalnum() else f"&#{ord(character)};"
