"""Declaration of options and arguments, and the single check of their values, whatever the source.

`threads: Annotated[int, Option("Intra-op threads.", minimum=0)] = 0` in an `Options` class becomes `--threads` in every
command that makes the call; `onnxtool.cli.options` reads the fields. Classes share an option by sharing the annotated
type. The type and the `Option` define the check, which is made by `Options` when an object is created, by `checked`
when a function is called, and by the command line after parsing.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from onnxtool.errors import OptionError
from onnxtool.reading import reading
from onnxtool.reports import short_repr

if TYPE_CHECKING:
    from dataclasses import Field

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Value = TypeVar("Value")
Accepted = TypeVar("Accepted")

StrPath = str | os.PathLike[str]
_MOST_LISTED = 10  # choices to list next to a suggestion
_OF_FILES = (".csv", ".faiss", ".gz", ".json", ".jsonl", ".md", ".npy", ".npz", ".onnx", ".parquet", ".txt", ".zip")

# Why a configuration file found in a folder must not set an option: it can lower a check, run a checkpoint's code, load
# libraries, replace files, send something, choose the checkpoint whose code may run, or say where to write.
Effect = Literal["", "check", "code", "library", "replace", "send", "source", "write"]


class Option(NamedTuple):
    """Description of a field or argument beyond its type and default.

    Attributes:
        help: what the option does; empty if it is not a command-line option.
        name: the option's name without dashes, if it differs from the field's.
        choices: all valid values; for a list, they and the bounds apply to each item.
        metavar: placeholder for the value in the help.
        minimum: the smallest value; with `is_open`, an exclusive bound.
        maximum: the largest value.
        default: the behaviour without the option, if the field's default does not show it.
        is_checkpoint: whether it names a checkpoint, for shell completion; folders may be paths.
        is_location: whether a path may also be the address of an object store.
        writes: `file` or `folder` for a path that is written; all other paths are inputs, which are never replaced.
        effect: the effect beyond the command's result that bars the option from configuration files found in a folder;
            a function returns that of a value. Writing needs no mention.
        parse: returns a string in its canonical form, or raises an OptionError.
    """

    help: str = ""
    name: str = ""
    choices: Sequence[str] = ()
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    is_open: bool = False
    default: str = ""
    is_checkpoint: bool = False
    is_location: bool = False
    writes: Literal["", "file", "folder"] = ""
    effect: Effect | Callable[[Any], Effect] = ""
    parse: Callable[[str], str] | None = None

    @property
    def range(self) -> str:
        """The bounds in click's notation: `x>=1`; empty if there are none."""
        lower = "<" if self.is_open else "<="
        if self.maximum is None:
            return "" if self.minimum is None else f"x{'>' if self.is_open else '>='}{self.minimum}"
        return f"x<={self.maximum}" if self.minimum is None else f"{self.minimum}{lower}x<={self.maximum}"


