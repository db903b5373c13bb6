"""Gradients of elementwise arithmetic and functions, also fused ones of onnxruntime, and of reductions."""

from __future__ import annotations

import math
from math import prod

from onnxtool.autodiff.builder import Tensor
from onnxtool.autodiff.rules.rule import Backward, Rule, broadcasting, rule

_TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)


def _pow_base(n: Backward) -> Tensor:
    x, exponent = n.x(0), n.constant(1)
    if exponent is None or exponent.size != 1:
        power = n.x(1).cast(x.dtype)
        # With an exponent of zero, the slope is zero, even at x = 0.
        slope = n.build.where(power.equals(0.0), 0.0, power * x ** (power - 1.0))
        return n.dy * slope
    number = float(exponent.item())
    if number == 2:
        return n.dy * (2.0 * x)
    return n.dy * (number * x ** (number - 1.0)) if number else n.dy * 0.0


def _pow_exponent(n: Backward) -> Tensor:
    x, y = n.x(0), n.y()
    # The limit at x = 0, where the logarithm is infinite.
    slope = n.build.where(x.equals(0.0), 0.0, y * n.build.op("Log", n.build.where(x.equals(0.0), 1.0, x)))
    return (n.dy * slope).cast(n.x(1).dtype)


def _clip(n: Backward) -> Tensor:
    x, inside = n.x(0), None
    for place, outside in ((1, Tensor.__lt__), (2, Tensor.__gt__)):
        if n.has(place):
            is_inside = n.build.op("Not", outside(x, n.x(place)))
            inside = is_inside if inside is None else n.build.op("And", inside, is_inside)
    return n.dy if inside is None else n.build.where(inside, n.dy, 0.0)


def _clip_bound(n: Backward) -> Tensor:
    beyond = n.x(0) < n.x(1) if n.index == 1 else n.x(0) > n.x(2)
    if n.has(1) and n.has(2):  # the maximum wins if it is below the minimum
        crossed = n.x(1) > n.x(2)
        beyond = (
            n.build.op("And", beyond, n.build.op("Not", crossed)) if n.index == 1 else n.build.op("Or", beyond, crossed)
        )
    return n.build.op("ReduceSum", n.build.where(beyond, n.dy, 0.0), keepdims=0)


def _extremum(n: Backward) -> Tensor:
    """Distribute the gradient equally over all inputs with the extreme value, as PyTorch's amax does."""
    hits = [n.x(place).equals(n.y()).cast(n.dy.dtype) for place in range(len(n.node.inputs))]
    if len(hits) == 1:
        return n.dy
    total = n.build.op("Add", *hits) if len(hits) == 2 else n.build.op("Sum", *hits)
    return n.dy * hits[n.index] / total


def _mod_divisor(n: Backward) -> Tensor:
    """Return the gradient times the negated integer quotient."""
    return -n.dy * n.build.op("Round", (n.x(0) - n.y()) / n.x(1))


def _gelu(n: Backward) -> Tensor:
    x = n.x(0)
    slope = _tanh_gelu_slope(n, x) if n.attribute("approximate", "none") == "tanh" else _gelu_slope(n, x)
    return n.dy * slope


def _gelu_slope(n: Backward, x: Tensor) -> Tensor:
    """Return the derivative of `x * cdf(x)`: `cdf(x) + x * pdf(x)`.

    Dividing by `exp(u^2)` avoids negating the exponent, which is a pass over all elements; it overflows to infinity
    where the density is zero.
    """
    u = x * math.sqrt(0.5)
    density = 1 / math.sqrt(2 * math.pi) / n.build.op("Exp", u * u)
    return half_and_half(n, n.build.op("Erf", u)) + x * density


def half_and_half(n: Backward, x: Tensor) -> Tensor:
    """Return `0.5 + 0.5 * x` for x in [-1, 1]; HardSigmoid does it in one pass, if onnxruntime supports the dtype."""
    if x.dtype.name == "FLOAT":
        return n.build.op("HardSigmoid", x, alpha=0.5, beta=0.5)
    return 0.5 + 0.5 * x


