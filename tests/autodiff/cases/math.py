"""Cases of elementwise operators."""

from __future__ import annotations

import numpy as np
import torch

from tests.autodiff.cases.case import Case, flags, inside, integers, normal, positive

_UNARY = {
    "Abs": torch.abs,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Identity": torch.clone,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": torch.nn.functional.softplus,
    "Tanh": torch.tanh,
}
_OF_POSITIVE = {"Log": torch.log, "Sqrt": torch.sqrt}
_OF_SMALL = {"Acos": torch.acos, "Asin": torch.asin, "Atanh": torch.atanh, "Tan": torch.tan}
_BINARY = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div}
_EXTREMA = {"Max": torch.maximum, "Min": torch.minimum}
_HALF = 0.5


def _away_from_zero(*shape: int) -> np.ndarray:
    numbers = normal(*shape)
    return numbers + np.sign(numbers) * _HALF


MATH = (
    *(Case(op_type, (_away_from_zero(2, 3, 4),), function) for op_type, function in _UNARY.items()),
    *(Case(op_type, (positive(3, 4),), function) for op_type, function in _OF_POSITIVE.items()),
    *(Case(op_type, (inside(3, 4),), function) for op_type, function in _OF_SMALL.items()),
    Case("Acosh", (positive(3, 4) + 1,), torch.acosh),
    *(Case(op_type, (normal(2, 3, 4), positive(2, 3, 4)), function) for op_type, function in _BINARY.items()),
    *(
        Case(op_type, (normal(2, 3, 4), positive(4)), function, note="repeats the second")
        for op_type, function in _BINARY.items()
    ),
    *(
        Case(op_type, (normal(1, 4), positive(2, 3, 1)), function, note="repeats both")
        for op_type, function in _BINARY.items()
    ),
    *(
        Case(op_type, (normal(), positive(3, 1)), function, note="repeats a number")
        for op_type, function in _BINARY.items()
    ),
    *(Case(op_type, (normal(2, 3), normal(3)), function) for op_type, function in _EXTREMA.items()),
    *(
        Case(op_type, (np.array([1.0, 2.0]), np.array([1.0, 3.0])), function, note="equals", reference=False)
        for op_type, function in _EXTREMA.items()
    ),
    Case(
        "Max",
        (normal(2, 3), normal(3), normal(2, 1)),
        lambda *x: torch.amax(torch.stack(torch.broadcast_tensors(*x)), 0),
        note="three",
    ),
    Case("Max", (normal(2, 3),), lambda x: x * 1, note="one"),
    Case("Mean", (normal(2, 3), normal(3), normal(2, 1)), lambda a, b, c: (a + b + c) / 3),
    Case("Sum", (normal(2, 3), normal(3), normal(2, 1)), lambda a, b, c: a + b + c),
    Case(
        "Mod", (_away_from_zero(2, 3) * 3, np.array(1.37)), lambda a, b: torch.fmod(a, b), {"fmod": 1}, constants=(1,)
    ),
    Case(
        "Mod",
        (_away_from_zero(2, 3) * 3, np.array([1.37, -0.9, 2.3])),
        torch.fmod,
        {"fmod": 1},
        note="by the divisor",
    ),
    Case("Pow", (positive(2, 3), np.array(2.0)), torch.pow, note="square", constants=(1,)),
    Case("Pow", (positive(2, 3), np.array(-1.5)), torch.pow, note="a number", constants=(1,)),
    Case("Pow", (np.array([0.0, 1.0]), np.array(0.0)), torch.pow, note="to zero", constants=(1,)),
    Case("Pow", (normal(2, 3), integers(3)), lambda x, _: x**3, note="integer"),
    Case("Pow", (normal(2, 3), integers(0, 1, 2)), lambda x, e: x**e, note="integers"),
    Case("Pow", (positive(2, 3), normal(3)), torch.pow, note="trained exponents"),
    Case("Pow", (np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 0.0])), torch.pow, note="of zero", reference=False),
    Case("Where", (flags(2, 3), normal(2, 1), normal(3)), torch.where),
    Case(
        "Clip",
        (normal(3, 4), np.array(-0.5), np.array(0.75)),
        lambda x, low, high: x.clamp(low, high),
        constants=(1, 2),
    ),
    Case(
        "Clip",
        (normal(3, 4), np.array(-0.5), np.array(0.75)),
        lambda x, low, high: x.clamp(low, high),
        note="trained bounds",
    ),
    Case(
        "Clip", (normal(3, 4), None, np.array(0.5)), lambda x, _, high: x.clamp(max=high), note="above", constants=(2,)
    ),
    Case("Clip", (normal(3, 4),), lambda x: x * 1, note="without bounds"),
    Case("LeakyRelu", (normal(3, 4),), lambda x: torch.nn.functional.leaky_relu(x, 0.2), {"alpha": 0.2}),
    Case("Gelu", (normal(3, 4) * 2,), torch.nn.functional.gelu),
    Case(
        "Gelu",
        (normal(3, 4) * 2,),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        {"approximate": "tanh"},
        note="tanh",
    ),
    Case("Cast", (normal(3, 4),), lambda x: x.float(), {"to": 1}, reference=False),
    Case("CastLike", (normal(3, 4), np.array([1.0])), lambda x, _: x * 1, constants=(1,)),
)
