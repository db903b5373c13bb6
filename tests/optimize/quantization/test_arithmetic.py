"""Rounding to eight bits is what ONNX and onnxruntime do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from onnxtool.optimize.quantization.arithmetic import (
    PLAIN,
    RowGrid,
    nearest_codes,
    round_activations,
    round_channel,
    weight_scale,
)
from tests.optimize.passes.builders import normal

QUANTIZE = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[N, K] x) => (float[N, K] y) '
    "{ q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }"
)


@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
def test_activations_are_rounded_as_onnx_defines(shift: float) -> None:
    """Against the reference implementation, for ranges around zero, above it and below it."""
    values = normal(6, 9) + np.float32(shift)
    expected = ReferenceEvaluator(QUANTIZE).run(None, {"x": values})[0]
    found = round_activations(values, float(values.min()), float(values.max()))
    # Within the rounding of float32: the order of operations differs.
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_activations_of_zeros_stay() -> None:
    """There is no range to divide."""
    assert not round_activations(np.zeros((2, 3), np.float32), 0.0, 0.0).any()


def test_weights_use_the_symmetric_grid_of_each_column() -> None:
    """The largest of a column is 127 or -127, and nothing is off by more than half a step."""
    weight = normal(16, 5) * np.array([1e-3, 1, 10, 100, 1e4], np.float32)
    rounded, scale = PLAIN.quantize(weight, exact=True)
    assert rounded.dtype == np.int8
    assert np.abs(rounded.astype(int)).max(axis=0).tolist() == [127] * 5
    # Half a step, and what float32 adds to it.
    assert (np.abs(rounded * scale - weight) <= scale * 0.5001).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_activations_can_saturate_a_product(rows: int, sign: int) -> None:
    """Two neighbours of one sign, times the largest activation, fit 16 bits; the largest fills them nearly."""
    weight = sign * np.abs(normal(rows, 40))
    scale = weight_scale(weight)
    codes = nearest_codes(weight, scale).astype(int)
    pairs = np.abs(np.pad(codes, ((0, rows % 2), (0, 0))).reshape(-1, 2, 40).sum(axis=1)).max(axis=0)
    assert pairs.max() * 255 <= 2**15 - 1
    assert pairs.min() >= 126
    assert (np.abs(codes * scale - weight) <= scale * 0.5001).all()


def test_a_row_is_rounded_as_if_it_were_alone() -> None:
    """With a scale of its own: small rows keep their steps beside large ones."""
    values = normal(4, 9) * np.array([[1], [100], [1e-4], [0]], np.float32)
    for grid in (*RowGrid.candidates(values), RowGrid(1), RowGrid(254)):
        alone = np.concatenate([grid.round(row[None]) for row in values])
        assert np.array_equal(grid.round(values), alone)
    found = RowGrid.middle().round(values)
    assert (np.abs(found - values) <= np.abs(values).max(axis=1, keepdims=True) / 127 * 0.5001).all()


def test_a_column_of_zeros_stays_zero() -> None:
    """And has a scale that is no zero to divide by."""
    rounded, scale = PLAIN.quantize(np.zeros((4, 2), np.float32), exact=True)
    assert not rounded.any()
    assert (scale > 0).all()


def test_rows_of_a_sign_that_the_calibration_had_not_fit_their_grid() -> None:
    """Coarsely, and without being cut off."""
    for sign in (1, -1):
        for grid in RowGrid.candidates(sign * np.abs(normal(20, 9))):
            assert 1 <= grid.zero <= 254
            values = -sign * np.abs(normal(3, 9, seed=1))
            found = grid.round(values)
            largest = np.abs(values).max(axis=1)
            np.testing.assert_allclose(np.abs(found).max(axis=1), largest, rtol=1e-5)


def test_a_code_leaves_room_for_its_neighbour() -> None:
    """Where what earlier channels left over would take both beyond 16 bits; another sign needs no room."""
    scale, before = np.ones(4, np.float32), np.array([100, -100, -100, 100], np.float32)
    values = np.array([120, -120, 120, 20], np.float32)
    assert round_channel(values, scale, before).tolist() == [28, -28, 120, 20]
    for free in (round_channel(values, scale, None), round_channel(values, scale, before, exact=True)):
        assert free.tolist() == [120, -120, 120, 20]
