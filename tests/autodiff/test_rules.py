"""Each gradient rule against PyTorch's autograd and against finite differences in float64."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtool.autodiff.rules import RULES
from tests.autodiff.cases import CASES, Case
from tests.autodiff.gradients import (
    directional_slopes,
    feeds,
    forward_model,
    gradient_model,
    name_of,
    run_onnxruntime,
    run_reference,
    torch_gradients,
)

# A central difference in float64 with steps of 1e-5 is off by about 1e-10 in itself; curvature adds the rest.
_SLOPE_TOLERANCE = 1e-6


def _ways(cases: tuple[Case, ...]) -> list[object]:
    return [
        pytest.param(case, dynamic, id=f"{case.name}-{'dynamic' if dynamic else 'fixed'}")
        for case in cases
        for dynamic in (False, True)
        if not (dynamic and case.fixed)
    ]


def test_every_rule_has_a_case() -> None:
    """A rule that nobody tries is not there."""
    assert set(RULES) <= {(case.domain, case.op_type) for case in CASES}


@pytest.mark.parametrize(("case", "dynamic"), _ways(CASES))
def test_a_gradient_is_pytorchs(case: Case, dynamic: bool) -> None:
    """Float32 on two threads of onnxruntime gives what autograd gives in float64."""
    expected = torch_gradients(case)
    model, places = gradient_model(forward_model(case, np.float32, dynamic=dynamic), case.wanted)
    assert places == list(case.wanted)
    run = run_onnxruntime if case.onnxruntime else run_reference
    _, *found = run(model, feeds(case, model, np.float32))
    for place, gradient in zip(places, found, strict=True):
        assert gradient.shape == expected[place].shape
        scale = max(1.0, float(np.abs(expected[place]).max(initial=0.0)))
        np.testing.assert_allclose(gradient, expected[place], rtol=0, atol=case.tolerance * scale)


@pytest.mark.parametrize(("case", "dynamic"), _ways(tuple(case for case in CASES if case.reference)))
def test_a_gradient_is_the_slope(case: Case, dynamic: bool) -> None:
    """In float64 a gradient predicts how the loss changes along random directions."""
    forward = forward_model(case, np.float64, dynamic=dynamic)
    model, places = gradient_model(forward, case.wanted)
    values = feeds(case, model, np.float64)
    _, *found = run_reference(model, values)
    for place, gradient in zip(places, found, strict=True):
        for direction, slope in directional_slopes(forward, values, name_of(place)):
            assert float((gradient * direction).sum()) == pytest.approx(slope, rel=_SLOPE_TOLERANCE, abs=1e-7)
