"""Run a chat template: a program in Jinja's language that came with a checkpoint, and may do harm.

The environment is that of transformers 5.23 (transformers.utils.chat_template_utils), which is sandboxed: no access to
Python, no changes to what is passed in. Beside it, steps, time and sizes are bounded here, because the sandbox lets a
template loop over ten thousand million numbers, or ask for a text as large as the memory.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MOST_STEPS = 100_000  # rounds of loops, and calls: as many as the numbers of a range in the sandbox
_MOST_SECONDS = 5.0
_MOST_CHARACTERS = 1_000_000  # beside so many times those of the texts
_GROWTH = 16
_MOST_COPIES = 100  # of so many characters, within a single function
_MOST_BITS = 10_000  # of a number
# Bounds in names of this module, which no template can call.
_BOUNDED_LOOP, _BOUNDED_JOIN = "onnxtool bounded loop", "onnxtool bounded join"
_WIDE = re.compile(r"\d{6,}")
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{6,})")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


@dataclass
class _Allowance:
    """What is left of the bounds of one run."""

    steps: int
    characters: int
    deadline: float

    def spend_step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateRuntimeError(f"it takes more than {_MOST_STEPS} steps")
        if time.monotonic() > self.deadline:
            raise TemplateRuntimeError(f"it runs longer than {_MOST_SECONDS:g} seconds")

    def require_size(self, size: int) -> None:
        if size > self.characters:
            raise TemplateRuntimeError(f"it makes a value of more than {self.characters} characters or items")


_allowance: ContextVar[_Allowance] = ContextVar("_allowance")


@contextmanager
def _bounds(num_characters: int = 0) -> Iterator[_Allowance]:
    most = _MOST_CHARACTERS + _GROWTH * num_characters
    allowance = _Allowance(_MOST_STEPS, most, time.monotonic() + _MOST_SECONDS)
    token = _allowance.set(allowance)
    try:
        yield allowance
    finally:
        _allowance.reset(token)


@pass_context  # a filter of the context is never run while a template is compiled
def _bounded_loop(_context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, a step each."""
    for item in items:
        _allowance.get().spend_step()
        yield item


