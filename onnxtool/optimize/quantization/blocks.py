"""Quantize weights in blocks with a scale and a zero point each, for MatMulNBits and GatherBlockQuantized.

Shape letters: K width of a layer's input, N width of its output, C blocks of a column (K / BLOCK, rounded up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxtool.optimize.quantization.arithmetic import Floats, damped_factors, round_together

BLOCK = 32

# Fractions of the range of a 4-bit block: clipping its largest weight improves the other 31.
_CLIPS = (1.0, 0.92, 0.84, 0.76)
_SMALLEST = np.float32(1e-30)  # the scale of a block of zeros
# A channel that is almost always zero on calibration inputs may be larger on others.
_LEAST_IMPORTANCE = 0.05
_WEIGHTS_AT_A_TIME = 1 << 18  # they stay in the cache of a core from one candidate to the next


@dataclass(frozen=True)
class Grid:
    """The values of a weight in blocks: `(code - zero) * scale`, for codes below `2**bits`.

    Attributes:
        bits: 4 or 8.
        scale: float32 [N, C]; negative where the largest weight of a symmetric block is positive, which has the code 0.
        zero: uint8 [N, C], the code of zero; a symmetric block has the middle one.
    """

    bits: int
    scale: Floats
    zero: NDArray[np.uint8]


@dataclass(frozen=True)
class Grids:
    """The grids of a model's weights, each found once, and the weights on them.

    Attributes:
        activations: returns rows of the input of a weight, float32 [T, K], by the name of the weight; without them, all
            channels count alike, and each weight is rounded to the nearest code.
    """

    activations: Mapping[str, Callable[[], Floats]] = field(default_factory=dict)
    _found: dict[tuple[str, int], Grid] = field(default_factory=dict)
    _packed: dict[str, NDArray[np.uint8]] = field(default_factory=dict)

    def find(self, name: str, bits: int, read: Callable[[], Floats]) -> Grid:
        """Return the grid of the weight called `name`, which `read` reads, float32 [K, N]."""
        if (name, bits) not in self._found:
            rows = self.activations[name]() if name in self.activations else None
            importance = None if rows is None else np.square(rows).mean(axis=0)
            self._found[name, bits] = find_grid(read(), bits, importance)
        return self._found[name, bits]

    def pack(self, name: str, bits: int, read: Callable[[], Floats]) -> NDArray[np.uint8]:
        """Return the codes of the weight called `name`, as `pack_weight` packs them.

        With 4 bits, channels compensate for each other's errors. With 8, the nearest codes are close enough.
        """
        weight = read()
        grid = self.find(name, bits, lambda: weight)
        if bits != 4 or name not in self.activations:
            return pack_weight(weight, grid)
        if name not in self._packed:
            self._packed[name] = _pack_together(weight, grid, damped_factors(self.activations[name]()))
        return self._packed[name]


def find_grid(weight: Floats, bits: int, importance: Floats | None = None) -> Grid:
    """Choose the grid of least error for each block of `weight`, float32 [K, N].

    With 4 bits, symmetric and asymmetric grids over several parts of the block's range are tried, and the scale of the
    best one is fitted by least squares. With 8 bits, the grid spans the range.

    Args:
        weight: float32 [K, N].
        bits: 4 or 8.
        importance: float32 [K], the weight of a squared error; None for ones.
    """
    rows, columns = weight.shape
    num_blocks = -(-rows // BLOCK)
    counts = np.ones(rows, np.float32) if importance is None else _floored(importance)
    counts = np.pad(counts, (0, num_blocks * BLOCK - rows)).reshape(num_blocks, BLOCK)
    scale, zero = np.empty((columns, num_blocks), np.float32), np.empty((columns, num_blocks), np.uint8)
    for part, blocks in _parts(weight):
        if bits == 4:
            scale[part], zero[part] = _search(blocks, counts)
        else:
            scale[part], zero[part] = _asymmetric(blocks, bits)
    return Grid(bits, scale, zero)


def pack_weight(weight: Floats, grid: Grid) -> NDArray[np.uint8]:
    """Round `weight`, float32 [K, N], to codes, two of 4 bits in a byte: uint8 [N, C, BLOCK * bits / 8]."""
    columns, num_blocks = grid.scale.shape
    packed = np.empty((columns, num_blocks, BLOCK * grid.bits // 8), np.uint8)
    for part, blocks in _parts(weight):
        codes = _codes(blocks, grid.scale[part], grid.zero[part], grid.bits)
        packed[part] = _pack(codes.astype(np.uint8), grid.bits)
    return packed


def _pack_together(weight: Floats, grid: Grid, factors: Sequence[Floats]) -> NDArray[np.uint8]:
    """Round `weight`, float32 [K, N], as `round_together` does, and pack it as `pack_weight` does."""
    columns, num_blocks = grid.scale.shape
    # Padding has the code of zero.
    codes = np.repeat(grid.zero, BLOCK, axis=1)

    def one(place: int, values: Floats) -> Floats:
        scale, zero = grid.scale[:, place // BLOCK], grid.zero[:, place // BLOCK]
        steps = np.clip(np.rint(values / scale) + zero, 0, 2**grid.bits - 1)
        codes[:, place] = steps
        rounded: Floats = (steps - zero) * scale
        return rounded

    round_together(weight, factors, one)
    return _pack(codes.reshape(columns, num_blocks, BLOCK), grid.bits)


def pack_zeros(grid: Grid) -> NDArray[np.uint8]:
    """Pack the zero points as the weights: uint8 [N, C * bits / 8], rounded up."""
    odd = grid.zero.shape[1] % 2 if grid.bits == 4 else 0
    return _pack(np.pad(grid.zero, ((0, 0), (0, odd))), grid.bits)


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack two codes of 4 bits along the last axis into a byte, the first into its lower half."""
    packed: NDArray[np.uint8] = codes if bits == 8 else codes[..., 0::2] | np.left_shift(codes[..., 1::2], 4)
    return packed


