"""Match a value as a polynomial in another one, so that patterns need not list the orders of factors and terms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtool.graph.edit import constant, scalar

_LARGEST_DEPTH = 8
_OPERATORS = ("Add", "Div", "Mul", "Pow")
_TOLERANCE = 1e-3  # some exporters write constants in float16


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in a value.

    Attributes:
        coefficients: the coefficient of each power.
        nodes: the nodes that compute it.
    """

    coefficients: Mapping[int, float]
    nodes: tuple[ir.Node, ...] = field(default=())

    def plus(self, other: Polynomial) -> Polynomial:
        """Return the sum."""
        powers = {**self.coefficients, **other.coefficients}
        found = {power: self.coefficients.get(power, 0) + other.coefficients.get(power, 0) for power in powers}
        return Polynomial(found, (*self.nodes, *other.nodes))

    def times(self, other: Polynomial) -> Polynomial:
        """Return the product."""
        found: dict[int, float] = {}
        for power, coefficient in self.coefficients.items():
            for another, factor in other.coefficients.items():
                found[power + another] = found.get(power + another, 0) + coefficient * factor
        return Polynomial(found, (*self.nodes, *other.nodes))

    def is_close(self, wanted: Mapping[int, float]) -> bool:
        """Whether it has the coefficients `wanted`, all to a relative 1e-3."""
        return self.coefficients.keys() == wanted.keys() and all(
            math.isclose(self.coefficients[power], coefficient, rel_tol=_TOLERANCE)
            for power, coefficient in wanted.items()
        )


def as_polynomial(value: ir.Value | None, variable: ir.Value, depth: int = 0) -> Polynomial | None:
    """Match `value` as a polynomial in `variable`; None where it is not one."""
    if value is variable:
        return Polynomial({1: 1.0})
    if value is None or depth > _LARGEST_DEPTH:
        return None
    if (number := number_in(value)) is not None:
        return Polynomial({0: number})
    node = value.producer()
    if node is None or node.domain or node.op_type not in _OPERATORS:
        return None
    first, second = (as_polynomial(one, variable, depth + 1) for one in node.inputs)
    found = None if first is None or second is None else _combine(node.op_type, first, second)
    return None if found is None else Polynomial(found.coefficients, (*found.nodes, node))


def number_in(value: ir.Value | None) -> float | None:
    """Return the number in a constant of rank 0 or 1, which broadcasts to any rank; None for any other value."""
    held = constant(value)
    return None if held is None or held.ndim > 1 else scalar(value)


def _combine(operator: str, first: Polynomial, second: Polynomial) -> Polynomial | None:
    if operator == "Add":
        return first.plus(second)
    if operator == "Mul":
        return first.times(second)
    if set(second.coefficients) != {0}:
        return None
    number = second.coefficients[0]
    if operator == "Div":
        return None if number == 0 else first.times(Polynomial({0: 1 / number}))
    if number not in (2, 3):
        return None
    return first.times(first) if number == 2 else first.times(first).times(first)
