"""The operators that have a gradient, each with at least one case."""

from __future__ import annotations

from tests.training.autodiff.cases.case import Case
from tests.training.autodiff.cases.contrib import CONTRIB
from tests.training.autodiff.cases.conv import CONV
from tests.training.autodiff.cases.math import MATH
from tests.training.autodiff.cases.nn import NN
from tests.training.autodiff.cases.quantization import QUANTIZATION
from tests.training.autodiff.cases.recurrent import RECURRENT
from tests.training.autodiff.cases.reduce import REDUCE
from tests.training.autodiff.cases.tensor import TENSOR

__all__ = ["CASES", "Case"]

CASES: tuple[Case, ...] = (*MATH, *TENSOR, *REDUCE, *NN, *CONV, *RECURRENT, *QUANTIZATION, *CONTRIB)
