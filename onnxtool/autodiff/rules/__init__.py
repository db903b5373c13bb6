"""The table of all gradient rules, and that of the edges that no gradient goes through."""

from __future__ import annotations

from onnxtool.autodiff.rules.attention import ATTENTION
from onnxtool.autodiff.rules.contrib import CONTRIB
from onnxtool.autodiff.rules.conv import CONV
from onnxtool.autodiff.rules.einsum import EINSUM
from onnxtool.autodiff.rules.interpolation import INTERPOLATION
from onnxtool.autodiff.rules.loss import LOSS
from onnxtool.autodiff.rules.math import MATH
from onnxtool.autodiff.rules.nn import NN
from onnxtool.autodiff.rules.quantization import QUANTIZATION, QUANTIZERS, READERS
from onnxtool.autodiff.rules.recurrent import RECURRENT
from onnxtool.autodiff.rules.reduce import REDUCE
from onnxtool.autodiff.rules.rule import Rule
from onnxtool.autodiff.rules.stops import STOPS
from onnxtool.autodiff.rules.tensor import TENSOR

__all__ = ["QUANTIZERS", "READERS", "RULES", "STOPS"]

_STANDARD, _MICROSOFT = "", "com.microsoft"
_TABLES = (
    *((_STANDARD, table) for table in (MATH, TENSOR, REDUCE, NN, EINSUM, CONV, INTERPOLATION, LOSS, RECURRENT)),
    *((_MICROSOFT, table) for table in (CONTRIB, ATTENTION)),
    *((domain, QUANTIZATION) for domain in (_STANDARD, _MICROSOFT)),
)

# By domain and operator.
RULES: dict[tuple[str, str], Rule] = {
    (domain, op_type): rule for domain, table in _TABLES for op_type, rule in table.items()
}
