"""Gradients of operators that broadcast have their operand's shape, whichever operand has size 1 along which axis."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from tests.autodiff.cases.case import Array, Case, positive
from tests.autodiff.gradients import feeds, forward_model, gradient_model, run_onnxruntime, torch_gradients

Function = Callable[..., torch.Tensor]
_MASK = np.array([[[True, False, True, True]] * 3, [[False, True, True, False]] * 3])


# An operator, the shapes of its operands, of which any size may be 1 that the others have, attributes, and PyTorch's.
OPERATORS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, object], Function]] = {
    "Add": (((2, 3, 4), (2, 3, 4)), {}, torch.add),
    "Sub": (((2, 3, 4), (3, 4)), {}, torch.sub),
    "Mul": (((3, 4), (2, 3, 4)), {}, torch.mul),
    "Div": (((2, 3, 4), (2, 3, 4)), {}, torch.div),
    "Pow": (((2, 3, 4), (2, 3, 4)), {}, torch.pow),
    "Max": (((2, 3, 4), (2, 3, 4)), {}, torch.maximum),
    "Min": (((2, 3, 4), (3, 4)), {}, torch.minimum),
    "Mean": (((2, 3, 4), (3, 4), (4,)), {}, lambda x, y, z: (x + y + z) / 3),
    "Sum": (((2, 3, 4), (3, 4), (4,)), {}, lambda x, y, z: x + y + z),
    "Mod": (((2, 3, 4), (3, 4)), {"fmod": 1}, torch.fmod),
    "Where": (((2, 3, 4), (2, 3, 4)), {}, lambda x, y: torch.where(torch.tensor(_MASK), x, y)),
    "PRelu": (((2, 3, 4), (3, 4)), {}, lambda x, y: torch.where(x < 0, x * y, x)),
    "MatMul": (((2, 3, 4), (2, 4, 5)), {}, torch.matmul),
    "Gemm": (((3, 4), (4, 5), (3, 5)), {"alpha": 0.5, "beta": 2.0}, lambda a, b, c: a @ b / 2 + 2 * c),
    "Einsum": (((2, 3, 4), (2, 4, 5)), {"equation": "bij,bjk->bik"}, lambda x, y: torch.einsum("bij,bjk->bik", x, y)),
    "Expand": (((2, 3, 4),), {}, lambda x: x.expand(2, 3, 4)),
}
# Axes, from the end, that must not be of size 1 in one operand alone: those of matrices.
FIXED: dict[str, dict[int, tuple[int, ...]]] = {
    "MatMul": {0: (-1, -2), 1: (-1, -2)},
    "Gemm": {0: (-1, -2), 1: (-1, -2)},
    "PRelu": {0: (-1, -2, -3)},
}


def _cases(op_type: str) -> list[Case]:
    """Return a case for each set of axes of size 1 in each operand, and for operands that all have size 1 there."""
    shapes, attributes, function = OPERATORS[op_type]
    fixed = FIXED.get(op_type, {})
    free = [[axis for axis in range(-len(shape), 0) if axis not in fixed.get(i, ())] for i, shape in enumerate(shapes)]
    cases, below = [], 1.01 if op_type == "PRelu" else 0.0
    for ones in product(*([(), *((axis,) for axis in axes), tuple(axes)] for axes in free)):
        inputs: list[Array | None] = [
            positive(*(1 if axis - len(shape) in some else size for axis, size in enumerate(shape)))
            - below * (not place)
            for place, (shape, some) in enumerate(zip(shapes, ones, strict=True))
        ]
        extra = {"Where": [_MASK], "Expand": [np.array(shapes[0])]}.get(op_type, [])
        places = tuple(range(len(shapes)))
        given = (*extra, *inputs) if op_type == "Where" else (*inputs, *extra)
        by = tuple(place + (op_type == "Where") for place in places)

        def run(*tensors: torch.Tensor, by: tuple[int, ...] = by) -> torch.Tensor:
            return function(*(tensors[place] for place in by))

        cases.append(Case(op_type, given, run, attributes, note=str(ones), by=by))
    return cases


@pytest.mark.parametrize("op_type", OPERATORS)
def test_a_gradient_has_the_shape_of_its_operand(op_type: str) -> None:
    """In float32, against PyTorch's autograd in float64; every other case has dynamic sizes."""
    for number, case in enumerate(_cases(op_type)):
        expected = torch_gradients(case)
        model, places = gradient_model(forward_model(case, np.float32, dynamic=bool(number % 2)), case.wanted)
        _, *found = run_onnxruntime(model, feeds(case, model, np.float32))
        assert places == list(case.wanted), case.note
        for place, gradient in zip(places, found, strict=True):
            assert gradient.shape == expected[place].shape, case.note
            scale = max(1.0, float(np.abs(expected[place]).max()))
            np.testing.assert_allclose(gradient, expected[place], atol=2e-5 * scale, rtol=0, err_msg=case.note)
