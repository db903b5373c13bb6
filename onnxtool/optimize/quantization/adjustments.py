"""Choose the adjustments that reduce rounding errors, from the activations on calibration inputs.

Letters of shapes: T rows of activations, K their width, N the width of the output.
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
from onnxtool.optimize.quantization.linear_layers import LinearLayer

# The part of its range that the widest channel keeps; the smoothing scales of the others follow.
_LIMITS = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12)
# A division costs a few percent of the layer's time: it has to remove a fifth of the error at least.
_WORTHWHILE = 0.8
# How far a fixed grid reaches from zero, as a part of the largest value on all calibration inputs: a single outlier,
# which may never come again, would leave few steps of the grid for all others.
_CLIPS = (1.0, 0.85, 0.7, 0.55, 0.4)
# The grid is then widened by this factor: other texts give larger values than the calibration texts.
HEADROOM = 1.5
_MOST_COLUMNS = 256  # enough to compare smoothing scales
_FEWEST_CHANNEL = np.float32(1e-6)


@dataclass(frozen=True)
class Choice:
    """The adjustments of one layer.

    Attributes:
        group: the name of its input; layers of one group share a division.
        free: the adjustment that costs no time in a run.
        best: the one with the smallest error; equal to `free` where a division would not be worth its time.
    """

    group: str
    free: Adjustment
    best: Adjustment


def choose_adjustments(
    layers: Sequence[LinearLayer], recording: Recording, *, static: bool = False, free_smoothing: Set[str] = frozenset()
) -> dict[str, Choice]:
    """Return the adjustments of each layer by its name, with one smoothing scale for all that read the same value.

    Layers that share their weight (ALBERT) have none: each would need another one.

    Args:
        layers: linear layers.
        recording: their activations on calibration inputs.
        static: whether activations get one grid for all inputs, in place of the range of each run.
        free_smoothing: the names of values that can be divided without a node of its own.
    """
    groups: dict[str, list[LinearLayer]] = {}
    for layer in layers:
        names = recording.inputs.get(layer.name, ())
        if len(names) == 1:
            groups.setdefault(names[0], []).append(layer)
    choices = {}
    for name, group in groups.items():
        plain, best = _choose_roundings(group, recording.activations[name], _CLIPS if static else (None,))
        for layer in group:
            adjusted = best.adjustment(layer)
            unchanged = best is plain or name in free_smoothing
            choices[layer.name] = Choice(name, adjusted if unchanged else plain.adjustment(layer), adjusted)
    return choices


@dataclass(frozen=True)
class _Rounding:
    """A rounding of the activations of layers.

    Attributes:
        smoothing_scale: float32 [K]; None for ones.
        clip: how far one fixed grid reaches from zero, as a part of the largest value on all calibration inputs; None
            for a grid per input, as an operator with dynamic ranges has it.
        headroom: the factor by which the fixed grid is widened.
    """

    activations: Activations
    smoothing_scale: Floats | None
    clip: float | None
    headroom: float = 1.0

    @property
    def grid(self) -> ActivationGrid | None:
        """The fixed grid; None for one per input."""
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

    def adjustment(self, layer: LinearLayer) -> Adjustment:
        """Return this rounding as the adjustment of a layer."""
        return Adjustment(self.smoothing_scale, self._average_loss(layer), self.grid)

    def _average_loss(self, layer: LinearLayer) -> Floats:
        """Return the average loss of a layer by rounding, float32 [N]."""
        weight = layer.weight_reader()()
        exact = np.concatenate(self.activations.rows).mean(axis=0) @ weight
        kept = self.rounded().mean(axis=0) @ round_weight(_multiplied(weight, self.smoothing_scale))
        average: Floats = (exact - kept).astype(np.float32)
        return average

    def _divided_by(self) -> Floats:
        return np.ones(1, np.float32) if self.smoothing_scale is None else self.smoothing_scale

    def _ranges(self) -> tuple[list[float], list[float]]:
        """Return the extremes of each calibration input after the division."""
        by, activations = self._divided_by(), self.activations
        return [float((low / by).min()) for low in activations.lows], [
            float((high / by).max()) for high in activations.highs
        ]


def _choose_roundings(
    group: Sequence[LinearLayer], activations: Activations, clips: Sequence[float | None]
) -> tuple[_Rounding, _Rounding]:
    """Return the roundings of least error for `group`: without a division, and with one if it is worth its time."""
    weight = np.concatenate([_some_columns(layer, len(group)) for layer in group], axis=1)
    exact = np.concatenate(activations.rows) @ weight

    def loss(rounding: _Rounding) -> float:
        lost = rounding.rounded() @ round_weight(_multiplied(weight, rounding.smoothing_scale))
        lost -= exact
        return float(np.square(lost, dtype=np.float64).sum())

    def best(scales: Sequence[Floats | None]) -> tuple[float, _Rounding]:
        """Return the rounding of least error over all smoothing scales, then over all clips, with its error."""
        tried = [(loss(one), one) for one in (_Rounding(activations, scale, clips[0]) for scale in scales)]
        least = min(tried, key=lambda one: one[0])
        clipped = [replace(least[1], clip=clip) for clip in clips[1:]]
        return min([least, *((loss(one), one) for one in clipped)], key=lambda one: one[0])

    plain_loss, plain = best((None,))
    divided_loss, divided = best(_smoothing_scales(activations))
    plain, divided = (replace(one, headroom=HEADROOM) for one in (plain, divided))
    return plain, divided if divided_loss < _WORTHWHILE * plain_loss else plain


def _multiplied(weight: Floats, smoothing_scale: Floats | None) -> Floats:
    """Return a weight, float32 [K, N], for activations that are divided by `smoothing_scale`, float32 [K]."""
    return weight if smoothing_scale is None else weight * smoothing_scale[:, None]


def _some_columns(layer: LinearLayer, num_layers: int) -> Floats:
    weight = layer.weight_reader()()
    columns: Floats = weight[:, :: max(1, weight.shape[1] * num_layers // _MOST_COLUMNS)]
    return columns


def _smoothing_scales(activations: Activations) -> list[Floats]:
    """Return smoothing scales, float32 [K], that reduce the widest channels to a part of their range."""
    widths = np.maximum(np.max(activations.highs, axis=0), -np.min(activations.lows, axis=0))
    widths = np.maximum(widths, _FEWEST_CHANNEL)
    return [
        np.maximum(widths / (widths.max() * np.float32(limit)), np.float32(1)).astype(np.float32) for limit in _LIMITS
    ]
