"""Options and arguments: how they are declared, and the one check of their values, from wherever they come.

`threads: Annotated[int, Option("Intra-op threads.", minimum=0)] = 0` in a class of `Options` is `--threads` of every
command that makes the call, where `onnxtool.cli.options` reads the fields. Several classes share an option by sharing
the annotated type. What the type and the `Option` say is what is checked: by `Options` when an object is made, by
`checked` when a function is called, and by the command line when it has parsed a word.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
from onnxtool.reports import short_repr

if TYPE_CHECKING:
    from dataclasses import Field

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

StrPath = str | os.PathLike[str]
_MOST_LISTED = 10  # choices, where one of them looks like what was written


class Option(NamedTuple):
    """What is said of a field or an argument beyond its type and its default.

    Attributes:
        help: what the option does; empty for what no command line has.
        name: the option's name without dashes, where it is not the field's.
        choices: all values that it takes; of a list, that each item takes, and so are the bounds.
        metavar: what stands for the value in the help.
        minimum: the least value; with `is_open`, what the value must be above.
        maximum: the largest value.
        default: what happens without the option, where the field's default does not say so itself.
        is_checkpoint: whether it names a checkpoint, which shells complete; a folder may be a path.
        is_location: whether a path may also be the address of an object store.
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

    @property
    def range(self) -> str:
        """The bounds, as click writes them: `x>=1`; empty where there are none."""
        lower = "<" if self.is_open else "<="
        if self.maximum is None:
            return "" if self.minimum is None else f"x{'>' if self.is_open else '>='}{self.minimum}"
        return f"x<={self.maximum}" if self.minimum is None else f"{self.minimum}{lower}x<={self.maximum}"


class Address:
    """The base of what names a file outside this machine."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Any:
        """Return the address or the path that `text` is."""
        raise NotImplementedError


# What a field is set to is more than what it is read as. Type checkers take that from `__set__` and `__get__`, and a
# default, which is none of these, has to be Any.
if TYPE_CHECKING:

    class PathField:
        """A path: set to a str or os.PathLike, read as a Path."""

        def __get__(self, instance: object, owner: Any) -> Path: ...
        def __set__(self, instance: object, value: StrPath) -> None: ...

    class OptionalPath:
        """A path, or None."""

        def __get__(self, instance: object, owner: Any) -> Path | None: ...
        def __set__(self, instance: object, value: StrPath | None) -> None: ...

    class NameField:
        """An id, or a folder: set to a str or os.PathLike, read as a str."""

        def __get__(self, instance: object, owner: Any) -> str: ...
        def __set__(self, instance: object, value: StrPath) -> None: ...

    class OptionalName:
        """An id or a folder, or None."""

        def __get__(self, instance: object, owner: Any) -> str | None: ...
        def __set__(self, instance: object, value: StrPath | None) -> None: ...

    class Many(Generic[T]):
        """Several values: set to any sequence, read as a tuple."""

        def __get__(self, instance: object, owner: Any) -> tuple[T, ...]: ...
        def __set__(self, instance: object, value: Iterable[T]) -> None: ...

    class ManyTexts:
        """Several texts, or one: read as a tuple of them."""

        def __get__(self, instance: object, owner: Any) -> tuple[str, ...]: ...
        def __set__(self, instance: object, value: str | Iterable[str]) -> None: ...

    class ManyPaths:
        """Several paths, or one: read as a tuple of them."""

        def __get__(self, instance: object, owner: Any) -> tuple[Path, ...]: ...
        def __set__(self, instance: object, value: StrPath | Iterable[StrPath]) -> None: ...

else:
    PathField, OptionalPath, ManyPaths = Path, Path | None, tuple[Path, ...] | Path
    ManyTexts = tuple[str, ...] | str
    NameField, OptionalName = str, str | None

    class Many:
        """Several values."""

        def __class_getitem__(cls, item: Any) -> Any:
            return tuple[item, ...]


CheckpointName = Annotated[StrPath | None, Option(is_checkpoint=True)]
"""The argument of a call, of which the field is an OptionalName."""

UNSET: Any = None
NOTHING: Any = ()


@dataclass_transform(frozen_default=True)
class Options:
    """The base of options classes, which are frozen dataclasses: each value is checked, and made of the field's type.

    A class that has rules for several fields together adds them in its own `__post_init__`, after this one.

    Raises:
        OptionError: a value is of another type, not among the choices, or out of range.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, *, kw_only: bool = False) -> None:
        from dataclasses import dataclass  # with the code that reads sources, which `stats` does without

        short_repr(dataclass(frozen=True, repr=False, kw_only=kw_only)(cls))

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(made: Any) -> None:
    """Check the fields of a dataclass, and set each to what its type says.

    Raises:
        OptionError: as of `Options`.
    """
    owner: Any = type(made)
    for name, hint in field_hints(owner).items():
        if name in made.__dataclass_fields__:
            object.__setattr__(made, name, check(name, getattr(made, name), hint))


