"""Fuse each form of Gelu, and the bias in front of it, into one operator of onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onnxtool.graph.edit import (
    attribute,
    constant,
    is_closed,
    is_float,
    is_weight,
    only_consumer,
    operands,
    producer,
    replace_and_erase,
    scalar,
    value_graph,
)
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, fill_types
from onnxtool.graph.writer import Writer
from onnxtool.optimize.kept import patterns_of
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals, rewrite_each

_LARGEST_DEPTH = 8
_ARITHMETIC = ("Add", "Div", "Mul", "Pow")
_TOLERANCE = 1e-3  # some exporters write constants in float16


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in a value.

    Attributes:
        coefficients: coefficients by power.
        nodes: the nodes that compute it.
    """

    coefficients: Mapping[int, float]
    nodes: tuple[ir.Node, ...] = field(default=())

    def plus(self, other: Polynomial) -> Polynomial:
        """Return the sum."""
        powers = {**self.coefficients, **other.coefficients}
        coefficients = {power: self.coefficients.get(power, 0) + other.coefficients.get(power, 0) for power in powers}
        return Polynomial(coefficients, (*self.nodes, *other.nodes))

    def times(self, other: Polynomial) -> Polynomial:
        """Return the product."""
        coefficients: dict[int, float] = {}
        for power, coefficient in self.coefficients.items():
            for another, factor in other.coefficients.items():
                coefficients[power + another] = coefficients.get(power + another, 0) + coefficient * factor
        return Polynomial(coefficients, (*self.nodes, *other.nodes))

    def is_close(self, coefficients: Mapping[int, float]) -> bool:
        """Whether it has the coefficients `coefficients`, all to a relative 1e-3."""
        return self.coefficients.keys() == coefficients.keys() and all(
            math.isclose(self.coefficients[power], coefficient, rel_tol=_TOLERANCE)
            for power, coefficient in coefficients.items()
        )


def as_polynomial(value: ir.Value | None, variable: ir.Value, depth: int = 0) -> Polynomial | None:
    """Match `value` as a polynomial in `variable`; None if it is not one."""
    if value is variable:
        return Polynomial({1: 1.0})
    if value is None or depth > _LARGEST_DEPTH:
        return None
    if (number := number_in(value)) is not None:
        return Polynomial({0: number})
    node = value.producer()
    if node is None or node.domain or node.op_type not in _ARITHMETIC:
        return None
    first, second = (as_polynomial(operand, variable, depth + 1) for operand in node.inputs)
    polynomial = None if first is None or second is None else _combine(node.op_type, first, second)
    return None if polynomial is None else Polynomial(polynomial.coefficients, (*polynomial.nodes, node))


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


_ROOT = math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class _GeluForm:
    """A form of Gelu: `factor * x * gate`.

    Attributes:
        argument: the polynomial in x that is the input of the function in the gate.
        offset: the number that is added to the function in the gate.
        factor: the constant factor.
        fused: the fused operator.
        attributes: its attributes.
    """

    argument: Mapping[int, float]
    offset: float | None
    factor: float
    fused: str
    attributes: Mapping[str, Any]


_FORMS: Mapping[str, _GeluForm] = {
    "Erf": _GeluForm({1: math.sqrt(0.5)}, 1, 0.5, "Gelu", {}),
    "Tanh": _GeluForm({1: _ROOT, 3: _ROOT * 0.044715}, 1, 0.5, "FastGelu", {}),
    "Sigmoid": _GeluForm({1: 1.702}, None, 1, "QuickGelu", {"alpha": 1.702}),
}


