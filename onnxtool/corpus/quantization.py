"""Weights of terms as the whole numbers that an inverted index counts.

Anserini reads a corpus as if each term stood in its text as often as its weight says, and cuts off what follows the
point (JsonVectorCollection); so weights are scaled before. Its own encoder takes 256 steps for weights up to 5
(SpladePlusPlusEncoder), in float32 and rounded as Java's Math.round does: half a step up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WEIGHT_RANGE = 5
QUANTIZATION_STEPS = 256


def quantize_weights(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """Turn weights, float32 of any shape, into int64 of the same shape: round(weight / 5 * 256)."""
    scaled = weights.astype(np.float32) / np.float32(WEIGHT_RANGE) * np.float32(QUANTIZATION_STEPS)
    # In float64, as adding a half in float32 rounds a second time.
    return np.asarray(np.floor(scaled.astype(np.float64) + 0.5), np.int64)
