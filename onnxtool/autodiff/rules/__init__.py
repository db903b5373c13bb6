"""The table of all gradient rules, and the table of inputs that no gradient flows to."""

from __future__ import annotations

from onnxtool.autodiff.rules.conv import CONV
from onnxtool.autodiff.rules.math import CONTRIB, MATH, REDUCE
from onnxtool.autodiff.rules.nn import LOSS, NN
from onnxtool.autodiff.rules.recurrent import RECURRENT
from onnxtool.autodiff.rules.rule import Rule
from onnxtool.autodiff.rules.tensor import TENSOR

__all__ = ["ALL_INPUTS", "NON_DIFFERENTIABLE", "RULES"]

_STANDARD, _MICROSOFT = "", "com.microsoft"
_TABLES = (
    *((_STANDARD, table) for table in (MATH, TENSOR, REDUCE, NN, CONV, LOSS, RECURRENT)),
    (_MICROSOFT, CONTRIB),
)

# Keyed by domain and operator.
RULES: dict[tuple[str, str], Rule] = {
    (domain, op_type): rule for domain, table in _TABLES for op_type, rule in table.items()
}

ALL_INPUTS = range(1 << 31)
_PIECEWISE_CONSTANT = ("Ceil", "Floor", "Round", "Sign", "Hardmax", "IsInf", "IsNaN")
_RANDOM = ("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike")
_SHAPES_AND_INDICES = ("ArgMax", "ArgMin", "EyeLike", "NonZero", "Shape", "Size")

# By domain and operator, the inputs whose derivative is zero almost everywhere, or that count as constants. Integers
# computed from floats are indices, steps or sizes and need no row here, and neither do booleans.
NON_DIFFERENTIABLE: dict[tuple[str, str], range | frozenset[int]] = {
    **{("", op_type): ALL_INPUTS for op_type in (*_PIECEWISE_CONSTANT, *_RANDOM, *_SHAPES_AND_INDICES)},
    ("", "CastLike"): frozenset((1,)),  # only its dtype is used
    ("", "Dropout"): frozenset((1, 2)),  # ratio and mode
    ("", "OneHot"): frozenset((0, 1)),  # indices and depth
    ("", "Range"): frozenset((1,)),  # the end only determines the size
    ("", "Resize"): frozenset((1, 2)),  # region of interest and scales
    ("", "Upsample"): frozenset((1,)),
}