def _join(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    _allowance.get().require_size(sum(map(len, pieces)))
    return "".join(pieces)


@pass_context
def _bounded_join(_context: Context, pieces: Sequence[Any]) -> str:
    return _join(map(str, pieces))


def _require_small(*values: Any) -> None:
    """Refuse what a function is called with where its result could be huge: a width, or many copies of a long text."""
    allowance = _allowance.get()
    sizes = sorted(map(_size, values), reverse=True)
    allowance.require_size(max(sizes, default=0))
    if len(sizes) > 1:  # as of replace and join, one for each character of the other
        allowance.require_size(sizes[0] * sizes[1] // _MOST_COPIES)


def _size(value: Any) -> int:
    """Return how large a value is: characters of a text, and of all texts in a list; a number itself.

    What is not known before it is made counts as the most steps.
    """
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return len(value) + sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return len(value) + sum(len(item) for item in value if isinstance(item, str))
    if isinstance(value, Iterator):
        return _MOST_STEPS
    return len(value) if isinstance(value, range) else 0


def _counted(items: Iterator[Any]) -> Iterator[Any]:
    """Yield what a filter makes for another, a step each, while all together are small."""
    allowance, size = _allowance.get(), 0
    for item in items:
        allowance.spend_step()
        size += len(item) if isinstance(item, str) else 0
        allowance.require_size(size)
        yield item


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _allowance.get().require_size(len(value))
    return value


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _require_small(*args, *kwargs.values())
        counted = [_counted(value) if isinstance(value, Iterator) else value for value in args]
        return _checked(function(*counted, **kwargs))

    return bounded


def _bounded_format(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(text: Any, *args: Any, **kwargs: Any) -> Any:
        _require_plain_percent(text)
        return _checked(function(text, *args, **kwargs))

    return bounded


def _require_plain_percent(text: Any) -> None:
    if _PERCENT_WIDTH.search(str(text)):
        raise SecurityError("a format asks for a width that is not small")


class _Generation(Extension):
    """The block `generation`, by which transformers finds what an assistant said; it renders what is in it."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """What `dict` is in a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """What `namespace` is in a template: without names of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As Jinja's own, so that `namespace(self=...)` works.
        self, positional = args[0], args[1:]
        values = dict(*positional, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        Namespace.__setitem__(self, name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _raise(message: Any) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON without escapes for HTML, which Jinja's own filter has."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005  the local time, as in transformers


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers, with bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_join)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(function) for name, function in self.filters.items()}
        self.filters["format"] = _bounded_format(self.filters["format"])
        self.filters[_BOUNDED_LOOP], self.filters[_BOUNDED_JOIN] = _bounded_loop, _bounded_join
        del self.globals["lipsum"]  # random words
        self.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, and let each loop and each concatenation count."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = self._filtered(_BOUNDED_LOOP, loop.iter)
        _replace_concatenations(tree, lambda node: self._filtered(_BOUNDED_JOIN, nodes.List(node.nodes)))
        return tree

    def _filtered(self, name: str, value: Any) -> nodes.Filter:
        node = nodes.Filter(value, name, [], [], None, None)
        node.set_environment(self).set_lineno(value.lineno or 1)
        return node

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function as a step, with small numbers alone; what a recursive loop is called with counts too."""
        _allowance.get().spend_step()
        _require_small(*args, *kwargs.values(), getattr(function, "__self__", None))
        if isinstance(function, LoopContext):
            args = tuple(_bounded_loop(context, items) for items in args)
        return _checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what cannot become large."""
        allowance = _allowance.get()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and isinstance(other, str | list | tuple):
                    allowance.require_size(one * len(other))
        if operator == "%" and isinstance(left, str):
            _require_plain_percent(left)
            _require_small(*(right if isinstance(right, tuple) else (right,)))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
            if bits > _MOST_BITS:
                raise TemplateRuntimeError("it makes a number of thousands of digits")
        return _checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse formats of large widths, and of widths that are values."""
        wrapped = super().wrap_str_format(value)
        text = str(getattr(value, "__self__", ""))
        if wrapped is not None and (_WIDE.search(text) or _NESTED_FIELD.search(text)):
            raise SecurityError("a format asks for a width that is not small")
        return wrapped


def _replace_concatenations(node: nodes.Node, replace: Callable[[nodes.Concat], nodes.Node]) -> None:
    """Replace each `a ~ b` below `node`."""
    for name, value in list(node.iter_fields()):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, nodes.Node):
                _replace_concatenations(child, replace)
        if isinstance(value, list):
            value[:] = [replace(child) if isinstance(child, nodes.Concat) else child for child in value]
        elif isinstance(value, nodes.Concat):
            setattr(node, name, replace(value))


class SandboxedTemplate:
    """A template that is compiled; threads may share it."""

    def __init__(self, source: str) -> None:
        """Compile `source`.

        Raises:
            Exception: whatever Jinja says of it.
        """
        self._environment = _Environment()
        with _bounds():
            self._template = self._environment.from_string(source)
            self.variables = find_undeclared_variables(self._environment.parse(source))

    def render(self, variables: Mapping[str, Any], num_characters: int) -> str:
        """Run it.

        Args:
            variables: what it may read: JSON's types alone.
            num_characters: those of the texts among them, by which the size of what it makes is bounded.

        Raises:
            Exception: whatever it does wrong, as Jinja's or Python's own, or TemplateError where a bound is reached.
        """
        with _bounds(num_characters) as allowance:
            pieces, size = [], 0
            for piece in self._template.generate(variables):
                size += len(piece)
                allowance.require_size(size)
                allowance.spend_step()
                pieces.append(piece)
            return "".join(pieces)