class Address:
    """Base class for addresses of files on other machines."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Any:
        """Parse `text` as an address or a path."""
        raise NotImplementedError


# A field accepts more types than it returns. Type checkers infer that from `__set__` and `__get__`; a default, which
# matches neither, has to be Any.
if TYPE_CHECKING:

    class Converted(Generic[Value, Accepted]):
        """A field that is set to a value of one type, and read as one of another."""

        def __get__(self, instance: object, owner: Any) -> Value: ...
        def __set__(self, instance: object, value: Accepted) -> None: ...

    PathField = Converted[Path, StrPath]
    OptionalPath = Converted[Path | None, StrPath | None]
    NameField = Converted[str, StrPath]  # an id, or a folder
    OptionalName = Converted[str | None, StrPath | None]
    Many = Converted[tuple[T, ...], Iterable[T]]
    ManyTexts = Converted[tuple[str, ...], str | Iterable[str]]  # or a single one
    ManyPaths = Converted[tuple[Path, ...], StrPath | Iterable[StrPath]]
    ManyNames = Converted[tuple[str, ...], Iterable[StrPath]]
else:
    ManyNames = tuple[str, ...]
    PathField, OptionalPath, ManyPaths = Path, Path | None, tuple[Path, ...] | Path
    ManyTexts = tuple[str, ...] | str
    NameField, OptionalName = str, str | None

    class Many:
        """Several values."""

        def __class_getitem__(cls, item: Any) -> Any:
            return tuple[item, ...]


CheckpointName = Annotated[StrPath | None, Option(is_checkpoint=True)]
"""The function argument for an OptionalName field."""

UNSET: Any = None
NOTHING: Any = ()


@dataclass_transform(frozen_default=True)
class Options:
    """Base class of options, which are frozen dataclasses: each value is checked and converted to the field's type.

    A class with rules across several fields adds them in its own `__post_init__`, after this one.

    Raises:
        OptionError: a value has the wrong type, is not among the choices, or is out of range.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        short_repr(dataclass(frozen=True, repr=False, kw_only=kw_only)(cls))

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass, and convert each to its type.

    Raises:
        OptionError: as of `Options`.
    """
    owner: Any = type(record)
    for name, hint in field_hints(owner).items():
        if name in record.__dataclass_fields__:
            object.__setattr__(record, name, check(name, getattr(record, name), hint))


@functools.cache
def field_hints(owner: Any) -> dict[str, Any]:
    """Return the annotated types of the fields of a class."""
    return get_type_hints(owner, include_extras=True)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of each call against the annotations, and convert them accordingly.

    Raises:
        OptionError: as of `Options`.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    hints: dict[str, Any] = {}
    written: list[str] = []

    def taken(name: str, value: Any) -> Any:
        return check(name, value, hints[name]) if name in hints else value

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hints:
            annotations = get_type_hints(function, include_extras=True)
            hints.update((name, annotations[name]) for name in names if name in annotations)
            written.extend(name for name, hint in hints.items() if _option_of(hint).writes)
        positional = [taken(*argument) for argument in zip(names[: code.co_argcount], args, strict=False)]
        named = {name: taken(name, value) for name, value in kwargs.items()}
        called: Any = function
        values = {**dict(zip(names, positional, strict=False)), **named}
        is_job = written or any(isinstance(value, Options) for value in values.values())
        inputs = (path for name, value in values.items() for path in _input_paths(value, hints.get(name)))
        with reading(inputs) if is_job else nullcontext():
            return called(*positional, *args[code.co_argcount :], **named)  # type: ignore[no-any-return]

    return call


def _option_of(hint: Any) -> Option:
    return next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Option)), Option())


def _input_paths(value: Any, hint: Any) -> Iterator[Path]:
    """Yield the paths that are inputs in the checked value of an option or argument, such as an options object."""
    option = _option_of(hint)
    if isinstance(value, Path) and not option.writes:
        yield value
    elif isinstance(value, str) and option.is_checkpoint:
        yield Path(value).expanduser()
    elif isinstance(value, tuple):
        yield from (Path(item).expanduser() for item in value if isinstance(item, Path) or option.is_checkpoint)
    elif isinstance(value, Options):
        owner: Any = type(value)
        for name, annotation in field_hints(owner).items():
            yield from _input_paths(getattr(value, name, None), annotation)


def check(name: str, value: Any, hint: Any) -> Any:
    """Convert `value` to the annotated type `hint`: str to Path, list to tuple, integer to float.

    Raises:
        OptionError: it cannot be converted; the message is the reason, preceded by `name` if given.
    """
    try:
        converted = _converted(value, hint, Option())
    except _RefusedError as error:
        raise _error(name, error) from None
    return _named_items(name, converted) if isinstance(converted, Generator) and converted is not value else converted


def _error(name: str, refused: _RefusedError) -> OptionError:
    return OptionError(f"{name}{refused.place}: {refused.reason}".removeprefix(": "))


def _named_items(name: str, items: Iterable[Any]) -> Iterator[Any]:
    """Yield items, checking each one in turn."""
    try:
        yield from items
    except _RefusedError as error:
        raise _error(name, error) from None


class _RefusedError(Exception):
    """An invalid value.

    Attributes:
        reason: the value, and the valid values.
        place: the index of the list item, as `[0]`.
        is_of_value: whether the value itself is invalid although its type is right.
    """

    def __init__(self, reason: str, place: str = "", *, is_of_value: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place
        self.is_of_value = is_of_value


def _converted(value: Any, hint: Any, option: Option) -> Any:
    while get_origin(hint) is Annotated:
        option = next((item for item in hint.__metadata__ if isinstance(item, Option)), option)
        hint = hint.__origin__
    kinds = _kinds(hint)
    if value is None and NoneType in kinds:
        return None
    kinds = [kind for kind in kinds if kind is not NoneType]
    if option.is_checkpoint:
        kinds = [kind for kind in kinds if get_origin(kind) is tuple] or [str]
    if any(kind is Path or get_origin(kind) is os.PathLike for kind in kinds):  # a str is an Iterable as well
        kinds = [Path, *(kind for kind in kinds if kind not in (str, Path) and get_origin(kind) is not os.PathLike)]
        option = option._replace(is_location=option.is_location or any(map(_is_address, kinds)))
    refusals = []
    for kind in kinds:
        try:
            return _one(value, kind, option, kinds)
        except _RefusedError as error:
            if error.is_of_value:
                raise
            # Its traceback leads to this frame: a cycle that would keep the callers' variables, sessions among them.
            refusals.append(error.with_traceback(None))
    if len(refusals) == 1:
        raise refusals[0]
    raise _refusal(value, " or ".join(dict.fromkeys(map(_called, kinds))))


def _kinds(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (UnionType, Union) else [hint]


def _one(value: Any, kind: Any, option: Option, kinds: Sequence[Any]) -> Any:
    """Convert `value` to one kind of a possible union."""
    origin = get_origin(kind)
    if kind is Any or kind is object:
        return value
    if origin is Annotated:
        return _converted(value, kind, option)
    if kind is Path:
        return _path(value, option, next(filter(_is_address, kinds), None))
    if kind in _SCALARS:
        return _within(_SCALARS[kind](value, option), option)
    if origin is Literal:
        return _within(value, option._replace(choices=get_args(kind)))
    if origin is tuple and get_args(kind)[-1] is not ...:
        parts = _items(value, kind)
        if len(parts) != len(get_args(kind)):
            raise _refusal(value, _called(kind))
        return tuple(_converted(part, hint, option) for part, hint in zip(parts, get_args(kind), strict=True))
    if origin in _SEVERAL:
        return _several(value, kind, option)
    named = origin or kind
    is_class = isinstance(named, type) and not getattr(named, "_is_protocol", False)
    if is_class and not isinstance(
        value, named
    ):  # collections.abc included; anything that is not a class is not checked
        raise _refusal(value, _called(kind))
    return value


def _integer(value: Any, _option: Option) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _refusal(value, _called(int))
    return int(value)


def _number(value: Any, _option: Option) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise _refusal(value, _called(float))
    return float(value)


def _flag(value: Any, _option: Option) -> bool:
    if not isinstance(value, bool) and (str(getattr(value, "dtype", "")) != "bool" or getattr(value, "shape", None)):
        raise _refusal(value, _called(bool))
    return bool(value)


def _string(value: Any, option: Option) -> str:
    if option.is_checkpoint and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or (option.is_checkpoint and not value.strip()):
        raise _refusal(value, "an id or a folder" if option.is_checkpoint else _called(str))
    if option.parse is None:
        return value
    try:
        return option.parse(value)
    except OptionError as error:
        raise _RefusedError(error.message) from None


_SCALARS: dict[Any, Callable[[Any, Option], Any]] = {int: _integer, float: _number, bool: _flag, str: _string}


def _within(value: Any, option: Option) -> Any:
    """Return the value if it is among the choices and within the bounds."""
    if option.choices and value not in option.choices:
        raise _RefusedError(not_a_choice(value, option.choices))
    if isinstance(value, str) or not option.range:
        return value
    lowest, highest = option.minimum, option.maximum
    is_low = lowest is not None and (value <= lowest if option.is_open else value < lowest)
    if is_low or (highest is not None and value > highest):
        raise _RefusedError(f"{value} is not in the range {option.range}.")
    return value


def not_a_choice(value: Any, choices: Sequence[Any]) -> str:
    """Say that `value` is not one of `choices`, and suggest a similar one."""
    from difflib import get_close_matches
    from reprlib import repr as shortened

    names = [str(choice) for choice in choices]
    by_lower, text = {name.lower(): name for name in names}, str(value)[:100].lower()
    begun = [name for name in by_lower if text and name.startswith(text)]
    near = begun[:1] or get_close_matches(text, by_lower, n=1, cutoff=0.5)
    listed = f"{len(names)} values" if near and len(names) > _MOST_LISTED else ", ".join(map(repr, names))
    suggestion = f" Did you mean {by_lower[near[0]]!r}?" if near else ""
    return f"{shortened(value)} is not one of {listed}.{suggestion}"


def _path(value: Any, option: Option, address: type[Address] | None) -> Any:
    if option.is_location and isinstance(value, Address):
        return value
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise _refusal(value, _called(Path))
    if isinstance(value, str) and "://" in text and text.partition("://")[0].isalnum():
        if address is not None:
            return address.parse(text)
        raise _RefusedError(
            f"{text.partition('://')[0]}:// is the address of a store; this option takes a file of this machine"
        )
    path = value if isinstance(value, Path) else Path(text)
    if option.writes == "folder" and path.suffix in _OF_FILES and not (text.endswith("/") or path.is_dir()):
        raise _RefusedError(f"{text} is named like a file, and a folder is written; leave out {path.suffix}")
    return settled(path) if option.writes else path


def settled(output: Path) -> Path:
    """Return an output's path without detours through folders that do not exist, which writing would create."""
    is_detour = ".." in output.parts and not output.parent.exists()
    return Path(os.path.realpath(output)) if is_detour else output


