"""Gates: conditions on the figures of a report, such as `num_nodes>500`, that fail a command when they are met.

    gate      = figure operator threshold
    figure    = name { "." name }
    operator  = ">" | ">=" | "<" | "<=" | "==" | "!="
    threshold = [ "+" | "-" ] digits [ "." digits ] [ "%" ]

A figure is the path to a number in the JSON form of the report, e.g. `num_nodes`, `ops.MatMul`, `inputs.0.shape.1`;
an operator or dtype that a report does not count is 0, unless it is one that it counts in other case.

A threshold with a sign is relative to the same figure of a base: `num_nodes>+10` is met by more than ten nodes over
the base, `size_bytes>+5%` by more than five percent over it. Spaces around the three parts do not matter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from onnxtool.errors import GateError
from onnxtool.reports import Json
from onnxtool.wire import DTYPE_NAMES

_OPERATORS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
_MAX_DIGITS = 30
_SYNTAX_HINT = "write e.g. 'num_nodes>500', or 'size_bytes>+5%' against a base, in quotes: the shell reads > and !"


@dataclass(frozen=True)
class Gate:
    """A parsed gate.

    Attributes:
        expression: as it was written.
        amount: the threshold without its sign; of a percentage, the part of 1.
        sign: 1 or -1 for a threshold relative to the base, 0 for an absolute one.
        is_percentage: whether the amount is a part of the base's figure.
    """

    expression: str
    figure: str
    operator: str
    amount: Fraction
    sign: int = 0
    is_percentage: bool = False


@dataclass(frozen=True)
class GateResult:
    """Whether a gate was met, by which figure, and what the threshold came to.

    Attributes:
        base_value: the figure of the base; None for an absolute threshold.
    """

    gate: Gate
    met: bool
    value: Fraction
    threshold: Fraction
    base_value: Fraction | None = None

    def __str__(self) -> str:
        state = "is met" if self.met else "is not met"
        text = f"{self.gate.expression} {state}: {self.gate.figure} is {_format(self.value)}"
        if self.base_value is None:
            return text
        return f"{text}, in the base {_format(self.base_value)}, which makes a threshold of {_format(self.threshold)}"


def parse_gate(expression: str) -> Gate:
    """Parse a gate expression.

    Raises:
        GateError: the expression does not follow the grammar.
    """
    start = next((index for index, character in enumerate(expression) if character in "<>=!"), len(expression))
    end = start
    while end < len(expression) and expression[end] in "<>=!":
        end += 1
    figure, symbol, threshold = expression[:start].strip(), expression[start:end], expression[end:].strip()
    if not symbol:
        raise GateError(f"no comparison in the gate {expression!r}", _SYNTAX_HINT)
    if symbol not in _OPERATORS:
        raise GateError(f"no operator {symbol} (gate {expression!r})", f"use one of {' '.join(_OPERATORS)}")
    if not figure:
        raise GateError(f"no figure to compare in the gate {expression!r}", _SYNTAX_HINT)
    sign, digits, is_percentage = _split_threshold(threshold)
    if not _is_decimal(digits):
        raise GateError(f"{threshold!r} is not a threshold (gate {expression!r})", _SYNTAX_HINT)
    if is_percentage and not sign:
        raise GateError(
            f"a percentage needs a sign (gate {expression!r})", f"write {figure}{symbol}+{digits}% to add to the base"
        )
    amount = Fraction(digits) / 100 if is_percentage else Fraction(digits)
    return Gate(expression, figure, symbol, amount, sign, is_percentage)


def check_gates(gates: Sequence[Gate], report: Json, base: Json = None) -> tuple[GateResult, ...]:
    """Compare the figures of `report`, in its JSON form, with each gate.

    Args:
        gates: what to check, in the order of the results.
        report: an object as `to_json` makes it.
        base: the report that relative thresholds refer to.

    Raises:
        GateError: a gate names no figure of the report, or is relative and there is no base, or none in the base.
    """
    return tuple(_check(gate, report, base) for gate in gates)


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
    return GateResult(gate, _OPERATORS[gate.operator](value, threshold), value, threshold, base_value)


def _look_up(gate: Gate, report: Json, place: str) -> Fraction:
    """Return the figure that `gate` names."""
    figures = dict(_figures(report))
    if gate.figure in figures:
        return figures[gate.figure]
    group, _, name = gate.figure.partition(".")
    is_count = (group == "ops" and name) or (group == "initializer_bytes" and name in DTYPE_NAMES)
    # Operators are spelled with capitals: a gate on ops.Matmul would never be met, and nobody would know.
    other_case = [name for name in figures if name.casefold() == gate.figure.casefold()]
    if is_count and not other_case and isinstance(report, dict) and group in report:
        return Fraction(0)
    raise GateError(
        f"the {place} has no figure {gate.figure!r} (gate {gate.expression!r})",
        _name_figures(other_case or _similar(gate.figure, figures), figures),
    )


def _similar(wanted: str, figures: dict[str, Fraction]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(wanted, figures, n=3, cutoff=0.7)


def _name_figures(meant: list[str], figures: dict[str, Fraction]) -> str:
    """Say which figures may be `meant`, and which there are at the top of the report."""
    similar = [repr(name) for name in meant]  # names are untrusted
    top = [name for name in figures if "." not in name]
    groups = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in figures if "." in name)
    there = f"there are {', '.join([*top, *groups])}"
    return f"did you mean {' or '.join(similar)}? {there}" if similar else there


def _figures(value: Json, path: str = "") -> Iterator[tuple[str, Fraction]]:
    """Yield every number of a JSON value with its path; booleans are no figures."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _figures(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _figures(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, Fraction(value)


def _split_threshold(text: str) -> tuple[int, str, bool]:
    """Split `+5%` into its sign, its digits and whether it is a percentage."""
    sign = {"+": 1, "-": -1}.get(text[:1], 0)
    is_percentage = text.endswith("%")
    return sign, text[1 if sign else 0 : len(text) - is_percentage].strip(), is_percentage


def _is_decimal(text: str) -> bool:
    whole, point, part = text.partition(".")
    halves = (whole, part) if point else (whole,)
    return len(text) <= _MAX_DIGITS and all(half.isascii() and half.isdigit() for half in halves)


def _format(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"
