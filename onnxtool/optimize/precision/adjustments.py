"""Choose what makes products easier to round, from what they are given on calibration inputs.

Letters of shapes: T rows of activations, K their width, N the width of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxtool.optimize.precision.activations import Activations, Recording
from onnxtool.optimize.precision.products import Product
from onnxtool.optimize.precision.quantization import Adjustment, Floats, round_activations, round_weight

# How much of the largest channel's range is left to it; the divisors of the others follow.
_LIMITS = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12)
# A division costs a few percent of the product's time: it has to take away a fifth of the error at least.
_WORTHWHILE = 0.8
_MOST_COLUMNS = 256  # enough to tell divisors apart; each has a scale of its own, so that a part of them is exact
_FEWEST_CHANNEL = np.float32(1e-6)


def choose_adjustments(products: Sequence[Product], recording: Recording) -> dict[str, Adjustment]:
    """Return the adjustment of each of `products` by its name, with one divisor for all that read the same value.

    Products that share their weight (ALBERT's layers) have none: each would need another one.
    """
    groups: dict[str, list[Product]] = {}
    for product in products:
        names = recording.inputs.get(product.name, ())
        if len(names) == 1:
            groups.setdefault(names[0], []).append(product)
    adjustments = {}
    for name, group in groups.items():
        activations = recording.activations[name]
        divisor = _choose_divisor(group, activations)
        for product in group:
            adjustments[product.name] = Adjustment(divisor, _average_loss(product, activations, divisor))
    return adjustments


@dataclass(frozen=True)
class _Rounding:
    """Rows of activations before and after rounding, each float32 [T, K]; `rounded` is divided."""

    exact: Floats
    rounded: Floats

    @classmethod
    def of(cls, activations: Activations, divisor: Floats | None) -> _Rounding:
        """Round each calibration input as a whole, which is how the operator finds its range."""
        parts = []
        for low, high, rows in zip(activations.lows, activations.highs, activations.rows, strict=True):
            by = np.float32(1) if divisor is None else divisor
            parts.append(round_activations(rows / by, float((low / by).min()), float((high / by).max())))
        return cls(np.concatenate(activations.rows), np.concatenate(parts))


def _choose_divisor(group: Sequence[Product], activations: Activations) -> Floats | None:
    """Return the divisor with which the products of `group` lose least; None where none is worth its time."""
    weight = np.concatenate([_some_columns(product, len(group)) for product in group], axis=1)
    exact = np.concatenate(activations.rows) @ weight
    plain = _squared_loss(weight, exact, activations, None)
    losses = {limit: _squared_loss(weight, exact, activations, one) for limit, one in _divisors(activations)}
    best = min(losses, key=losses.__getitem__)
    return dict(_divisors(activations))[best] if losses[best] < _WORTHWHILE * plain else None


def _some_columns(product: Product, num_products: int) -> Floats:
    weight = product.weight_reader()()
    columns: Floats = weight[:, :: max(1, weight.shape[1] * num_products // _MOST_COLUMNS)]
    return columns


def _divisors(activations: Activations) -> Iterator[tuple[float, Floats]]:
    """Yield divisors, float32 [K], that bring the channels of the widest range down to a part of it."""
    widths = np.maximum(np.max(activations.highs, axis=0), -np.min(activations.lows, axis=0))
    widths = np.maximum(widths, _FEWEST_CHANNEL)
    for limit in _LIMITS:
        yield limit, np.maximum(widths / (widths.max() * np.float32(limit)), np.float32(1)).astype(np.float32)


def _squared_loss(weight: Floats, exact: Floats, activations: Activations, divisor: Floats | None) -> float:
    rounded = _Rounding.of(activations, divisor).rounded @ round_weight(_multiplied(weight, divisor))
    return float(np.square(rounded - exact, dtype=np.float64).sum())


def _multiplied(weight: Floats, divisor: Floats | None) -> Floats:
    return weight if divisor is None else weight * divisor[:, None]


def _average_loss(product: Product, activations: Activations, divisor: Floats | None) -> Floats:
    """Return what rounding takes from the product on average, float32 [N]."""
    weight = product.weight_reader()()
    rounding = _Rounding.of(activations, divisor)
    lost = rounding.exact.mean(axis=0) @ weight - rounding.rounded.mean(axis=0) @ round_weight(
        _multiplied(weight, divisor)
    )
    average: Floats = lost.astype(np.float32)
    return average
