"""int8 arithmetic in NumPy: rounding of weights and activations, and conditions for exact products.

onnxruntime multiplies uint8 activations with int8 weights. On x86 CPUs without VNNI (AVX2 and AVX-512 alike) it adds
the products of two neighbours along K in 16 bits, where they saturate; on all others sums are exact. Weights whose
neighbours cannot exceed 16 bits give the same sums on every CPU, whatever the activations are.

Rounding each weight to the nearest code is best for activations with independent channels. A model's channels are
correlated: the error of one channel can be compensated by channels that vary with it. After OBS (Hassibi and Stork,
1993) and GPTQ (Frantar et al., arXiv:2210.17323).

Shape letters: T rows of activations, K their width, N the width of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from onnxtool.progress import counted
from onnxtool.runtime.machine import available_cores, release_freed_memory

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_LARGEST_WEIGHT = 127  # -128 is left out: the grid is symmetric
NUM_STEPS = 255  # of uint8 activations
LARGEST_PAIR = (2**15 - 1) // NUM_STEPS  # the most that two neighbours of one sign may add up to
SMALLEST = np.float32(1e-30)  # the scale of a column of zeros


@dataclass(frozen=True)
class ActivationGrid:
    """The values of uint8 activations: `(code - zero) * scale`."""

    scale: np.float32
    zero: int

    @classmethod
    def over(cls, lowest: float, highest: float) -> ActivationGrid | None:
        """Return the grid over a range, as in ONNX's DynamicQuantizeLinear; None if the range is only zero.

        The range includes zero, which is exact.
        """
        low, high = min(0.0, lowest), max(0.0, highest)
        scale = np.float32((high - low) / NUM_STEPS)
        return cls(scale, int(np.clip(np.rint(-low / scale), 0, NUM_STEPS))) if scale else None

    def round(self, values: Floats) -> Floats:
        """Quantize and dequantize `values`, clipping to the grid."""
        codes = np.clip(np.rint(values / self.scale) + self.zero, 0, NUM_STEPS)
        rounded: Floats = ((codes - self.zero) * self.scale).astype(np.float32)
        return rounded


@dataclass(frozen=True)
class RowGrid:
    """The values of uint8 activations with a scale per row and a common zero: `(code - zero) * scale`.

    The result for a row does not depend on other rows, and so not on the rest of the batch. The zero is strictly inside
    the range, 1 to 254, so that every row fits its grid, whatever the signs in calibration rows.
    """

    zero: int

    @property
    def step(self) -> np.float32:
        """The step of a row whose reach is 1."""
        return np.float32(1 / (NUM_STEPS - self.zero))

    @property
    def mirror(self) -> np.float32:
        """The factor that converts a negative number to its required reach."""
        return np.float32(-(NUM_STEPS - self.zero) / self.zero)

    def reach(self, values: Floats) -> Floats:
        """Return the largest number of each row's grid for `values`, float32 [T, K]: float32 [T, 1]."""
        highest, lowest = values.max(axis=1, keepdims=True), values.min(axis=1, keepdims=True)
        largest: Floats = np.maximum(np.maximum(highest, lowest * self.mirror), SMALLEST)
        return largest

    def round(self, values: Floats) -> Floats:
        """Quantize and dequantize `values`, float32 [T, K], clipping to the grid."""
        reach = self.reach(values)
        codes = np.clip(np.rint(values / reach / self.step) + self.zero, 0, NUM_STEPS)
        rounded: Floats = ((codes - self.zero) * self.step * reach).astype(np.float32)
        return rounded

    @classmethod
    def middle(cls) -> RowGrid:
        """Return the grid with zero in the middle."""
        return cls(NUM_STEPS // 2 + 1)

    @classmethod
    def candidates(cls, values: Floats) -> tuple[RowGrid, ...]:
        """Return candidate grids for rows like `values`, float32 [T, K]; the last has zero in the middle."""
        low, high = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
        parts = -low / np.maximum(high - low, SMALLEST)
        zeros = [
            int(np.clip(np.rint(NUM_STEPS * np.quantile(parts, quantile)), 1, NUM_STEPS - 1))
            for quantile in (0.5, 0.9, 1)
        ]
        return tuple(cls(zero) for zero in dict.fromkeys((*zeros, cls.middle().zero)))


@dataclass(frozen=True)
class Adjustment:
    """Changes to a linear layer that reduce its rounding error without changing its function.

    Attributes:
        smoothing_scale: float32 [K]; the activations are divided by it and the rows of the weight multiplied by it.
            None for ones. An outlier in one channel leaves few steps of the grid for all others: this moves it from
            the activations, which share one scale, to the weight, which has one scale per column (SmoothQuant,
            arXiv:2211.10438).
        shift: float32 [N], added to the output: the average loss by rounding. None for zeros.
        activations: the grid of the divided activations; None for the grid of the range measured in each run.
        result_smoothing_scale: float32 [N]; output and bias are divided by it, for the layer that reads them next. None
            for ones.
        codes: int8 [K, N], the weight multiplied by `smoothing_scale` as it was rounded; None for the nearest codes.
    """

    smoothing_scale: Floats | None = None
    shift: Floats | None = None
    activations: ActivationGrid | RowGrid | None = None
    result_smoothing_scale: Floats | None = None
    codes: Codes | None = None

    def scaled(self, weight: Floats) -> Floats:
        """Return a weight, float32 [K, N], for activations that are divided by `smoothing_scale`."""
        return weight if self.smoothing_scale is None else weight * self.smoothing_scale[:, None]

    def quantize(self, weight: Floats, *, exact: bool = False) -> tuple[Codes, Floats]:
        """Return the int8 of a weight, float32 [K, N], and its scale, float32 [N]; `exact` as in `weight_scale`."""
        scaled = self.scaled(weight)
        scale = weight_scale(scaled, exact=exact)
        return (nearest_codes(scaled, scale) if self.codes is None else self.codes), scale


PLAIN = Adjustment()


def weight_scale(weight: Floats, *, exact: bool = False) -> Floats:
    """Return the scale of each column of a weight, float32 [K, N]: float32 [N].

    The largest weight of a column has the code 127 or -127, and two neighbours of one sign add up to at most
    `LARGEST_PAIR`, so that no product saturates. With `exact`, for CPUs on which none does, neighbours do not count.
    """
    steps = np.maximum(weight.max(axis=0), -weight.min(axis=0)) / _LARGEST_WEIGHT
    if not exact and len(weight) > 1:
        even = len(weight) // 2 * 2
        for sign in (1, -1):
            parts = np.maximum(sign * weight, 0)
            # Each of the two may be rounded up by half a step.
            pairs = (parts[0:even:2] + parts[1:even:2]).max(axis=0)
            steps = np.maximum(steps, pairs / (LARGEST_PAIR - 1))
    scale: Floats = np.maximum(steps, SMALLEST).astype(np.float32)
    return scale


def nearest_codes(weight: Floats, scale: Floats) -> Codes:
    """Round a weight, float32 [K, N], to the nearest codes, int8 [K, N] in -127..127."""
    codes: Codes = np.rint(weight / scale).astype(np.int8)
    return codes


def round_channel(values: Floats, scale: Floats, before: Floats | None, *, exact: bool = False) -> Floats:
    """Round the weights of one channel, float32 [N], to codes, float32 [N].

    Args:
        values: the weights.
        scale: of the columns, float32 [N].
        before: the codes of the channel before, with which these are added in 16 bits; None at an even place.
        exact: as for `weight_scale`.
    """
    codes: Floats = np.rint(values / scale)
    low: Floats | int = -_LARGEST_WEIGHT
    high: Floats | int = _LARGEST_WEIGHT
    if before is not None and not exact:
        low, high = -LARGEST_PAIR - np.minimum(before, -1), LARGEST_PAIR - np.maximum(before, 1)
    np.clip(codes, low, high, out=codes)
    return codes


def round_activations(values: Floats, lowest: float, highest: float) -> Floats:
    """Return the values of the uint8 of `values`, which all lie in `lowest`..`highest`."""
    grid = ActivationGrid.over(lowest, highest)
    return values if grid is None else grid.round(values)


# Channels that compensate for each other. Larger blocks hardly gain accuracy, and time grows quadratically.
_BLOCK = 1024
_AT_ONCE = 64  # channels that are brought up to date by one product
# Added to the diagonal, as a part of its mean, and more where there are fewer rows than channels. Other texts have
# other rows: the smaller this is, the more the weights lean on correlations that happened to be there.
_DAMPING = 1.0


def each_in_parallel(
    function: Callable[[_Item], _Result], items: Sequence[_Item], name: str
) -> Iterator[tuple[_Item, _Result]]:
    """Yield each of `items` with its result, one item per core at a time; report the progress under `name`.

    Each item's products take one thread. OpenBLAS's threads spin while they wait for each other: on two busy cores, a
    factorization of 1024 channels took 1.3 s instead of 0.03 s.
    """
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(available_cores()) as workers:
        results = workers.map(function, items)
        try:
            yield from zip(counted(items, name), results, strict=True)
        finally:
            workers.shutdown(cancel_futures=True)
            release_freed_memory()


def damped_factors(rows: Floats) -> list[Floats]:
    """Return the statistics of activations, float32 [T, K], that rounding needs: one matrix per block of channels.

    It is the unit lower triangular F in `F.T @ D @ F`, the damped second moments, with D diagonal: an error of one in
    channel j changes the result like `F[k, j]` in a later channel k, once the channels after k are rounded (LDLQ,
    arXiv:2307.13304, the same roundings as GPTQ without an inverse).
    """
    factors = []
    for start in range(0, rows.shape[1], _BLOCK):
        part = np.ascontiguousarray(rows[:, start : start + _BLOCK])
        moments = part.T @ part
        mean = float(np.trace(moments)) / len(moments)
        moments[np.diag_indices_from(moments)] += (
            _DAMPING * mean * max(1.0, len(moments) / len(part)) if mean > 0 else 1.0
        )
        # In float32: the damping keeps the condition number below about `_BLOCK`.
        factor = np.linalg.cholesky(moments[::-1, ::-1])[::-1, ::-1].T
        factors.append(np.ascontiguousarray(factor / np.diag(factor)[:, None]))
    return factors


def round_together(weight: Floats, factors: Sequence[Floats], round_values: Callable[[int, Floats], Floats]) -> None:
    """Round a weight channel by channel, compensating each error in the following channels.

    Args:
        weight: float32 [K, N].
        factors: of the activations, from `damped_factors`.
        round_values: rounds weights of the channel at this place of K, float32 [N], and returns their values; it keeps
            their codes itself. Channels come in their order.
    """
    first = 0
    for factor in factors:
        _round_block(weight[first : first + len(factor)], first, factor, round_values)
        first += len(factor)


def _round_block(block: Floats, first: int, factor: Floats, round_values: Callable[[int, Floats], Floats]) -> None:
    """Round a block of channels, float32 [k, N], of which `first` is the first one's place."""
    errors = np.empty_like(block)
    for start in range(0, len(block), _AT_ONCE):
        part = slice(start, min(start + _AT_ONCE, len(block)))
        wanted = block[part] + factor[part, :start] @ errors[:start]
        for channel in range(part.start, part.stop):
            before = slice(start, channel)
            values = wanted[channel - start] + factor[channel, before] @ errors[before]
            errors[channel] = block[channel] - round_values(first + channel, values)
