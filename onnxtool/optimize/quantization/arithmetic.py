"""The arithmetic of int8 in NumPy: how onnxruntime's DynamicQuantizeMatMul rounds weights and activations.

Letters of shapes: T rows of activations, K their width, N the width of the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_LARGEST_WEIGHT = 127  # -128 is left out: the grid is symmetric, and a sum of two products fits int16
_NUM_STEPS = 255  # of uint8 activations
_SMALLEST = np.float32(1e-30)  # the scale of a column of zeros


@dataclass(frozen=True)
class ActivationGrid:
    """The values of uint8 activations: `(code - zero) * scale`."""

    scale: np.float32
    zero: int

    @classmethod
    def over(cls, lowest: float, highest: float) -> ActivationGrid | None:
        """Return the grid over a range, as ONNX defines DynamicQuantizeLinear; None where the range is zero alone.

        The range includes zero, which is exact.
        """
        low, high = min(0.0, lowest), max(0.0, highest)
        scale = np.float32((high - low) / _NUM_STEPS)
        return cls(scale, int(np.clip(np.rint(-low / scale), 0, _NUM_STEPS))) if scale else None

    def round(self, values: Floats) -> Floats:
        """Return the values of the codes of `values`; those beyond the grid become its ends."""
        codes = np.clip(np.rint(values / self.scale) + self.zero, 0, _NUM_STEPS)
        rounded: Floats = ((codes - self.zero) * self.scale).astype(np.float32)
        return rounded


@dataclass(frozen=True)
class Adjustment:
    """Changes to a linear layer that reduce its rounding error, without changing what it computes.

    Attributes:
        smoothing_scale: float32 [K]; the activations are divided by it and the rows of the weight multiplied by it.
            None for ones. An outlier in one channel leaves few steps of the grid for all others: this moves it from
            the activations, which share one scale, to the weight, which has one scale per column (SmoothQuant,
            arXiv:2211.10438).
        shift: float32 [N], added to the output: the average loss by rounding. None for zeros.
        activations: the grid of the divided activations; None for that of the range measured in each run.
        result_smoothing_scale: float32 [N]; output and bias are divided by it, for the layer that reads them next. None
            for ones.
    """

    smoothing_scale: Floats | None = None
    shift: Floats | None = None
    activations: ActivationGrid | None = None
    result_smoothing_scale: Floats | None = None


PLAIN = Adjustment()


def quantize_weight(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round a weight, float32 [K, N], to int8 [K, N] in -127..127 and one scale per column, float32 [N]."""
    largest = np.maximum(weight.max(axis=0), -weight.min(axis=0))
    scale = np.maximum(largest / _LARGEST_WEIGHT, _SMALLEST).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


def round_weight(weight: Floats) -> Floats:
    """Return the values of the int8 weight, float32 [K, N]."""
    rounded, scale = quantize_weight(weight)
    return rounded.astype(np.float32) * scale


def round_activations(values: Floats, lowest: float, highest: float) -> Floats:
    """Return the values of the uint8 of `values`, which all lie in `lowest`..`highest`."""
    grid = ActivationGrid.over(lowest, highest)
    return values if grid is None else grid.round(values)
