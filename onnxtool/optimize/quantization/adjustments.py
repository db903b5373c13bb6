"""Choose adjustments that reduce rounding errors, based on activations on calibration inputs.

Shape letters: T rows of activations, K their width, N the width of the output.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from onnxtool.optimize.options import MIXED, PER_ROW, STATIC
from onnxtool.optimize.quantization.activations import Activations, Recording
from onnxtool.optimize.quantization.arithmetic import (
    ActivationGrid,
    Adjustment,
    Codes,
    Floats,
    RowGrid,
    damped_factors,
    round_activations,
    round_channel,
    round_together,
    weight_scale,
)
from onnxtool.optimize.quantization.linear_layers import LinearLayer
from onnxtool.progress import counted
from onnxtool.summary import FUSED_OPERATORS

# The fraction of its range that the widest channel keeps; the smoothing scales of the others follow.
_LIMITS = (0.7, 0.5, 0.35, 0.25, 0.18, 0.12)
# A division costs a few percent of the layer's time, so it has to remove at least a fifth of the error.
_WORTHWHILE = 0.8
# The reach of a fixed grid from zero, as a fraction of the largest value on all calibration inputs: a single outlier,
# which may never recur, would leave few steps of the grid for all other values.
_CLIPS = (1.0, 0.85, 0.7, 0.55, 0.4)
# The grid is then widened by this factor, because other texts produce larger values than the calibration texts.
HEADROOM = 1.5
# Less after a normalization, which gives every row the same length.
NORMALIZED_HEADROOM = 1.35
# A fixed grid avoids the operators for per-row grids, and is accepted for up to this multiple of the squared error.
_AFFORDABLE = 2.0
_MOST_COLUMNS = 256  # enough to compare smoothing scales
_FEWEST_CHANNEL = np.float32(1e-6)


@dataclass(frozen=True)
class _Rounding:
    """A rounding of the activations of layers, and the matching rounding of their weights.

    Attributes:
        smoothing_scale: float32 [K]; None for ones.
        grid: the grid of the divided activations; None for one per input, as in an operator with dynamic ranges.
        exact: whether the products may exceed 16 bits.
    """

    activations: Activations
    smoothing_scale: Floats | None
    grid: ActivationGrid | RowGrid | None
    exact: bool

    def rounded(self) -> Floats:
        """Return all rows divided and rounded, float32 [T, K]."""
        by = np.ones(1, np.float32) if self.smoothing_scale is None else self.smoothing_scale
        if self.grid is not None:
            return self.grid.round(np.concatenate(self.activations.rows) / by)
        parts = zip(self.activations.rows, *_ranges(self.activations, by), strict=True)
        return np.concatenate([round_activations(rows / by, low, high) for rows, low, high in parts])

    def loss(self, weight: Floats, wanted: Floats) -> float:
        """Return the squared error of the results with the nearest codes, compared with `wanted` in float32."""
        codes, scale = Adjustment(self.smoothing_scale).quantize(weight, exact=self.exact)
        lost = self.rounded() @ (codes * scale)
        lost -= wanted
        return float(np.square(lost, dtype=np.float64).sum())

    def adjust(self, layers: Sequence[LinearLayer]) -> dict[str, Adjustment]:
        """Return this rounding as the adjustment of each of `layers`, by its name."""
        rounded = self.rounded()
        average, kept = np.concatenate(self.activations.rows).mean(axis=0), rounded.mean(axis=0)
        factors = damped_factors(rounded)
        adjustments = {}
        for layer in layers:
            weight = layer.weight_reader()()
            scaled = _multiplied(weight, self.smoothing_scale)
            scale = weight_scale(scaled, exact=self.exact)
            codes = self._round(scaled, scale, factors)
            # A layer without bias maps zeros to zeros, which padding has if its embedding is zero: a normalization
            # after it would amplify any other number.
            loss = None if layer.bias is None else (average @ weight - kept @ (codes * scale)).astype(np.float32)
            adjustments[layer.name] = Adjustment(self.smoothing_scale, loss, self.grid, codes=codes)
        return adjustments

    def _round(self, weight: Floats, scale: Floats, factors: Sequence[Floats]) -> Codes:
        codes = np.empty(weight.shape, np.int8)

        def one(place: int, values: Floats) -> Floats:
            codes[place] = round_channel(values, scale, codes[place - 1] if place % 2 else None, exact=self.exact)
            rounded: Floats = codes[place] * scale
            return rounded

        round_together(weight, factors, one)
        return codes


@dataclass(frozen=True)
class GroupAdjustments:
    """The adjustments of layers that read the same value, computed when they are first needed."""

    layers: tuple[LinearLayer, ...]
    rounding: _Rounding

    @cached_property
    def by_name(self) -> dict[str, Adjustment]:
        """The adjustment of each layer."""
        return self.rounding.adjust(self.layers)


@dataclass(frozen=True)
class Choice:
    """The adjustments of the layers that read one value.

    Attributes:
        group: the name of the value; the layers share a division.
        free: the adjustments that cost no run time.
        best: the adjustments with the smallest error; the same as `free` if a division is not worth its time.
    """

    group: str
    free: GroupAdjustments
    best: GroupAdjustments


def choose_adjustments(
    layers: Sequence[LinearLayer],
    recording: Recording,
    activations: str,
    *,
    exact: bool = False,
    free_smoothing: Set[str] = frozenset(),
) -> dict[str, Choice]:
    """Return the choice for each layer by name, with one smoothing scale for all layers that read the same value.

    Layers that share a weight (ALBERT) are not divided, because each would need a different weight. They have no
    adjustment if one of them reads the transpose of the others' weight.

    Args:
        layers: linear layers.
        recording: their activations on calibration inputs.
        activations: the quantization mode in a run: `per_row`, `dynamic`, `static` or `mixed`.
        exact: whether the result is only for CPUs on which no product saturates.
        free_smoothing: the names of values that can be divided without an extra node.
    """
    named: dict[str, LinearLayer] = {}
    turned = set()
    for layer in layers:
        if named.setdefault(layer.name, layer).transposed != layer.transposed:
            turned.add(layer.name)
    groups: dict[tuple[str, ...], list[LinearLayer]] = {}
    for name, layer in named.items():
        if name not in turned:
            groups.setdefault(recording.inputs[name], []).append(layer)
    choices: dict[str, Choice] = {}
    for names, group in counted(list(groups.items()), "choosing scales of layers, group"):
        known = Activations.joined([recording.activations[name] for name in names])
        plain, best = (
            GroupAdjustments(tuple(group), one)
            for one in _choose_roundings(group, known, activations, exact=exact, can_divide=len(names) == 1)
        )
        if best.rounding is plain.rounding:
            best = plain
        choice = Choice("/".join(names), best if names[0] in free_smoothing else plain, best)
        choices |= {layer.name: choice for layer in group}
    return choices


def _choose_roundings(
    group: Sequence[LinearLayer], activations: Activations, ranges: str, *, exact: bool, can_divide: bool
) -> tuple[_Rounding, _Rounding]:
    """Return the roundings of least error for `group`: at the lowest cost, and with a division if worthwhile."""
    weight = np.concatenate([_some_columns(layer, len(group)) for layer in group], axis=1)
    wanted = np.concatenate(activations.rows) @ weight

    def best(scales: Sequence[Floats | None], ranges: str, headroom: float) -> tuple[float, _Rounding]:
        """Return the rounding of least error over all smoothing scales, then over all grids, with its error."""
        grids = [_grids(activations, scale, ranges) for scale in scales]
        tried = [_Rounding(activations, scale, one[0], exact) for scale, one in zip(scales, grids, strict=True)]
        losses = [one.loss(weight, wanted) for one in tried]
        place = int(np.argmin(losses))
        others = [replace(tried[place], grid=grid) for grid in grids[place][1:]]
        found = [(losses[place], tried[place]), *((one.loss(weight, wanted), one) for one in others)]
        loss, chosen = min(found, key=lambda one: one[0])
        return loss, _widened(chosen, headroom)

    def both(ranges: str, headroom: float = HEADROOM) -> tuple[_Rounding, _Rounding]:
        plain_loss, plain = best((None,), ranges, headroom)
        if not can_divide:
            return plain, plain
        divided_loss, divided = best(_smoothing_scales(activations), ranges, headroom)
        return plain, divided if divided_loss < _WORTHWHILE * plain_loss else plain

    if ranges != MIXED:
        return both(ranges)
    rows = both(PER_ROW)
    if not all(_is_normalized(layer.value) for layer in group):
        return rows
    # A division takes less time than per-row scales.
    _, fixed = both(STATIC, NORMALIZED_HEADROOM)
    is_affordable = fixed.loss(weight, wanted) <= _AFFORDABLE * rows[0].loss(weight, wanted)
    return (fixed, fixed) if is_affordable else rows


def _is_normalized(value: ir.Value) -> bool:
    """Return whether a normalization computes `value`."""
    node = value.producer()
    if node is None or node.outputs[0] is not value:
        return False
    return "::".join(filter(None, (node.domain, node.op_type))) in FUSED_OPERATORS["layer_normalization"]


def _grids(
    activations: Activations, smoothing_scale: Floats | None, ranges: str
) -> tuple[ActivationGrid | RowGrid | None, ...]:
    """Return candidate grids for activations; smoothing scales are compared with the first."""
    by = np.ones(1, np.float32) if smoothing_scale is None else smoothing_scale
    if ranges == PER_ROW:
        return RowGrid.candidates(np.concatenate(activations.rows) / by)
    if ranges != STATIC:
        return (None,)
    lows, highs = _ranges(activations, by)
    low, high = min(lows), max(highs)
    limits = [clip * max(-low, high) for clip in _CLIPS]
    return tuple(ActivationGrid.over(max(low, -limit), min(high, limit)) for limit in limits)


def _widened(rounding: _Rounding, headroom: float) -> _Rounding:
    """Return a rounding whose fixed grid has room for larger values than the calibration texts produce."""
    grid = rounding.grid
    if not isinstance(grid, ActivationGrid):
        return rounding
    return replace(rounding, grid=replace(grid, scale=np.float32(grid.scale * headroom)))


def _ranges(activations: Activations, by: Floats) -> tuple[list[float], list[float]]:
    """Return the extremes of each calibration input after a division by `by`, float32 [K] or [1]."""
    return [float((low / by).min()) for low in activations.lows], [
        float((high / by).max()) for high in activations.highs
    ]


def _multiplied(weight: Floats, smoothing_scale: Floats | None) -> Floats:
    """Return a weight, float32 [K, N], for activations that are divided by `smoothing_scale`, float32 [K]."""
    return weight if smoothing_scale is None else weight * smoothing_scale[:, None]


def _some_columns(layer: LinearLayer, num_layers: int) -> Floats:
    weight = layer.weight_reader()()
    columns: Floats = weight[:, :: max(1, weight.shape[1] * num_layers // _MOST_COLUMNS)]
    return columns


def _smoothing_scales(activations: Activations) -> list[Floats]:
    """Return smoothing scales, float32 [K], that reduce the widest channels to a fraction of their range."""
    widths = np.maximum(np.max(activations.highs, axis=0), -np.min(activations.lows, axis=0))
    widths = np.maximum(widths, _FEWEST_CHANNEL)
    return [
        np.maximum(widths / (widths.max() * np.float32(limit)), np.float32(1)).astype(np.float32) for limit in _LIMITS
    ]
