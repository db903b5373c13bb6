"""The maximum that is subtracted in front of a Softmax."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.optimize.passes.maxima import softmax_maximum
from tests.optimize.passes.builders import assert_left_alone, assert_same_numbers, build_body, operators
from tests.optimize.passes.properties import Row

BODY = "m = ReduceMax <axes=[-1]> (x) d = Sub(x, m) y = Softmax <axis=-1> (d)"
OPSET_18 = BODY.replace(" <axes=[-1]> (x)", " (x, last)")
LAST = {"last": np.array([-1])}


@pytest.mark.parametrize(("body", "opset"), [(BODY, 17), (OPSET_18, 18), (BODY.replace("Soft", "LogSoft"), 17)])
def test_a_softmax_subtracts_the_maximum_itself(body: str, opset: int) -> None:
    """So it need not be subtracted before, whether the axis is an attribute or an input."""
    model = build_body(body, LAST if opset == 18 else {}, opset)
    assert_same_numbers(softmax_maximum, model, atol=1e-7)
    assert operators(model) == ["LogSoftmax" if "Log" in body else "Softmax"]


@pytest.mark.parametrize(
    "body",
    [
        BODY.replace("axes=[-1]", "axes=[1]"),
        BODY.replace("axes=[-1]", "axes=[0, -1]"),
        BODY.replace("ReduceMax <axes=[-1]> (x)", "ReduceMax <axes=[-1]> (n)").replace("m =", "n = Neg(x) m ="),
        BODY.replace("Sub(x, m)", "Sub(m, x)"),
        BODY.replace("axis=-1", "axis=1"),
        BODY.replace("ReduceMax", "ReduceMin").replace("Softmax <axis=-1>", "Identity"),
    ],
    ids=["another axis", "more axes", "of another tensor", "turned", "another softmax", "no softmax"],
)
def test_what_is_no_maximum_of_the_softmax_stays(body: str) -> None:
    """Whether it moves the result or not: nothing is proved about it."""
    assert_left_alone(softmax_maximum, build_body(body))


ROW = Row(softmax_maximum, {"opset 17": partial(build_body, BODY), "opset 18": partial(build_body, OPSET_18, LAST, 18)})
