"""Weights in blocks are packed as onnxruntime reads them, and lose as little as their bits allow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxtool.optimize.quantization.int4 import BLOCK, BlockGrids, Grid, find_grid, pack_weight, pack_zeros
from tests.optimize.passes.builders import build, normal, run

SIZES = {"rows": st.integers(1, 100), "columns": st.integers(1, 7), "bits": st.sampled_from([4, 8])}


def unpack(packed: NDArray[np.uint8], bits: int, length: int) -> NDArray[np.uint8]:
    """Return the codes along the last axis, by the documentation of MatMulNBits: the first in the lower half."""
    if bits == 8:
        return packed[..., :length]
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    for place in range(codes.shape[-1]):
        byte = packed[..., place // 2]
        codes[..., place] = byte // 16 if place % 2 else byte % 16
    return codes[..., :length]


def dequantize(weight: NDArray[np.float32], grid: Grid) -> NDArray[np.float32]:
    """Return what the packed form of a weight stands for, a number at a time: (code - zero) * scale."""
    rows, columns = weight.shape
    codes = unpack(pack_weight(weight, grid), grid.bits, BLOCK)
    zeros = unpack(pack_zeros(grid), grid.bits, grid.scale.shape[1])
    result = np.empty((rows, columns), np.float32)
    for row in range(rows):
        block, place = divmod(row, BLOCK)
        steps = codes[:, block, place].astype(np.float32) - zeros[:, block]
        result[row] = steps * grid.scale[:, block]
    return result


def loss(weight: NDArray[np.float32], grid: Grid, importance: NDArray[np.float32] | float = 1.0) -> float:
    squares = np.square(dequantize(weight, grid) - weight) * np.reshape(importance, (-1, 1))
    return float(squares.sum(dtype=np.float64))


@settings(max_examples=60, deadline=None)
@given(**SIZES, seed=st.integers(0, 99), exponent=st.integers(-12, 6))
def test_no_weight_is_off_by_more_than_its_block_allows(
    rows: int, columns: int, bits: int, seed: int, exponent: int
) -> None:
    """Of 8 bits half a step of the range; of 4 bits all squares together are no more than without a search."""
    weight = normal(rows, columns, seed=seed) * np.float32(10.0**exponent)
    grid = find_grid(weight, bits)
    assert grid.scale.shape == grid.zero.shape == (columns, -(-rows // BLOCK))
    padded = np.pad(weight, ((0, -rows % BLOCK), (0, 0))).reshape(-1, BLOCK, columns)
    step = (np.maximum(padded.max(axis=1), 0) - np.minimum(padded.min(axis=1), 0)) / (2**bits - 1)
    # Half a step, another half at the ends where zero is moved to a code, and what float32 adds.
    lost = np.abs(dequantize(weight, grid) - weight)
    within = np.repeat(step, BLOCK, axis=0)[:rows] * 1.001
    if bits == 8:
        assert (lost <= within).all()
    plain = _plain(padded, step, bits)
    rounding = 1e-12 * float(np.square(weight).sum(dtype=np.float64))  # of float32, where nothing else is lost
    assert loss(weight, grid) <= loss(weight, plain) * 1.001 + rounding


def _plain(padded: NDArray[np.float32], step: NDArray[np.float32], bits: int) -> Grid:
    """Return the grid over the range of each block as it is."""
    scale = np.maximum(step, 1e-30).astype(np.float32)
    zero = np.clip(np.rint(-np.minimum(padded.min(axis=1), 0) / scale), 0, 2**bits - 1).astype(np.uint8)
    return Grid(bits, scale.T.copy(), zero.T.copy())


@settings(max_examples=40, deadline=None)
@given(**SIZES, seed=st.integers(0, 99))
def test_onnxruntime_reads_what_was_packed(rows: int, columns: int, bits: int, seed: int) -> None:
    """Its own MatMulNBits on the unit matrix gives the numbers of an independent dequantization, to the last bit."""
    weight = normal(rows, columns, seed=seed)
    grid = find_grid(weight, bits)
    graph = (
        f"g (float[B, {rows}] x) => (float[B, {columns}] y) "
        f"{{ y = com.microsoft.MatMulNBits<K={rows}, N={columns}, bits={bits}, block_size={BLOCK}>(x, w, s, z) }}"
    )
    model = build(graph, {"w": pack_weight(weight, grid), "s": grid.scale, "z": pack_zeros(grid)})
    found = run(model, {"x": np.eye(rows, dtype=np.float32)})[0]
    np.testing.assert_allclose(found, dequantize(weight, grid), rtol=1e-6, atol=0)


def test_the_search_takes_away_error() -> None:
    """Of normally distributed weights, against the range as it is and against symmetric blocks."""
    weight = normal(256, 64)
    searched = loss(weight, find_grid(weight, 4))
    padded = weight.reshape(-1, BLOCK, 64)
    step = (padded.max(axis=1) - padded.min(axis=1)) / 15
    asymmetric = _plain(padded, step, 4)
    largest = np.abs(padded).max(axis=1).T
    symmetric = Grid(4, (largest / 7).astype(np.float32), np.full(largest.shape, 8, np.uint8))
    assert searched < 0.93 * loss(weight, asymmetric)
    assert searched < 0.85 * loss(weight, symmetric)


def test_both_kinds_of_blocks_are_chosen() -> None:
    """One of weights above zero alone uses all codes for them; one of whole numbers from -8 is exact around zero."""
    above = np.abs(normal(BLOCK, 1)) + 1
    around = (np.arange(BLOCK, dtype=np.float32) % 14 - 8)[:, None]
    weight = np.concatenate([above, around], axis=1)
    grid = find_grid(weight, 4)
    assert grid.zero[:, 0].tolist() == [0, 8]
    np.testing.assert_array_equal(dequantize(weight, grid)[:, 1], weight[:, 1])


def test_channels_that_matter_lose_less() -> None:
    """At the cost of the others."""
    weight = normal(256, 16)
    importance = np.where(np.arange(256) % BLOCK < 4, 50.0, 0.5).astype(np.float32)
    assert loss(weight, find_grid(weight, 4, importance), importance) < 0.65 * loss(
        weight, find_grid(weight, 4), importance
    )


def test_channels_without_activations_still_count() -> None:
    """A calibration input of zeros must not make a grid of nothing."""
    weight = normal(64, 3)
    grid = find_grid(weight, 4, np.zeros(64, np.float32))
    assert np.isfinite(grid.scale).all()
    assert loss(weight, grid) < 0.02 * float(np.square(weight).sum())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_of_zeros_stays_zero(bits: int) -> None:
    """With a scale that is no zero to divide by."""
    grid = find_grid(np.zeros((40, 2), np.float32), bits)
    assert not dequantize(np.zeros((40, 2), np.float32), grid).any()
    assert grid.scale.all()


def test_a_grid_is_found_once() -> None:
    """However many initializers are made of it."""
    grids, num_reads = BlockGrids(), 0

    def read() -> NDArray[np.float32]:
        nonlocal num_reads
        num_reads += 1
        return normal(32, 4)

    assert grids.grid_of("w", 4, read) is grids.grid_of("w", 4, read)
    assert grids.grid_of("w", 8, read).bits == 8
    assert num_reads == 2


def test_parts_of_a_weight_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are searched some at a time; how many makes no difference."""
    weight = normal(70, 9)
    whole = find_grid(weight, 4)
    packed = pack_weight(weight, whole)
    monkeypatch.setattr("onnxtool.optimize.quantization.int4._WEIGHTS_AT_A_TIME", 200)
    parts = find_grid(weight, 4)
    np.testing.assert_array_equal(parts.scale, whole.scale)
    np.testing.assert_array_equal(pack_weight(weight, whole), packed)
    assert ir.tensor(packed).dtype == ir.DataType.UINT8