def _fuse_gelus(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Mul(Mul(x, Add(Erf(Div(x, 1.4142)), 1)), 0.5)` by `Gelu(x)`, and its approximations likewise.

    `0.5 * x * (1 + Tanh(Sqrt(2 / pi) * (x + 0.044715 * x ** 3)))` becomes `FastGelu(x)`, and `x * Sigmoid(1.702 * x)`
    becomes `QuickGelu(x)`. Factors may be in any order. ONNX's own Gelu becomes onnxruntime's, so that later passes
    match one operator.
    """
    candidates = [node for node in model.graph if not node.domain and node.op_type in {*_FORMS, "Gelu"}]
    if not candidates:
        return Outcome(model, 0)
    fill_types(model)
    num_changes, reasons = 0, []
    for node in candidates:
        reason = _rename(node) if node.op_type == "Gelu" else _fuse(node, _FORMS[node.op_type])
        num_changes += reason == ""
        reasons += [reason] if reason else []
    return Outcome(model, num_changes, refusals(reasons))


def _rename(node: ir.Node) -> str:
    """Replace ONNX's Gelu by onnxruntime's, or return the precondition that does not hold."""
    value = node.inputs[0]
    if value is None or not is_float(value):
        return "neither float32 nor float16"
    operator = "FastGelu" if attribute(node, "approximate", "none") == "tanh" else "Gelu"
    replace_and_erase(node.outputs[0], Writer(node).node(operator, [value], domain=MICROSOFT, like=node.outputs[0]))
    return ""


def _fuse(node: ir.Node, form: _GeluForm) -> str | None:
    """Replace the Gelu around an Erf, Tanh or Sigmoid, or return why not; None if the node is not part of a Gelu."""
    gate, nodes = node.outputs[0], [node]
    if form.offset is not None:
        add = _reader(gate, "Add")
        parts = None if add is None else operands(add, number_in)
        if add is None or parts is None or number_in(parts[0]) != form.offset:
            return None
        gate, nodes = add.outputs[0], [node, add]
    product = _match_product(gate, node, form)
    if product is None:
        return None
    value, result, inner_nodes = product
    if not is_float(value):
        return "neither float32 nor float16"
    if not is_closed([*nodes, *inner_nodes], result):
        return "an inner value is read elsewhere"
    last = result.producer()
    if last is None:
        return None
    replace_and_erase(result, Writer(last).node(form.fused, [value], form.attributes, domain=MICROSOFT, like=result))
    return ""


def _match_product(
    gate: ir.Value, function: ir.Node, form: _GeluForm
) -> tuple[ir.Value, ir.Value, tuple[ir.Node, ...]] | None:
    """Follow the Muls after `gate` until they form `factor * x * gate`; return x, the product and the nodes."""
    result = gate
    nodes: tuple[ir.Node, ...] = ()
    factors: list[ir.Value] = []
    while (times := _reader(result, "Mul")) is not None:
        factor = times.inputs[1] if times.inputs[0] is result else times.inputs[0]
        if factor is None or len(factors) > 1:
            return None
        factors, nodes, result = [*factors, factor], (*nodes, times), times.outputs[0]
        for value in _variables(factors):
            argument = as_polynomial(function.inputs[0], value)
            outside = _product_of(factors, value)
            if argument is None or outside is None or not argument.is_close(form.argument):
                continue
            if outside.is_close({1: form.factor}):
                return value, result, (*nodes, *argument.nodes, *outside.nodes)
    return None


def _reader(value: ir.Value, operator: str) -> ir.Node | None:
    """Return the first consumer that is an `operator`; other consumers are checked for the whole pattern."""
    graph = value_graph(value)
    return next(
        (node for node, _ in value.uses() if not node.domain and node.op_type == operator and node.graph is graph), None
    )


def _variables(factors: list[ir.Value]) -> Iterator[ir.Value]:
    """Yield the candidates for x: each factor, and the variable part of a factor scaled by a number."""
    for factor in factors:
        if number_in(factor) is not None:
            continue
        yield factor
        times = producer(factor, "Mul", "Div")
        parts = None if times is None else operands(times, number_in)
        if parts is not None:
            yield parts[1]


def _product_of(factors: list[ir.Value], value: ir.Value) -> Polynomial | None:
    product = Polynomial({0: 1.0})
    for factor in factors:
        polynomial = as_polynomial(factor, value)
        if polynomial is None:
            return None
        product = product.times(polynomial)
    return product


gelu = Pass("gelu", _fuse_gelus)


_WITH_BIAS = {"Gelu": "BiasGelu", "FastGelu": "FastGelu"}


def _fuse_biases(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Gelu(Add(x, b))` by `BiasGelu(x, b)`, and `FastGelu(Add(x, b))` by `FastGelu(x, b)`."""
    matches = [
        (node, add)
        for node in model.graph
        if node.domain == MICROSOFT
        and node.op_type in _WITH_BIAS
        and (len(node.inputs) == 1 or node.inputs[1] is None)
        and (add := producer(node.inputs[0], "Add")) is not None
    ]
    return rewrite_each(model, matches, _fuse_bias)


def _fuse_bias(node: ir.Node, add: ir.Node, shapes: Shapes) -> str:
    """Write one operator with a bias, or return the precondition that does not hold."""
    parts = operands(add, lambda operand: is_weight(operand, 1))
    length = None if parts is None else shapes.fixed(parts[0], 0)
    if parts is None or length is None or length != shapes.fixed(parts[1], -1):
        return "the bias is no vector as long as the last axis"
    bias, value = parts
    if not is_float(bias):
        return "neither float32 nor float16"
    if only_consumer(add.outputs[0], node.op_type, domain=MICROSOFT) is not node:
        return "the sum is read elsewhere"
    if patterns_of(node) != patterns_of(add):
        return "one of them stays in float32"
    operator = _WITH_BIAS[node.op_type]
    replace_and_erase(
        node.outputs[0], Writer(node).node(operator, [value, bias], domain=MICROSOFT, like=node.outputs[0])
    )
    return ""


bias_gelu = Pass("bias_gelu", _fuse_biases)
