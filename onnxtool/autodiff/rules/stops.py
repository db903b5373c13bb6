"""The edges that no gradient goes through: the derivative is zero almost everywhere, or the input counts as given."""

from __future__ import annotations

EVERY = range(1 << 31)
"""All inputs of an operator."""

_STEPS = ("Ceil", "Floor", "Round", "Sign", "Hardmax", "IsInf", "IsNaN")
_RANDOM = ("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike")
# Their inputs give a dtype, a shape or a position alone.
_LIKE = ("ArgMax", "ArgMin", "EyeLike", "NonZero", "Shape", "Size")

# Integers that an operator makes of floats are positions, steps or sizes and need no row here, nor do booleans; only
# those that stand for numbers carry a gradient on, see `rules/quantization.py`.
STOPS: dict[tuple[str, str], range | frozenset[int]] = {
    **{("", op_type): EVERY for op_type in (*_STEPS, *_RANDOM, *_LIKE)},
    ("", "CastLike"): frozenset((1,)),  # whose dtype is taken
    ("", "Dropout"): frozenset((1, 2)),  # ratio and mode
    ("", "OneHot"): frozenset((0, 1)),  # indices and depth
    ("", "Range"): frozenset((1,)),  # the end: it says how many there are
    ("", "Resize"): frozenset((1, 2)),  # region of interest and scales
    ("", "Upsample"): frozenset((1,)),
}