def _several(value: Any, kind: Any, option: Option) -> Any:
    """Check the items of a list; iterators are checked lazily if the kind allows it."""
    item, is_lazy = get_args(kind)[0], get_origin(kind) in _LAZY
    if item is Any and (isinstance(value, Sequence) or is_lazy) and not isinstance(value, _NO_LISTS):
        return value if isinstance(value, Iterable) else _items(value, kind)
    if is_lazy and isinstance(value, Iterator):
        return _checked_items(value, item, option)
    return tuple(_checked_items(_items(value, kind), item, option))


def _checked_items(values: Iterable[Any], hint: Any, option: Option) -> Iterator[Any]:
    takes_any_text = str in _kinds(hint) and option == Option()  # there may be millions
    for number, value in enumerate(values):
        try:
            yield value if takes_any_text and type(value) is str else _converted(value, hint, option)
        except _RefusedError as error:
            raise _RefusedError(error.reason, f"[{number}]{error.place}") from None


def _items(value: Any, kind: Any) -> Sequence[Any]:
    """Return the items of a list, a tuple, an iterator, or a column of NumPy, pandas, Polars or Arrow."""
    if not isinstance(value, _NO_LISTS):
        if isinstance(value, Sequence):
            return value
        for name in ("to_pylist", "to_list", "tolist"):
            if callable(convert := getattr(value, name, None)) and isinstance(items := convert(), list):
                return items
        if isinstance(value, Iterable) and not hasattr(value, "keys"):  # like a table, which yields its column names
            return tuple(value)
    raise _refusal(value, _called(kind))


