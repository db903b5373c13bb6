"""Choose adjustments that reduce rounding errors, based on activations on calibration inputs.

Shape letters: T rows of activations, K their width, N the width of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

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
    each_in_parallel,
    round_activations,
    round_channel,
    round_together,
    weight_scale,
)
from onnxtool.optimize.quantization.linear_layers import LinearLayer
from onnxtool.summary import FUSED_OPERATORS

# The fraction of its range that the widest channel keeps; the smoothing scales of the others follow.
_LIMITS = (0.85, 0.7, 0.6, 0.5, 0.42, 0.35, 0.3, 0.25, 0.21, 0.18, 0.15, 0.12, 0.1)
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
_MOST_COLUMNS, _MOST_ROWS = 256, 512  # enough to compare roundings
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

    def loss(self, weight: Floats, target: Floats) -> float:
        """Return the squared error of the results with the nearest codes, compared with `target` in float32."""
        codes, scale = Adjustment(self.smoothing_scale).quantize(weight, exact=self.exact)
        lost = self.rounded() @ (codes * scale)
        lost -= target
        return float(np.square(lost, dtype=np.float64).sum())

    def adjust(self, layers: Sequence[LinearLayer]) -> dict[str, Adjustment]:
        """Return this rounding as the adjustment of each of `layers`, by its name."""
        rounded = self.rounded()
        average, kept = np.concatenate(self.activations.rows).mean(axis=0), rounded.mean(axis=0)
        # Columns do not depend on each other, so those of all layers are rounded at once.
        weights = [layer.weight_reader()() for layer in layers]
        scaled = Adjustment(self.smoothing_scale).scaled(np.concatenate(weights, axis=1))
        scale = weight_scale(scaled, exact=self.exact)
        codes = self._round(scaled, scale, damped_factors(rounded))
        adjustments, first = {}, 0
        for layer, weight in zip(layers, weights, strict=True):
            own = slice(first, first + weight.shape[1])
            # A layer without bias maps zeros to zeros, which padding has if its embedding is zero: a normalization
            # after it would amplify any other number.
            lost = average @ weight - (kept @ codes[:, own]) * scale[own]
            shift = None if layer.bias is None else lost.astype(np.float32)
            own_codes = np.ascontiguousarray(codes[:, own])
            adjustments[layer.name] = Adjustment(self.smoothing_scale, shift, self.grid, codes=own_codes)
            first = own.stop
        return adjustments

    def _round(self, weight: Floats, scale: Floats, factors: Sequence[Floats]) -> Codes:
        codes, before = np.empty(weight.shape, np.int8), scale

        def one(place: int, values: Floats) -> Floats:
            nonlocal before
            before = round_channel(values, scale, before if place % 2 else None, exact=self.exact)
            codes[place] = before
            return before * scale

        round_together(weight, factors, one)
        return codes


@dataclass(frozen=True)
class GroupAdjustments:
    """The adjustments of layers that read the same value, computed when they are first needed."""

    layers: tuple[LinearLayer, ...]
    rounding: _Rounding
    _found: dict[str, Adjustment] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Adjustment]:
        """The adjustment of each layer."""
        if not self._found:
            self._found.update(self.rounding.adjust(self.layers))
        return self._found


@dataclass(frozen=True)
class AdjustmentChoice:
    """The adjustments of the layers that read one value.

    Attributes:
        group: the name of the value; the layers share a division.
        free: the adjustments that cost no run time.
    """

    group: str
    free: GroupAdjustments
    _find_divided: Callable[[], _Rounding | None]
    _best: list[GroupAdjustments] = field(default_factory=list)  # a cached_property would lock out other threads

    @property
    def best(self) -> GroupAdjustments:
        """The adjustments with the smallest error; the same as `free` if a division is not worth its time.

        They are searched for when they are first needed.
        """
        if not self._best:
            divided = self._find_divided()
            self._best.append(self.free if divided is None else GroupAdjustments(self.free.layers, divided))
        return self._best[0]


def choose_adjustments(
    layers: Sequence[LinearLayer],
    recording: Recording,
    activations: str,
    *,
    exact: bool = False,
    free_smoothing: Set[str] = frozenset(),
) -> dict[str, AdjustmentChoice]:
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

    def choose(item: tuple[tuple[str, ...], list[LinearLayer]]) -> AdjustmentChoice:
        names, group = item
        known = Activations.joined([recording.activations[name] for name in names])
        search = _Search.of(group, known, exact=exact, can_divide=len(names) == 1)
        plain, find_divided = search.roundings(
            activations, normalized=all(_is_normalized(layer.value) for layer in group)
        )
        if names[0] in free_smoothing:
            plain, find_divided = find_divided() or plain, lambda: None
        return AdjustmentChoice("/".join(names), GroupAdjustments(tuple(group), plain), find_divided)

    choices = each_in_parallel(choose, list(groups.items()), "choosing scales of layers, group")
    return {layer.name: choice for (_, group), choice in choices for layer in group}


@dataclass(frozen=True)
class _Search:
    """The search for the rounding of least error for layers that read the same value.

    Attributes:
        activations: all of them.
        part: the same with enough rows to compare roundings.
        weight: columns of the layers' weights, float32 [K, N].
        wanted: the results on the part, float32 [T, N].
        exact: whether products may exceed 16 bits.
        can_divide: whether the activations may be divided by a smoothing scale.
    """

    activations: Activations
    part: Activations
    weight: Floats
    wanted: Floats
    exact: bool
    can_divide: bool

    @classmethod
    def of(cls, group: Sequence[LinearLayer], activations: Activations, *, exact: bool, can_divide: bool) -> _Search:
        """Prepare the search for the layers in `group`."""
        step = max(1, sum(map(len, activations.rows)) // _MOST_ROWS)
        part = replace(activations, rows=[rows[::step] for rows in activations.rows])
        weight = np.concatenate([_some_columns(layer, len(group)) for layer in group], axis=1)
        return cls(activations, part, weight, np.concatenate(part.rows) @ weight, exact, can_divide)

    def roundings(self, ranges: str, *, normalized: bool) -> tuple[_Rounding, Callable[[], _Rounding | None]]:
        """Return the best rounding at the lowest cost, and what finds a better one with a worthwhile division."""
        if ranges == MIXED:
            rows, ranges = self._best((None,), PER_ROW), PER_ROW
            if normalized:
                # A division takes less time than per-row scales.
                fixed = self._best((None,), STATIC)
                chosen = self._finished(self._divided(fixed, STATIC) or fixed[1], NORMALIZED_HEADROOM)
                if replace(chosen, activations=self.part).loss(self.weight, self.wanted) <= _AFFORDABLE * rows[0]:
                    return chosen, lambda: None
        else:
            rows = self._best((None,), ranges)

        def find_divided() -> _Rounding | None:
            divided = self._divided(rows, ranges)
            return None if divided is None else self._finished(divided)

        return self._finished(rows[1]), find_divided

    def _best(self, scales: Sequence[Floats | None], ranges: str) -> tuple[float, _Rounding]:
        """Return the rounding of least error over all smoothing scales, then over all grids, with its error."""
        grids = [_grids(self.part, scale, ranges) for scale in scales]
        tried = [
            _Rounding(self.part, scale, candidate[0], self.exact)
            for scale, candidate in zip(scales, grids, strict=True)
        ]
        losses = [candidate.loss(self.weight, self.wanted) for candidate in tried]
        place = int(np.argmin(losses))
        alternatives = [replace(tried[place], grid=grid) for grid in grids[place][1:]]
        candidates = [
            (losses[place], tried[place]),
            *((other.loss(self.weight, self.wanted), other) for other in alternatives),
        ]
        return min(candidates, key=lambda candidate: candidate[0])

    def _divided(self, plain: tuple[float, _Rounding], ranges: str) -> _Rounding | None:
        """Return the best rounding with a division; None if it is not worth its time."""
        if not self.can_divide:
            return None
        loss, divided = self._best(_smoothing_scales(self.part), ranges)
        return divided if loss < _WORTHWHILE * plain[0] else None

    def _finished(self, rounding: _Rounding, headroom: float = HEADROOM) -> _Rounding:
        """Return a rounding of all rows whose fixed grid has room for larger values than the calibration texts have."""
        grid = rounding.grid
        if isinstance(grid, ActivationGrid):
            grid = replace(grid, scale=np.float32(grid.scale * headroom))
        return replace(rounding, activations=self.activations, grid=grid)


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


def _ranges(activations: Activations, by: Floats) -> tuple[list[float], list[float]]:
    """Return the extremes of each calibration input after a division by `by`, float32 [K] or [1]."""
    return [float((low / by).min()) for low in activations.lows], [
        float((high / by).max()) for high in activations.highs
    ]


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
