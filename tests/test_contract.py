"""Every option and argument of the public names, tried with values that it does not take.

Made from signatures, fields and type hints alone, so that an option that is added is tried without a change here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from unittest.mock import Mock

import click
import pytest

import onnxtool
from onnxtool.cli.commands import RUNNABLE
from onnxtool.cli.entry import find_command, main
from onnxtool.cli.options import FieldOption
from onnxtool.errors import OnnxtoolError
from onnxtool.options import Option, Options, check

# Of each class of values some that another option may take, and this one must not.
POOL: tuple[Any, ...] = (
    *(object(), b"bytes", {"a": 1}, {"a"}, [None], [b"x"], 3.5, True, float("nan"), float("inf"), None),
    *("misspelled", "", -7, 7, 10**12, ["a"], ("a", "b"), Path("a"), len, int),
)
# Called for each batch, with arrays of our own; and by what has checked the plan.
_OF_BATCHES = ("concatenate", "from_dense", "of_entries", "stack", "take", "without")
INTERNAL = ("onnxtool.encoding.options.CorpusProgress.time_left_s",)
FREE = (Any, object, inspect.Parameter.empty)  # nothing is said of these


class Case(NamedTuple):
    """An argument of a call, with a value that it does not take."""

    label: str
    call: Callable[..., Any]
    name: str
    value: Any
    others: dict[str, Any]


def public_modules() -> Iterator[Any]:
    yield onnxtool
    for found in pkgutil.walk_packages(onnxtool.__path__, "onnxtool."):
        if found.ispkg and not any(part in found.name for part in (".cli", ".rules", ".onnxblock")):
            module = importlib.import_module(found.name)
            if hasattr(module, "__all__"):
                yield module


def public_calls() -> dict[str, tuple[Callable[..., Any], bool]]:
    """Return functions, constructors and methods by their name, and whether the first argument is the object."""
    calls: dict[str, tuple[Callable[..., Any], bool]] = {}
    for module in public_modules():
        for name in module.__all__:
            thing = getattr(module, name)
            label = f"{getattr(thing, '__module__', '')}.{name}"
            if inspect.isfunction(thing):
                calls[label] = (thing, False)
            elif inspect.isclass(thing) and not issubclass(thing, BaseException):
                calls.update(class_calls(label, thing))
    for label in INTERNAL:
        del calls[label]
    return {label: call for label, call in calls.items() if not label.endswith(_OF_BATCHES)}


def class_calls(label: str, owner: type) -> Iterator[tuple[str, tuple[Callable[..., Any], bool]]]:
    if issubclass(owner, Options):
        yield label, (owner, False)
    for name, method in vars(owner).items():
        function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        is_public = not name.startswith("_") or (name == "__init__" and "__dataclass_fields__" not in vars(owner))
        if is_public and inspect.isfunction(function) and function.__module__.startswith("onnxtool"):
            yield f"{label}.{name}", (function, not isinstance(method, staticmethod))


def parameters_of(call: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each argument, and whether it is required."""
    if inspect.isclass(call):
        hints = get_type_hints(call, include_extras=True)
        return {one.name: (hints[one.name], one.default is MISSING) for one in fields(call)}  # type: ignore[arg-type]
    hints = get_type_hints(inspect.unwrap(call), include_extras=True)
    starred = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name: (hints.get(name, Any), one.default is inspect.Parameter.empty)
        for name, one in inspect.signature(call).parameters.items()
        if one.kind not in starred
    }


