"""Cases of reductions."""

from __future__ import annotations

import numpy as np
import torch

from tests.autodiff.cases.case import Case, integers, normal, positive

_FUNCTIONS = {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceL2": torch.linalg.vector_norm,
    "ReduceLogSumExp": torch.logsumexp,
}

REDUCE = (
    *(
        Case(op_type, (normal(2, 3, 4), integers(1)), lambda x, _, function=function: function(x, dim=1, keepdim=True))
        for op_type, function in _FUNCTIONS.items()
    ),
    *(
        Case(
            op_type,
            (normal(2, 3, 4), integers(0, -1)),
            lambda x, _, function=function: function(x, dim=(0, 2)),
            {"keepdims": 0},
            note="two axes dropped",
        )
        for op_type, function in _FUNCTIONS.items()
    ),
    *(
        Case(
            op_type,
            (normal(2, 3),),
            lambda x, function=function: function(x, dim=(0, 1)),
            {"keepdims": 0},
            note="all axes",
        )
        for op_type, function in _FUNCTIONS.items()
    ),
    *(
        Case(
            op_type,
            (np.array([[1.0, 2.0, 2.0]]), integers(1)),
            lambda x, _, function=function: function(x, dim=1, keepdim=True),
            note="equals",
            reference=False,
        )
        for op_type, function in (("ReduceMax", torch.amax), ("ReduceMin", torch.amin))
    ),
    Case(
        "ReduceL2",
        (np.zeros((2, 3)), integers(1)),
        lambda x, _: torch.linalg.vector_norm(x, dim=1, keepdim=True),
        note="of zeros",
        reference=False,
    ),
    Case("ReduceSum", (normal(2, 3),), lambda x: x * 1, {"noop_with_empty_axes": 1}, note="of no axis"),
    Case("ReduceProd", (normal(2, 3), integers(1)), lambda x, _: x.prod(1, keepdim=True)),
    Case("ReduceProd", (normal(2, 3),), torch.prod, {"keepdims": 0}, note="all axes"),
    Case(
        "ReduceProd",
        (np.array([[2.0, 0.0, 3.0], [0.0, 1.0, 0.0], [1.0, 2.0, 4.0]]), integers(-1)),
        lambda x, _: x.prod(1),
        {"keepdims": 0},
        note="with zeros",
    ),
    Case("ReduceSumSquare", (normal(2, 3), integers(1)), lambda x, _: (x * x).sum(1, keepdim=True)),
    Case("ReduceL1", (normal(2, 3), integers(1)), lambda x, _: x.abs().sum(1, keepdim=True)),
    Case("ReduceLogSum", (positive(2, 3), integers(1)), lambda x, _: x.sum(1, keepdim=True).log()),
)