def _tanh_gelu_slope(n: Backward, x: Tensor) -> Tensor:
    """Return the derivative of `x * sigmoid(2 u)` with `u = sqrt(2 / pi) * (x + 0.044715 x^3)`."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    gate = n.build.op("Sigmoid", x * (square * (2 * scale * cubic) + 2 * scale))
    return gate + gate * (1.0 - gate) * x * (square * (6 * scale * cubic) + 2 * scale)


MATH: dict[str, Rule] = {
    "Abs": rule(lambda n: n.dy * n.build.op("Sign", n.x(0))),
    "Acos": rule(lambda n: -n.dy / n.build.op("Sqrt", 1.0 - n.x(0) * n.x(0))),
    "Acosh": rule(lambda n: n.dy / n.build.op("Sqrt", n.x(0) * n.x(0) - 1.0)),
    "Add": broadcasting(lambda n: n.dy, lambda n: n.dy),
    "Asin": rule(lambda n: n.dy / n.build.op("Sqrt", 1.0 - n.x(0) * n.x(0))),
    "Asinh": rule(lambda n: n.dy / n.build.op("Sqrt", n.x(0) * n.x(0) + 1.0)),
    "Atan": rule(lambda n: n.dy / (n.x(0) * n.x(0) + 1.0)),
    "Atanh": rule(lambda n: n.dy / (1.0 - n.x(0) * n.x(0))),
    "Cast": rule(lambda n: n.dy.cast(n.x(0).dtype)),
    "CastLike": rule(lambda n: n.dy.cast(n.x(0).dtype)),
    "Clip": rule(_clip, _clip_bound, _clip_bound),
    "Cos": rule(lambda n: -n.dy * n.build.op("Sin", n.x(0))),
    "Cosh": rule(lambda n: n.dy * n.build.op("Sinh", n.x(0))),
    "Div": broadcasting(lambda n: n.dy / n.x(1), lambda n: -(n.dy / n.x(1) * n.y())),
    "Erf": rule(lambda n: n.dy * n.build.op("Exp", -(n.x(0) * n.x(0))) * _TWO_OVER_ROOT_PI),
    "Exp": rule(lambda n: n.dy * n.y()),
    "Gelu": rule(_gelu),
    "Identity": rule(lambda n: n.dy),
    "LeakyRelu": rule(lambda n: n.build.where(n.x(0) > 0.0, n.dy, n.dy * n.attribute("alpha", 0.01))),
    "Log": rule(lambda n: n.dy / n.x(0)),
    "Max": Rule((_extremum,), variadic=True, broadcasts=True),
    "Mean": Rule((lambda n: n.dy / float(len(n.node.inputs)),), variadic=True, broadcasts=True),
    "Min": Rule((_extremum,), variadic=True, broadcasts=True),
    "Mod": broadcasting(lambda n: n.dy, _mod_divisor),
    "Mul": broadcasting(lambda n: n.dy * n.x(1), lambda n: n.dy * n.x(0)),
    "Neg": rule(lambda n: -n.dy),
    "Pow": broadcasting(_pow_base, _pow_exponent),
    "Reciprocal": rule(lambda n: -n.dy * (n.y() * n.y())),
    "Relu": rule(lambda n: n.build.where(n.y() > 0.0, n.dy, 0.0)),
    "Sigmoid": rule(lambda n: n.dy * n.y() * (1.0 - n.y())),
    "Sin": rule(lambda n: n.dy * n.build.op("Cos", n.x(0))),
    "Sinh": rule(lambda n: n.dy * n.build.op("Cosh", n.x(0))),
    "Softplus": rule(lambda n: n.dy * n.build.op("Sigmoid", n.x(0))),
    "Sqrt": rule(lambda n: n.dy / n.y() * 0.5),
    "Sub": broadcasting(lambda n: n.dy, lambda n: -n.dy),
    "Sum": Rule((lambda n: n.dy,), variadic=True, broadcasts=True),
    "Tan": rule(lambda n: n.dy * (n.y() * n.y() + 1.0)),
    "Tanh": rule(lambda n: n.dy * (1.0 - n.y() * n.y())),
    "Where": broadcasting(
        None,
        lambda n: n.build.where(n.x(0), n.dy, 0.0),
        lambda n: n.build.where(n.x(0), 0.0, n.dy),
    ),
}


def _quick_gelu(n: Backward) -> Tensor:
    scaled = n.x(0) * n.attribute("alpha", 1.702)
    gate = n.build.op("Sigmoid", scaled)
    return n.dy * (gate + gate * (1.0 - gate) * scaled)


# Operators of onnxruntime with a gradient in onnxruntime-training; FakeQuant and ScaledSum are in its builds alone.
CONTRIB: dict[str, Rule] = {
    "BiasGelu": broadcasting(*[lambda n: n.dy * _gelu_slope(n, n.x(0) + n.x(1))] * 2),
    "FakeQuant": Rule((lambda n: n.build.where(n.y(1), n.dy, 0.0),), num_outputs=2),  # zero for out-of-range elements
    "FastGelu": broadcasting(*[lambda n: n.dy * _tanh_gelu_slope(n, n.x(0) + n.x(1) if n.has(1) else n.x(0))] * 2),
    "Gelu": rule(lambda n: n.dy * _gelu_slope(n, n.x(0))),
    "QuickGelu": rule(_quick_gelu),
    "ScaledSum": Rule((lambda n: n.dy * n.attribute(f"scale_{n.index}", 1.0),), variadic=True),
}


def _kept(n: Backward, reduced: Tensor) -> Tensor:
    """Return a reduced value with the reduced axes kept as size 1."""
    if n.attribute("keepdims", 1) or not n.has(1):
        return reduced  # without axes it is a scalar, which broadcasts
    return n.build.op("Unsqueeze", reduced, n.x(1))


def _axes(n: Backward) -> Tensor | None:
    return n.x(1) if n.has(1) else None


def _count(n: Backward) -> Tensor:
    """Return how many elements were reduced to one."""
    x, y = n.x(0), n.y()
    if x.shape is not None and y.shape is not None and n.attribute("keepdims", 1):
        reduced = [whole for whole, part in zip(x.shape, y.shape, strict=True) if whole != part]
        if all(isinstance(size, int) for size in reduced):
            return n.build.constant(prod(size for size in reduced if isinstance(size, int)), n.dy.dtype)
    sizes = [n.build.op("Size", value).cast(n.dy.dtype) for value in (x, y)]
    return sizes[0] / sizes[1]


def _reduce_extremum(n: Backward) -> Tensor:
    """Distribute the gradient equally over all elements with the extreme value."""
    hits = n.x(0).equals(_kept(n, n.y())).cast(n.dy.dtype)
    return hits * (_kept(n, n.dy) / n.build.op("ReduceSum", hits, _axes(n), keepdims=1))


def _reduce_l2(n: Backward) -> Tensor:
    norm = _kept(n, n.y())
    direction = n.x(0) / n.build.where(norm.equals(0.0), 1.0, norm)
    return _kept(n, n.dy) * direction


def _reduce_prod(n: Backward) -> Tensor:
    """Multiply by the product of the other elements: with one zero, only its own is nonzero; with two, none is."""
    is_zero = n.x(0).equals(0.0)
    nonzero = n.build.where(is_zero, 1.0, n.x(0))
    product = n.build.op("ReduceProd", nonzero, _axes(n), keepdims=1)
    zeros = n.build.op("ReduceSum", is_zero.cast(n.dy.dtype), _axes(n), keepdims=1)
    at_zero = n.build.where(zeros.equals(1.0), product, 0.0)
    elsewhere = n.build.where(zeros.equals(0.0), product / nonzero, 0.0)
    return _kept(n, n.dy) * n.build.op("Where", is_zero, at_zero, elsewhere)


REDUCE: dict[str, Rule] = {
    "ReduceL2": rule(_reduce_l2),
    "ReduceLogSumExp": rule(lambda n: _kept(n, n.dy) * n.build.op("Exp", n.x(0) - _kept(n, n.y()))),
    "ReduceMax": rule(_reduce_extremum),
    "ReduceMean": rule(lambda n: _kept(n, n.dy / _count(n)).expand(n.x(0).size())),
    "ReduceMin": rule(_reduce_extremum),
    "ReduceProd": rule(_reduce_prod),
    "ReduceSum": rule(lambda n: _kept(n, n.dy).expand(n.x(0).size())),
}