def flattened(hint: Any, option: Option = Option()) -> list[tuple[Any, Option]]:  # noqa: B008  a constant
    """Return the kinds of values of a type, each with what is said of it."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        return flattened(inner, next((mark for mark in marks if isinstance(mark, Option)), option))
    if get_origin(hint) in (UnionType, Union):
        return [pair for kind in get_args(hint) for pair in flattened(kind, option)]
    return [(hint, option)]


def is_taken(value: Any, kind: Any, option: Option) -> bool:
    """Say whether a kind of values has this one; told from the types alone, and roughly: in doubt it does."""
    origin = get_origin(kind) or kind
    if origin in FREE or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return origin is not Literal or value in get_args(kind)
    if origin is NoneType:
        return value is None
    if option.choices and isinstance(value, str):
        return value in option.choices
    if isinstance(value, bool) or origin is bool:
        return isinstance(value, bool) and issubclass(bool, origin) and origin is not int
    if issubclass(origin, os.PathLike) or (origin is str and option.is_checkpoint):
        return isinstance(value, os.PathLike) or (isinstance(value, str) and bool(value))
    if origin in (int, float):
        is_number = isinstance(value, int if origin is int else int | float) and abs(value) < float("inf")
        low, high = option.minimum, option.maximum
        is_low = low is not None and is_number and (value <= low if option.is_open else value < low)
        return is_number and not is_low and not (high is not None and value > high)
    if issubclass(origin, Mapping) or origin is str:
        return isinstance(value, origin)
    if origin in (tuple, list) or (origin.__module__ == "collections.abc" and origin.__name__ != "Callable"):
        if isinstance(value, str | bytes | Mapping | set | type(None)) or not hasattr(value, "__iter__"):
            return False
        if origin is tuple and ... not in get_args(kind) and len(value) != len(get_args(kind)):
            return False
        items = flattened(get_args(kind)[0], option)
        return all(any(is_taken(item, *one) for one in items) for item in value)
    return isinstance(value, origin)


def wrong_values(hint: Any) -> Iterator[Any]:
    kinds = flattened(hint)
    edges: list[Any] = []
    for kind, option in kinds:
        if option.choices:
            edges += [f"{option.choices[0]}x", option.choices[0].upper(), option.choices[-1][:-1] or "?"]
        if option.minimum is not None and kind in (int, float):
            edges += [option.minimum - 1, *([option.minimum] if option.is_open else [])]
        if option.maximum is not None and kind in (int, float):
            edges += [option.maximum + 1]
    for value in (*POOL, *edges):
        if not any(is_taken(value, *one) for one in kinds):
            yield value


def right_value(hint: Any) -> Any:
    """Return a value that an argument takes, for calls in which another one is tried."""
    (kind, option), *_ = flattened(hint)
    origin: Any = get_origin(kind) or kind
    if option.choices:
        return option.choices[0]
    if origin in (tuple, list) or getattr(origin, "__module__", "") == "collections.abc":
        if origin.__name__ == "Callable":
            return len
        return {} if issubclass(origin, Mapping) else (right_value(get_args(kind)[0]),)
    plain = {int: int(option.minimum or 1), float: float(option.minimum or 1), bool: False, str: "a"}
    if origin in plain:
        return plain[origin]
    if not isinstance(origin, type) or origin in FREE:
        return None
    if issubclass(origin, os.PathLike):
        return "no/such/folder" if option.writes == "folder" else "no/such/file.onnx"
    if issubclass(origin, Options):
        return origin(**{name: right_value(one) for name, (one, needed) in parameters_of(origin).items() if needed})
    if hasattr(origin, "_fields"):
        named: Any = origin
        return named._make([None] * len(named._fields))
    return object.__new__(origin) if origin.__new__ is object.__new__ else Mock(spec=origin)


def cases() -> Iterator[Case]:
    for label, (call, is_method) in public_calls().items():
        taken = parameters_of(call)
        if is_method:
            taken.pop(next(iter(taken)))
        others = {name: right_value(hint) for name, (hint, needed) in taken.items() if needed}
        for name, (hint, _) in taken.items():
            for value in wrong_values(hint):
                yield Case(f"{label}({name}={value!r:.40})", call, name, value, others)


def test_every_option_and_argument_refuses_what_it_does_not_take() -> None:
    """With an error of onnxtool that names the argument, before anything is read."""
    found = []
    tried: set[str] = set()
    for case in cases():
        arguments = {**case.others, case.name: case.value}
        is_method = next(iter(inspect.signature(case.call).parameters)) in ("self", "cls")
        tried.add(f"{case.label.partition('(')[0]}({case.name})")
        try:
            case.call(*([object()] if is_method else []), **arguments)
        except OnnxtoolError as error:
            if not error.message.startswith(case.name):
                found.append(f"{case.label}: {error.message}")
        except Exception as error:  # noqa: BLE001  any other is what this looks for
            found.append(f"{case.label}: {type(error).__name__}: {error}")
        else:
            found.append(f"{case.label}: taken")
    assert not found, "\n".join(found)
    assert len(tried) > 300


def wrong_options() -> Iterator[tuple[str, FieldOption, Any]]:
    """Return options of commands with a value that is not among their choices, or out of range."""
    for name in RUNNABLE:
        for option in find_command(name).params:
            if isinstance(option, FieldOption):
                for value in wrong_values(option.hint):
                    is_number = isinstance(value, int | float) and not isinstance(value, bool)
                    described = option.field.described
                    if (is_number and option.field.type in (int, float) and abs(value) < 1e12 and described.range) or (
                        isinstance(value, str) and described.choices
                    ):
                        yield name, option, value


def test_commands_and_files_say_the_same_as_a_call(tmp_path: Path) -> None:
    """A word on the command line and a value in TOML are checked by the field itself."""
    tried = 0
    config = tmp_path / "options.toml"
    for name, option, value in wrong_options():
        with pytest.raises(OnnxtoolError) as called:
            check("", value, option.hint)
        field = option.opts[0].removeprefix("--")
        config.write_text(f"[{name.replace(' ', '_')}]\n{field} = {value!r}\n")
        group = click.Context(main, info_name="onnxtool")
        outer = click.Context(main, info_name=name.split()[0], parent=group) if " " in name else group
        ways = [["--config", str(config)]]
        if not (option.field.type is int and isinstance(value, float)):  # which the parser of words refuses
            ways.append([option.opts[0], str(value)])
        for words in ways:
            with pytest.raises(click.UsageError) as printed:
                find_command(name).make_context(name.split()[-1], words, parent=outer)
            said = str(called.value).replace(f"{value} is", "")
            assert said.partition("is not")[2] in printed.value.message, (name, words, printed.value.message)
        tried += 1
    assert tried > 100