def _parts(weight: Floats) -> Iterator[tuple[slice, Floats]]:
    """Yield groups of columns: their slice, and their blocks, float32 [n, C, BLOCK], padded with zeros."""
    rows, columns = weight.shape
    num_blocks = -(-rows // BLOCK)
    step = max(1, _WEIGHTS_AT_A_TIME // (num_blocks * BLOCK))
    for start in range(0, columns, step):
        part = slice(start, min(start + step, columns))
        padded = np.zeros((part.stop - start, num_blocks * BLOCK), np.float32)
        padded[:, :rows] = weight[:, part].T
        yield part, padded.reshape(-1, num_blocks, BLOCK)


def _floored(importance: Floats) -> Floats:
    average = max(float(importance.mean()), 1e-12)
    floored: Floats = np.maximum(importance / np.float32(average), np.float32(_LEAST_IMPORTANCE)).astype(np.float32)
    return floored


def _codes(blocks: Floats, scale: Floats, zero: NDArray[np.uint8], bits: int) -> Floats:
    codes: Floats = blocks * np.reciprocal(scale)[..., None]
    np.rint(codes, out=codes)
    codes += zero[..., None]
    return np.clip(codes, 0, 2**bits - 1, out=codes)


def _asymmetric(blocks: Floats, bits: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the grid from the smallest to the largest weight of each block, zero among them."""
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    scale = np.maximum((high - low) / (2**bits - 1), _SMALLEST).astype(np.float32)
    return scale, np.clip(np.rint(-low / scale), 0, 2**bits - 1).astype(np.uint8)


def _symmetric(blocks: Floats, bits: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Return the grid around zero on which the largest weight of each block is at the longer end."""
    low, high = blocks.min(axis=-1), blocks.max(axis=-1)
    largest = np.where(high > -low, high, low)
    scale = -largest / np.float32(2 ** (bits - 1))
    scale = np.where(np.abs(scale) < _SMALLEST, _SMALLEST, scale).astype(np.float32)
    return scale, np.full(scale.shape, 2 ** (bits - 1), np.uint8)


def _search(blocks: Floats, counts: Floats) -> tuple[Floats, NDArray[np.uint8]]:
    best_loss = np.full(blocks.shape[:2], np.inf, np.float32)
    best_scale, best_zero = np.empty_like(best_loss), np.empty(blocks.shape[:2], np.uint8)
    for whole, zero in (_asymmetric(blocks, 4), _symmetric(blocks, 4)):
        for clip in _CLIPS:
            scale = whole * np.float32(clip)
            lost = _codes(blocks, scale, zero, 4)
            lost -= zero[..., None]
            lost *= scale[..., None]
            lost -= blocks
            loss = np.einsum("ncb,ncb,cb->nc", lost, lost, counts)
            better = loss < best_loss
            for kept, one in ((best_loss, loss), (best_scale, scale), (best_zero, zero)):
                np.copyto(kept, one, where=better)
    return _least_squares(blocks, best_scale, best_zero, counts), best_zero


def _least_squares(blocks: Floats, scale: Floats, zero: NDArray[np.uint8], counts: Floats) -> Floats:
    """Return the scale with which the codes of `scale` are closest to the weights, by least squares."""
    steps = _codes(blocks, scale, zero, 4)
    steps -= zero[..., None]
    along = np.einsum("ncb,ncb,cb->nc", blocks, steps, counts)
    square = np.einsum("ncb,ncb,cb->nc", steps, steps, counts)
    fitted = np.where(square > 0, along / np.maximum(square, _SMALLEST), scale)
    return np.where(np.abs(fitted) < _SMALLEST, scale, fitted).astype(np.float32)
