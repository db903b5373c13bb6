"""Gates: conditions on the figures of a report, such as `num_nodes>500`, that fail a command when they are met.

    gate      = figure operator threshold | figure ( "==" | "!=" ) text
    figure    = path | "count" "(" path ")"
    path      = name { "." name }
    name      = a run of characters other than . < > = ! ( ) " | a text in double quotes
    operator  = ">" | ">=" | "<" | "<=" | "==" | "!="
    threshold = [ "+" | "-" ] digits [ "." digits ] [ "%" | "kB" | "MB" | "GB" | "KiB" | "MiB" | "GiB" ]
    text      = a text in double quotes | a run of characters without them that is no threshold

A path leads to a number in the JSON form of the report, e.g. `num_nodes`, `ops.MatMul`, `inputs.0.shape.1`; an operator
or dtype that a report does not count is 0, unless the report has it in a different case. `count(...)` is the number of
entries of an object or an array, e.g. `count(delta.inputs.removed)`.

A threshold with a sign is relative to the same figure of a base: `num_nodes>+10` is met by more than ten nodes above
the base, `size_bytes>+5%` by an increase of more than five percent. Spaces between the parts do not matter.

Texts, as in `license!=apache-2.0`, are compared without regard to case.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from onnxtool.errors import GateError
from onnxtool.model_file.wire import DTYPE_NAMES
from onnxtool.reports import Json

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_OF_TEXTS = ("==", "!=")
_COUNT = "count"
_MAX_DIGITS = 30
_SPACES = " \t"
_NAME = r'(?:"[^"]*"|[^.<>=!()"]*)'
_PATH = re.compile(rf"{_NAME}(?:\.{_NAME})*")
_DECIMAL = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_SYNTAX_HINT = "write e.g. 'num_nodes>500', or 'size_bytes>+5%' against a base, in quotes: the shell reads > and !"


class Gate(NamedTuple):
    """A parsed gate.

    Attributes:
        expression: the gate as written.
        figure: the path to the figure, or `count(path)`.
        amount: the threshold without its sign; 5% is 0.05.
        sign: 1 or -1 for a threshold relative to the base, 0 for an absolute one.
        is_percentage: whether the amount is a fraction of the base's figure.
    """

    expression: str
    figure: str
    operator: str
    amount: Fraction
    sign: int = 0
    is_percentage: bool = False


class TextGate(NamedTuple):
    """A parsed gate on a text of the report; `operator` is == or !=."""

    expression: str
    figure: str
    operator: str
    text: str


class TextGateResult(NamedTuple):
    """Whether a gate was met, and the text that it was compared with."""

    gate: TextGate
    met: bool
    value: str

    def __str__(self) -> str:
        return f"{self.gate.figure} is {self.value or 'empty'}, fails if {self.gate.expression}"


class GateResult(NamedTuple):
    """Whether a gate was met, with the figure and the resulting threshold.

    Attributes:
        base_value: the figure of the base; None for an absolute threshold.
    """

    gate: Gate
    met: bool
    value: Fraction
    threshold: Fraction
    base_value: Fraction | None = None

    def __str__(self) -> str:
        stated, fails = f"{self.gate.figure} is {_format(self.value)}", f"fails if {self.gate.expression}"
        if self.base_value is None:
            return f"{stated}, {fails}"
        return f"{stated}, {_format(self.base_value)} in the base, {fails}: a threshold of {_format(self.threshold)}"


def parse_gate(expression: str) -> Gate:
    """Parse a gate expression.

    Raises:
        GateError: the expression does not follow the grammar; the message says what is wrong and where.
    """
    figure, end = _read_figure(expression)
    start = _end_of(expression, end, _SPACES)
    end = _end_of(expression, start, "<>=!")
    symbol = expression[start:end]
    if not symbol:
        context = f"after {figure!r}" if start == len(expression) else f"but {expression[start]!r}"
        raise _malformed(expression, f"no comparison {context}", start)
    if symbol not in OPERATORS:
        raise _malformed(expression, f"no operator {symbol}", start, f"use one of {' '.join(OPERATORS)}")
    start = _end_of(expression, end, _SPACES)
    sign = {"+": 1, "-": -1}.get(expression[start : start + 1], 0)
    digits_start = _end_of(expression, start + abs(sign), _SPACES)
    end = _end_of(expression, digits_start, "0123456789.")
    digits = expression[digits_start:end]
    if not _DECIMAL.fullmatch(digits) or len(digits) > _MAX_DIGITS:
        raise _malformed(expression, f"{expression[start:]!r} is not a threshold", digits_start)
    unit_start = _end_of(expression, end, _SPACES)
    unit = expression[unit_start:].rstrip()
    if unit == "%" and not sign:
        hint = f"write {figure}{symbol}+{digits}% to add to the base"
        raise _malformed(expression, "a percentage needs a sign", start, hint)
    if unit != "%" and unit not in _UNITS:
        hint = f"use one of {' '.join(['%', *filter(None, _UNITS)])}, or none"
        raise _malformed(expression, f"{unit!r} is not a unit of a threshold", unit_start, hint)
    amount = Fraction(digits) / 100 if unit == "%" else Fraction(digits) * _UNITS[unit]
    return Gate(expression, figure, symbol, amount, sign, unit == "%")


def parse_any_gate(expression: str) -> Gate | TextGate:
    """Parse a gate on a number or on a text.

    Raises:
        GateError: the expression does not follow the grammar.
    """
    try:
        return parse_gate(expression)
    except GateError as error:
        figure, end = _read_figure(expression)
        start = _end_of(expression, end, _SPACES)
        symbol = expression[start : start + 2]
        quoted = expression[start + 2 :].strip(_SPACES)
        text = quoted[1:-1] if len(quoted) > 1 and quoted[0] == quoted[-1] == '"' else quoted
        if symbol not in _OF_TEXTS or not quoted or quoted[0] in "<>=!" or '"' in text or not text.isprintable():
            raise error from None
        return TextGate(expression, figure, symbol, text)


def _read_figure(text: str) -> tuple[str, int]:
    """Return the figure at the start of a gate, and the position where it ends."""
    path, end = _read_path(text, 0)
    if path != _COUNT or text[end : end + 1] != "(":
        return path, end
    path, end = _read_path(text, end + 1)
    end = _end_of(text, end, _SPACES)
    if text[end : end + 1] != ")":
        raise _malformed(text, "no closing parenthesis of count(", end)
    return f"{_COUNT}({path})", end + 1


def _read_path(text: str, position: int) -> tuple[str, int]:
    start = _end_of(text, position, _SPACES)
    match = _PATH.match(text, start)
    end = match.end() if match else start
    if text[end : end + 1] == '"' and (end == start or text[end - 1] == "."):
        raise _malformed(text, "no closing quote", end)
    path = text[start:end].replace('"', "").strip()
    if not path:
        raise _malformed(text, "no figure to compare", start)
    return path, end


def _end_of(text: str, position: int, characters: str) -> int:
    """Return the position after the run of `characters` at `position`."""
    return len(text) - len(text[position:].lstrip(characters))


def _malformed(text: str, reason: str, position: int, hint: str = _SYNTAX_HINT) -> GateError:
    message = f"{reason}, at character {position + 1} of the gate {text!r}"
    if text.isprintable():
        message += f"\n  {text}\n  {' ' * position}^"
    return GateError(message, hint)


def check_gates(gates: Sequence[Gate], report: Json, base: Json = None) -> tuple[GateResult, ...]:
    """Compare the figures of `report`, in its JSON form, with each gate.

    Args:
        gates: the gates to check, in the order of the results.
        report: an object from `to_json`.
        base: the report that relative thresholds refer to.

    Raises:
        GateError: a gate names no figure in the report, or is relative and there is no base, or the base lacks the
            figure.
    """
    return tuple(_check(gate, report, base) for gate in gates)


def check_any_gates(
    gates: Sequence[Gate | TextGate], report: Json, base: Json = None
) -> tuple[GateResult | TextGateResult, ...]:
    """Compare the figures and the texts of `report` with each gate; see `check_gates`.

    Raises:
        GateError: see `check_gates`; or a gate names no text in the report.
    """
    texts = dict(_texts(report))
    return tuple(
        _check_text(gate, report, texts)
        if isinstance(gate, TextGate) or gate.figure in texts
        else _check(gate, report, base)
        for gate in gates
    )


def _check_text(gate: Gate | TextGate, report: Json, texts: Mapping[str, str]) -> TextGateResult:
    if isinstance(gate, Gate):
        raise GateError(
            f"{gate.figure} is a text, and the gate {gate.expression!r} compares a number",
            f'compare it with == or != and a text in quotes: {gate.figure}!="…"',
        )
    if gate.figure not in texts:
        numbers = dict(_figures(report))
        if gate.figure in numbers:
            parse_gate(gate.expression)  # which raises an error that explains the number
        meant = _similar(gate.figure, [*texts, *numbers])
        raise GateError(
            f"the report has no text {gate.figure!r} (gate {gate.expression!r})", _name_figures(meant, texts)
        )
    value = texts[gate.figure]
    return TextGateResult(gate, OPERATORS[gate.operator](value.casefold(), gate.text.casefold()), value)


def _check(gate: Gate, report: Json, base: Json) -> GateResult:
    value = _look_up(gate, report, "report")
    threshold, base_value = gate.amount, None
    if gate.sign:
        if base is None:
            raise GateError(
                f"the gate {gate.expression!r} is relative, and there is no base",
                "name what to compare with as well, or write the threshold without a sign",
            )
        base_value = _look_up(gate, base, "base")
        growth = gate.amount * abs(base_value) if gate.is_percentage else gate.amount
        threshold = base_value + gate.sign * growth
    return GateResult(gate, OPERATORS[gate.operator](value, threshold), value, threshold, base_value)


def _look_up(gate: Gate, report: Json, place: str) -> Fraction:
    """Return the figure that `gate` names."""
    figures = dict(_figures(report))
    if gate.figure in figures:
        return figures[gate.figure]
    group, _, name = gate.figure.partition(".")
    is_count = (group == "ops" and name) or (group == "initializer_bytes" and name in DTYPE_NAMES)
    # Operator names are case-sensitive: a gate on ops.Matmul would silently never be met.
    other_case = [name for name in figures if name.casefold() == gate.figure.casefold()]
    if is_count and not other_case and isinstance(report, dict) and group in report:
        return Fraction(0)
    raise GateError(
        f"the {place} has no figure {gate.figure!r} (gate {gate.expression!r})",
        _name_figures(other_case or _similar(gate.figure, figures), figures),
    )


def _similar(name: str, figures: Iterable[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, [*figures], n=3, cutoff=0.7)


def _name_figures(meant: list[str], figures: Iterable[str]) -> str:
    """Suggest figures close to `meant`, and list the top-level ones."""
    similar = [repr(name) for name in meant]  # names are untrusted
    top = [name for name in figures if "." not in name and "(" not in name]
    groups = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in figures if "." in name and "(" not in name)
    there = f"there are {', '.join([*top, *groups])}"
    return f"did you mean {' or '.join(similar)}? {there}" if similar else there


def _figures(value: Json, path: str = "") -> Iterator[tuple[str, Fraction]]:
    """Yield every number of a JSON value with its path, and the counts of entries; booleans are no figures."""
    if isinstance(value, dict | list) and path:
        yield f"{_COUNT}({path})", Fraction(len(value))
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _figures(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _figures(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, Fraction(value)


def _texts(value: Json, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a JSON value with its path."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in entries:
        yield from _texts(item, f"{path}.{name}" if path else str(name))
    if isinstance(value, str):
        yield path, value


def _format(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value)
    return f"{Decimal(value.numerator) / Decimal(value.denominator):.10g}"  # a float is bounded
