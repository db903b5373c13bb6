"""The table of all gradient rules, and that of the edges that no gradient goes through."""

from __future__ import annotations

from onnxtool.training.autodiff.rules.conv import CONV
from onnxtool.training.autodiff.rules.loss import LOSS
from onnxtool.training.autodiff.rules.math import MATH
from onnxtool.training.autodiff.rules.nn import NN
from onnxtool.training.autodiff.rules.reduce import REDUCE
from onnxtool.training.autodiff.rules.rule import Rule
from onnxtool.training.autodiff.rules.stops import STOPS
from onnxtool.training.autodiff.rules.tensor import TENSOR

__all__ = ["RULES", "STOPS"]

_STANDARD = ""

# By domain and operator.
RULES: dict[tuple[str, str], Rule] = {
    **{
        (_STANDARD, op_type): rule
        for table in (MATH, TENSOR, REDUCE, NN, CONV, LOSS)
        for op_type, rule in table.items()
    },
}