def _is_address(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Address)


def _called(kind: Any, *, many: bool = False) -> str:
    """Name a kind of value, with its article or in the plural."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated or origin in (UnionType, Union):
        parts = args[:1] if origin is Annotated else [argument for argument in args if argument is not NoneType]
        return " or ".join(dict.fromkeys(_called(part, many=many) for part in parts))
    if origin is tuple and args[-1] is not ...:
        items = " and ".join(dict.fromkeys(_called(argument, many=True) for argument in args))
        return f"{'pairs' if many else 'a pair'} of {items}"
    if origin in _SEVERAL:
        return f"{'lists' if many else 'a list'} of {_called(args[0], many=True)}"
    if (origin or kind) in _NAMES:
        return _NAMES[origin or kind][many]
    name = getattr(origin or kind, "__name__", str(kind)).replace("ndarray", "array")
    return f"{name}s" if many else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _refusal(value: Any, expected: str) -> _RefusedError:
    from reprlib import repr as shortened

    named = "" if isinstance(value, NoneType | bool | int | float | str | bytes) else f" ({type(value).__name__})"
    return _RefusedError(f"{' '.join(shortened(value).split())}{named} is not {expected}", is_of_value=False)


_NAMES: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a finite number", "finite numbers"),
    bool: ("a boolean", "booleans"),
    str: ("a string", "strings"),
    Path: ("a path (str or os.PathLike)", "paths (str or os.PathLike)"),
    Callable: ("a function", "functions"),
}
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, AbstractSet)
_LAZY = (Iterable, Iterator)
_SEVERAL = (tuple, list, Sequence, *_LAZY)


Force = Annotated[bool, Option("Replace an existing output.", effect="replace")]
