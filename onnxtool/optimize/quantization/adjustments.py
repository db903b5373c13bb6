"""Choose what makes products easier to round, from what they are given on calibration inputs.

Letters of shapes: T rows of activations, K their width, N the width of a product.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from onnxtool.optimize.quantization.activations import Activations, Recording
from onnxtool.optimize.quantization.arithmetic import (
    ActivationGrid,
    Adjustment,
    Floats,
    round_activations,
    round_weight,
)
from onnxtool.optimize.quantization.linear_layers import Product

# How much of the largest channel's range is left to it; the divisors of the others follow.
_LIMITS = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12)
# A division costs a few percent of the product's time: it has to take away a fifth of the error at least.
_WORTHWHILE = 0.8
# How far from zero a fixed grid reaches, as a part of the largest value on all calibration inputs: a single outlier,
# which may never come again, would take the grid from all others.
_CLIPS = (1.0, 0.85, 0.7, 0.55, 0.4)
# How much further than that it reaches in the end: other texts give larger values than those that were tried.
HEADROOM = 1.5
_MOST_COLUMNS = 256  # enough to tell divisors apart; each has a scale of its own, so that a part of them is exact
_FEWEST_CHANNEL = np.float32(1e-6)


@dataclass(frozen=True)
class Choice:
    """What makes one product easier to round.

    Attributes:
        group: the name of the value that it reads; products of one group share a division.
        free: the adjustment that takes no time in a run.
        best: the one with which the product loses least; the same where a division would not be worth its time.
    """

    group: str
    free: Adjustment
    best: Adjustment


def choose_adjustments(
    products: Sequence[Product], recording: Recording, *, static: bool = False, free_divisions: Set[str] = frozenset()
) -> dict[str, Choice]:
    """Return the adjustments of each of `products` by its name, with one divisor for all that read the same value.

    Products that share their weight (ALBERT's layers) have none: each would need another one.

    Args:
        products: products with weights.
        recording: what they are given on calibration inputs.
        static: whether activations get one grid for all inputs, in place of the range of each run.
        free_divisions: the names of values that what makes them can divide, without a multiplication of their own.
    """
    groups: dict[str, list[Product]] = {}
    for product in products:
        names = recording.inputs.get(product.name, ())
        if len(names) == 1:
            groups.setdefault(names[0], []).append(product)
    choices = {}
    for name, group in groups.items():
        plain, best = _choose_roundings(group, recording.activations[name], _CLIPS if static else (None,))
        for product in group:
            adjusted = best.adjustment(product)
            unchanged = best is plain or name in free_divisions
            choices[product.name] = Choice(name, adjusted if unchanged else plain.adjustment(product), adjusted)
    return choices


@dataclass(frozen=True)
class _Rounding:
    """A way to round the activations of products.

    Attributes:
        divisor: float32 [K]; None for ones.
        clip: how far from zero one grid reaches, as a part of the largest value of all calibration inputs; None for a
            grid for each of them, which is what an operator does that finds its range in each run.
        headroom: how much further the one grid reaches.
    """

    activations: Activations
    divisor: Floats | None
    clip: float | None
    headroom: float = 1.0

    @property
    def grid(self) -> ActivationGrid | None:
        """The one grid, where there is one."""
        if self.clip is None:
            return None
        low, high = (choose(ends) for choose, ends in zip((min, max), self._ranges(), strict=True))
        limit = self.clip * max(-low, high)
        return ActivationGrid.over(self.headroom * max(low, -limit), self.headroom * min(high, limit))

    def rounded(self) -> Floats:
        """Return all rows divided and rounded, float32 [T, K]."""
        by, grid = self._divided_by(), self.grid
        if self.clip is not None:
            rows = np.concatenate(self.activations.rows) / by
            return rows if grid is None else grid.round(rows)
        parts = zip(self.activations.rows, *self._ranges(), strict=True)
        return np.concatenate([round_activations(rows / by, low, high) for rows, low, high in parts])

    def adjustment(self, product: Product) -> Adjustment:
        """Return what this rounding makes of one of the products."""
        return Adjustment(self.divisor, self._average_loss(product), self.grid)

    def _average_loss(self, product: Product) -> Floats:
        """Return what rounding takes from a product on average, float32 [N]."""
        weight = product.weight_reader()()
        exact = np.concatenate(self.activations.rows).mean(axis=0) @ weight
        kept = self.rounded().mean(axis=0) @ round_weight(_multiplied(weight, self.divisor))
        average: Floats = (exact - kept).astype(np.float32)
        return average

    def _divided_by(self) -> Floats:
        return np.ones(1, np.float32) if self.divisor is None else self.divisor

    def _ranges(self) -> tuple[list[float], list[float]]:
        """Return the extremes of each calibration input, divided."""
        by, activations = self._divided_by(), self.activations
        return [float((low / by).min()) for low in activations.lows], [
            float((high / by).max()) for high in activations.highs
        ]


def _choose_roundings(
    group: Sequence[Product], activations: Activations, clips: Sequence[float | None]
) -> tuple[_Rounding, _Rounding]:
    """Return the roundings with which the products of `group` lose least: undivided, and divided if worth its time."""
    weight = np.concatenate([_some_columns(product, len(group)) for product in group], axis=1)
    exact = np.concatenate(activations.rows) @ weight

    def loss(rounding: _Rounding) -> float:
        lost = rounding.rounded() @ round_weight(_multiplied(weight, rounding.divisor))
        lost -= exact
        return float(np.square(lost, dtype=np.float64).sum())

    def best(divisors: Sequence[Floats | None]) -> tuple[float, _Rounding]:
        """Return the one that loses least of all divisors, and then of all clips, with what it loses."""
        tried = [(loss(one), one) for one in (_Rounding(activations, divisor, clips[0]) for divisor in divisors)]
        least = min(tried, key=lambda one: one[0])
        clipped = [replace(least[1], clip=clip) for clip in clips[1:]]
        return min([least, *((loss(one), one) for one in clipped)], key=lambda one: one[0])

    plain_loss, plain = best((None,))
    divided_loss, divided = best(_divisors(activations))
    plain, divided = (replace(one, headroom=HEADROOM) for one in (plain, divided))
    return plain, divided if divided_loss < _WORTHWHILE * plain_loss else plain


def _multiplied(weight: Floats, divisor: Floats | None) -> Floats:
    """Return a weight, float32 [K, N], for activations that are divided by `divisor`, float32 [K]."""
    return weight if divisor is None else weight * divisor[:, None]


def _some_columns(product: Product, num_products: int) -> Floats:
    weight = product.weight_reader()()
    columns: Floats = weight[:, :: max(1, weight.shape[1] * num_products // _MOST_COLUMNS)]
    return columns


def _divisors(activations: Activations) -> list[Floats]:
    """Return divisors, float32 [K], that bring the channels of the widest range down to a part of it."""
    widths = np.maximum(np.max(activations.highs, axis=0), -np.min(activations.lows, axis=0))
    widths = np.maximum(widths, _FEWEST_CHANNEL)
    return [
        np.maximum(widths / (widths.max() * np.float32(limit)), np.float32(1)).astype(np.float32) for limit in _LIMITS
    ]
