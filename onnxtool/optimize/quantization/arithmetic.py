"""The arithmetic of int8 in NumPy: how onnxruntime's DynamicQuantizeMatMul rounds weights and activations.

Letters of shapes: T rows of activations, K their width, N the width of the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnxtool.optimize.quantization.linear_layers import Product

Floats = NDArray[np.float32]

_LARGEST_WEIGHT = 127  # -128 is left out, so that the grid is symmetric and no product of two overflows a pair
_NUM_STEPS = 255  # of uint8 activations
_SMALLEST = np.float32(1e-30)  # the scale of a column of zeros


@dataclass(frozen=True)
class ActivationGrid:
    """The numbers that uint8 activations can be: `(code - zero) * scale`."""

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
        """Return the numbers that the codes of `values` stand for; those beyond the grid become its ends."""
        codes = np.clip(np.rint(values / self.scale) + self.zero, 0, _NUM_STEPS)
        rounded: Floats = ((codes - self.zero) * self.scale).astype(np.float32)
        return rounded


@dataclass(frozen=True)
class Adjustment:
    """What makes a product easier to round, without changing what it computes.

    Attributes:
        divisor: float32 [K]; the activations are divided by it and the rows of the weight multiplied with it. None for
            ones. An outlier in one channel takes the grid from all others: this takes it from the activations, which
            share one scale, to the weight, which has one a column (SmoothQuant, arXiv:2211.10438).
        shift: float32 [N], added to the product: what rounding loses on average. None for zeros.
        activations: the grid of the divided activations; None for that of the range which each run finds.
        result_divisor: float32 [N]; the product and its bias are divided by it, for the product that reads them next.
            None for ones.
    """

    divisor: Floats | None = None
    shift: Floats | None = None
    activations: ActivationGrid | None = None
    result_divisor: Floats | None = None


PLAIN = Adjustment()


def quantize_weight(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round a weight, float32 [K, N], to int8 [K, N] in -127..127 and a scale a column, float32 [N]."""
    largest = np.maximum(weight.max(axis=0), -weight.min(axis=0))
    scale = np.maximum(largest / _LARGEST_WEIGHT, _SMALLEST).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


def round_weight(weight: Floats) -> Floats:
    """Return the numbers that the int8 of a weight stand for, float32 [K, N]."""
    rounded, scale = quantize_weight(weight)
    return rounded.astype(np.float32) * scale


def round_activations(values: Floats, lowest: float, highest: float) -> Floats:
    """Return the numbers that the uint8 of `values` stand for, where they all lie in `lowest`..`highest`."""
    grid = ActivationGrid.over(lowest, highest)
    return values if grid is None else grid.round(values)


def stored_name(product: Product) -> str:
    """Return what the weight of a product is called in fewer bits.

    A square one may be read as its transpose as well, which has other columns, and no shape would tell the two apart.
    """
    rows, columns = product.size
    return f"{product.name}_transposed" if product.transposed and rows == columns else product.name
