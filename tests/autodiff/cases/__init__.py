"""The operators that have a gradient, each with at least one case."""

from __future__ import annotations

from tests.autodiff.cases.case import Case
from tests.autodiff.cases.contrib import CONTRIB
from tests.autodiff.cases.conv import CONV
from tests.autodiff.cases.math import MATH
from tests.autodiff.cases.nn import NN
from tests.autodiff.cases.recurrent import RECURRENT
from tests.autodiff.cases.reduce import REDUCE
from tests.autodiff.cases.tensor import TENSOR

__all__ = ["CASES", "Case"]

CASES: tuple[Case, ...] = (*MATH, *TENSOR, *REDUCE, *NN, *CONV, *RECURRENT, *CONTRIB)
