"""The edges that no gradient goes through: the derivative is zero almost everywhere, or the input counts as given."""

from __future__ import annotations

EVERY = range(1 << 31)
"""All inputs of an operator."""

_STEPS = ("Ceil", "Floor", "Round", "Sign", "Hardmax", "IsInf", "IsNaN")
_RANDOM = ("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike")
# Their inputs give a dtype, a shape or a position alone.
_LIKE = ("ArgMax", "ArgMin", "EyeLike", "NonZero", "Shape", "Size", "Range", "OneHot")

# Values of integers and booleans have no gradient in any case, and need no row here.
STOPS: dict[tuple[str, str], range | frozenset[int]] = {
    **{("", op_type): EVERY for op_type in (*_STEPS, *_RANDOM, *_LIKE)},
    ("", "BatchNormalization"): frozenset((3, 4)),  # the running mean and variance
    ("", "CastLike"): frozenset((1,)),  # whose dtype is taken
    ("", "Dropout"): frozenset((1, 2)),  # ratio and mode
    ("", "Resize"): frozenset((1, 2)),  # region of interest and scales
    ("", "Upsample"): frozenset((1,)),
}
