"""Round weights so that the errors of one channel make up for those of others, on the activations of calibration.

Rounding each weight to the nearest code is best for activations whose channels vary independently of each other. Those
of a model do not: what one channel adds too much, channels that vary with it can take away. After OBS (Hassibi and
Stork, 1993) and GPTQ (Frantar et al., arXiv:2210.17323).

Letters of shapes: T rows of activations, K their width, N the width of the output.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxtool.optimize.quantization.arithmetic import LARGEST_PAIR, Codes, Floats

# Channels that make up for each other. Beyond, the gain does not grow, and the time does with the square.
_BLOCK = 1024
_AT_ONCE = 64  # channels after which the rest of the block is brought up to date by one product
# Added to the diagonal, as a part of its mean. Calibration knows few rows, and other texts have others: the smaller
# this is, the more the weights lean on correlations that happened to be there.
_DAMPING = 0.5


def damped_inverses(rows: Floats) -> list[Floats]:
    """Return what rounding needs to know about activations, float32 [T, K]: a matrix for each block of channels.

    It is the upper Cholesky factor of the inverse of their damped second moments.
    """
    factors = []
    for start in range(0, rows.shape[1], _BLOCK):
        part = rows[:, start : start + _BLOCK].astype(np.float64)
        moments = part.T @ part
        mean = float(np.trace(moments)) / len(moments)
        moments[np.diag_indices_from(moments)] += _DAMPING * mean if mean > 0 else 1.0
        factors.append(np.linalg.cholesky(np.linalg.inv(moments)).T.astype(np.float32))
    return factors


def round_together(weight: Floats, scale: Floats, factors: list[Floats], *, exact: bool = False) -> Codes:
    """Round a weight channel by channel; the channels that follow make up for the error of each.

    Args:
        weight: float32 [K, N].
        scale: of each column, float32 [N].
        factors: of the activations, from `damped_inverses`.
        exact: whether neighbours may add up to more than `LARGEST_PAIR`, for CPUs on which no product saturates.

    Returns:
        codes: int8 [K, N] in -127..127.
    """
    codes = np.empty(weight.shape, np.int8)
    steps = (weight / scale).astype(np.float32)
    for number, factor in enumerate(factors):
        block = slice(number * _BLOCK, number * _BLOCK + len(factor))
        _round_block(steps[block], factor, codes[block], exact=exact)
    return codes


def _round_block(steps: Floats, factor: Floats, codes: Codes, *, exact: bool) -> None:
    """Round `steps`, float32 [k, N], into `codes`; it begins at an even channel, and is changed."""
    for start in range(0, len(steps), _AT_ONCE):
        part = slice(start, min(start + _AT_ONCE, len(steps)))
        errors = np.empty_like(steps[part])
        for channel in range(part.start, part.stop):
            found = np.clip(np.rint(steps[channel]), -127, 127)
            if channel % 2 and not exact:
                found = _within_pair(found, codes[channel - 1])
            codes[channel] = found
            error = (steps[channel] - found) / factor[channel, channel]
            errors[channel - start] = error
            following = slice(channel + 1, part.stop)
            steps[following] -= factor[channel, following, None] * error
        rest = slice(part.stop, len(steps))
        steps[rest] -= factor[part, rest].T @ errors


def _within_pair(found: Floats, neighbour: NDArray[np.int8]) -> Floats:
    """Return codes, float32 [N], that add up with their neighbours of the same sign to `LARGEST_PAIR` at most."""
    other = neighbour.astype(np.float32)
    within: Floats = np.clip(found, -LARGEST_PAIR - np.minimum(other, 0), LARGEST_PAIR - np.maximum(other, 0))
    return within