@functools.cache
def field_hints(owner: Any) -> dict[str, Any]:
    """Return the annotated types of the fields of a class."""
    return get_type_hints(owner, include_extras=True)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of each call against the annotations, and hand them on as these say.

    Raises:
        OptionError: as of `Options`.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    hints: dict[str, Any] = {}

    def taken(name: str, value: Any) -> Any:
        return check(name, value, hints[name]) if name in hints else value

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not hints:
            found = get_type_hints(function, include_extras=True)
            hints.update((name, found[name]) for name in names if name in found)
        positional = [taken(*one) for one in zip(names[: code.co_argcount], args, strict=False)]
        named = {name: taken(name, value) for name, value in kwargs.items()}
        given: Any = function
        return given(*positional, *args[code.co_argcount :], **named)  # type: ignore[no-any-return]

    return call


def check(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type `hint` says: a Path of a str, a tuple of a list, a float of an integer.

    Raises:
        OptionError: it is none, with `name` before the reason; for no name, the reason alone.
    """
    try:
        converted = _converted(value, hint, Option())
    except _RefusedError as error:
        raise _error(name, error) from None
    return _named_items(name, converted) if isinstance(converted, Generator) and converted is not value else converted


def _error(name: str, refused: _RefusedError) -> OptionError:
    return OptionError(f"{name}{refused.place}: {refused.reason}".removeprefix(": "))


def _named_items(name: str, items: Iterable[Any]) -> Iterator[Any]:
    """Yield items that are checked as they come."""
    try:
        yield from items
    except _RefusedError as error:
        raise _error(name, error) from None


class _RefusedError(Exception):
    """A value that is not taken.

    Attributes:
        reason: the value, and what is taken.
        place: which item of a list it is, as `[0]`.
        is_of_value: whether it is of the right type all the same.
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
        kinds = [str]
    if any(kind is Path or get_origin(kind) is os.PathLike for kind in kinds):  # of which a str is one, then
        kinds = [Path, *(kind for kind in kinds if kind not in (str, Path) and get_origin(kind) is not os.PathLike)]
        option = option._replace(is_location=option.is_location or any(map(_is_address, kinds)))
    refusals = []
    for kind in kinds:
        try:
            return _one(value, kind, option, kinds)
        except _RefusedError as error:
            if error.is_of_value:
                raise
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    raise _refusal(value, " or ".join(dict.fromkeys(map(_called, kinds))))


def _kinds(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (UnionType, Union) else [hint]


def _one(value: Any, kind: Any, option: Option, kinds: Sequence[Any]) -> Any:
    """Return `value` as one kind, which may stand among others."""
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
    if is_class and not isinstance(value, named):  # of collections.abc as well; what is no class is not checked
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
    return value


_SCALARS: dict[Any, Callable[[Any, Option], Any]] = {int: _integer, float: _number, bool: _flag, str: _string}


def _within(value: Any, option: Option) -> Any:
    """Return a value that is among the choices and between the bounds."""
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
    """Say that `value` is none of `choices`, and which of them looks like it."""
    from difflib import get_close_matches
    from reprlib import repr as shortened

    names = [str(choice) for choice in choices]
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    listed = f"{len(names)} values" if near and len(names) > _MOST_LISTED else ", ".join(map(repr, names))
    suggestion = f" Did you mean {near[0]!r}?" if near else ""
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
    return value if isinstance(value, Path) else Path(text)


def _several(value: Any, kind: Any, option: Option) -> Any:
    """Check the items of a list; those of an iterator come one by one where the kind allows that."""
    item, is_lazy = get_args(kind)[0], get_origin(kind) in _LAZY
    if item is Any and (isinstance(value, Sequence) or is_lazy) and not isinstance(value, _NO_LISTS):
        return value if isinstance(value, Iterable) else _items(value, kind)
    if is_lazy and isinstance(value, Iterator):
        return _checked_items(value, item, option)
    return tuple(_checked_items(_items(value, kind), item, option))


def _checked_items(values: Iterable[Any], hint: Any, option: Option) -> Iterator[Any]:
    takes_any_text = str in _kinds(hint) and option == Option()  # of which there may be millions
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
        if isinstance(value, Iterable) and not hasattr(value, "keys"):  # as a table has, which gives its columns' names
            return tuple(value)
    raise _refusal(value, _called(kind))


def _is_address(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Address)


def _called(kind: Any, *, many: bool = False) -> str:
    """Say what a kind of value is called, with its article or in the plural."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated or origin in (UnionType, Union):
        parts = args[:1] if origin is Annotated else [one for one in args if one is not NoneType]
        return " or ".join(dict.fromkeys(_called(one, many=many) for one in parts))
    if origin is tuple and args[-1] is not ...:
        items = " and ".join(dict.fromkeys(_called(one, many=True) for one in args))
        return f"{'pairs' if many else 'a pair'} of {items}"
    if origin in _SEVERAL:
        return f"{'lists' if many else 'a list'} of {_called(args[0], many=True)}"
    if (origin or kind) in _NAMES:
        return _NAMES[origin or kind][many]
    name = getattr(origin or kind, "__name__", str(kind)).replace("ndarray", "array")
    return f"{name}s" if many else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _refusal(value: Any, wanted: str) -> _RefusedError:
    from reprlib import repr as shortened

    named = "" if isinstance(value, NoneType | bool | int | float | str | bytes) else f" ({type(value).__name__})"
    return _RefusedError(f"{' '.join(shortened(value).split())}{named} is not {wanted}", is_of_value=False)


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


Force = Annotated[bool, Option("Replace an output that exists.")]
