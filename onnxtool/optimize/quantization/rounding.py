"""Round weights so that the errors of one channel make up for those of others, on the activations of calibration.

Rounding each weight to the nearest code is best for activations whose channels vary independently of each other. Those
of a model do not: what one channel adds too much, channels that vary with it can take away. After OBS (Hassibi and
Stork, 1993) and GPTQ (Frantar et al., arXiv:2210.17323).

Letters of shapes: T rows of activations, K their width, N the width of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onnxtool.optimize.quantization.arithmetic import Floats

# Channels that make up for each other. Beyond, the gain hardly grows, and the time does with the square.
_BLOCK = 1024
_AT_ONCE = 64  # channels after which the rest of the block is brought up to date by one product
# Added to the diagonal, as a part of its mean, and more where there are fewer rows than channels. Other texts have
# other rows: the smaller this is, the more the weights lean on correlations that happened to be there.
_DAMPING = 1.0


def damped_factors(rows: Floats) -> list[Floats]:
    """Return what rounding needs to know about activations, float32 [T, K]: a matrix for each block of channels.

    It is the upper Cholesky factor of the inverse of their damped second moments.
    """
    factors = []
    for start in range(0, rows.shape[1], _BLOCK):
        part = rows[:, start : start + _BLOCK].astype(np.float64)
        moments = part.T @ part
        mean = float(np.trace(moments)) / len(moments)
        moments[np.diag_indices_from(moments)] += (
            _DAMPING * mean * max(1.0, len(moments) / len(part)) if mean > 0 else 1.0
        )
        factors.append(np.linalg.cholesky(np.linalg.inv(moments)).T.astype(np.float32))
    return factors


def round_together(weight: Floats, factors: Sequence[Floats], round_channel: Callable[[int, Floats], Floats]) -> None:
    """Round a weight channel by channel; the channels that follow make up for the error of each.

    Args:
        weight: float32 [K, N].
        factors: of the activations, from `damped_factors`.
        round_channel: rounds weights of the channel at this place of K, float32 [N], and returns their values; it keeps
            their codes itself. Channels come in their order.
    """
    rest, start = np.array(weight, np.float32), 0
    for factor in factors:
        _round_block(rest, start, factor, round_channel)
        start += len(factor)


def _round_block(weight: Floats, first: int, factor: Floats, round_channel: Callable[[int, Floats], Floats]) -> None:
    """Round the channels of `weight`, float32 [K, N], that `factor` is of, from `first` on; `weight` is changed."""
    block = weight[first : first + len(factor)]
    for start in range(0, len(block), _AT_ONCE):
        part = slice(start, min(start + _AT_ONCE, len(block)))
        errors = np.empty_like(block[part])
        for channel in range(part.start, part.stop):
            error = (block[channel] - round_channel(first + channel, block[channel])) / factor[channel, channel]
            errors[channel - start] = error
            following = slice(channel + 1, part.stop)
            block[following] -= factor[channel, following, None] * error
        following = slice(part.stop, len(block))
        block[following] -= factor[part, following].T @ errors
