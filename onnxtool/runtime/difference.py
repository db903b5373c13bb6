"""Measure how far an output is from its reference, on the numbers that carry information.

A single large number must not set the scale for all others. Fills of masks are compared for equality and left out,
offsets that all numbers share are subtracted, and outlying rows and columns only set their own scale; see
docs/concepts/verification.md.

Shape letters: B batch, S sequence, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_FEW_COLUMNS = 32  # fewer are scores, logits of labels or boxes; more are vectors and logits of tokens
_PIECE = 1 << 20  # elements compared at a time: logits of a long text take 60 MB, and each copy as much again
_SAMPLE = 1 << 16  # elements that show the usual magnitude of an output
_CERTAIN_FILL = 1e4  # finite values of this size that are equal in both are fills even if they occur once
_ROUNDING = 1e-6  # relative to a smaller fill: if no more is left next to it, it was no fill
_MOST_FILLS = 4  # different fills in an output
_SATURATED = 1.0  # probabilities and tanh: their largest value is no fill
_OUTLYING = 8.0  # times the median: the largest of a million normal numbers is 7.3 times their median
_GAP = 100.0  # between scores and masked scores: no value lies between 1/300 and 1/3 of the largest
_SHARED = 2.0  # an offset is shared by all numbers if they deviate from it by less than half of it
_FEWEST = 8  # numbers or rows that show a mean and a deviation


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of an output from its reference: `|difference| <= atol + rtol * scale`.

    The scale is that of a number's neighbours, not of the number itself: rounding errors of a transformer follow the
    size of its hidden states, and an entry near zero has the same error as the others.

    Attributes:
        rounding: relative rounding error of one stored number, which is allowed in addition where numbers share an
            offset.
    """

    atol: float
    rtol: float
    cosine: float
    rounding: float = 2.0**-22

    def overridden(self, atol: float | None, rtol: float | None, cosine: float | None) -> Tolerance:
        """Return the tolerance with each part that is given instead of its own."""
        overrides = {"atol": atol, "rtol": rtol, "cosine": cosine}
        return replace(self, **{name: part for name, part in overrides.items() if part is not None})


# By the precision of the arithmetic. fp16 keeps 11 bits and bf16 8, and errors add up over a dozen layers. In
# int8 and int4, outputs of random ids only show that masks and shapes are right; their quality is measured on the
# calibration texts.
TOLERANCES = {
    "fp32": Tolerance(atol=1e-4, rtol=1e-5, cosine=0.99999),
    "fp16": Tolerance(atol=5e-3, rtol=1e-2, cosine=0.9999, rounding=2.0**-10),
    "bf16": Tolerance(atol=1e-2, rtol=5e-2, cosine=0.999, rounding=2.0**-7),
    **dict.fromkeys(("int8", "uint8"), Tolerance(atol=1e-2, rtol=0.5, cosine=0.97)),
    **dict.fromkeys(("int4", "int4_fp16"), Tolerance(atol=1e-2, rtol=0.5, cosine=0.95)),
}


@dataclass(frozen=True)
class OutputError:
    """The difference of one output from its reference.

    Attributes:
        max_abs_error: the largest absolute difference.
        cosine: the smallest cosine similarity of a sample. For few columns or a shared offset, the cosine that an
            error of this size gives numbers of this spread; for integers, the share of equal ones.
        scale: the largest measured value, without fills and shared offsets.
        passed: whether the difference is within the tolerance it was measured with.
        num_equal: number of values that are the same NaN, infinity or fill in both, and are not measured.
        num_measured: number of measured values.
    """

    max_abs_error: float = 0.0
    cosine: float = 1.0
    scale: float = 0.0
    passed: bool = True
    num_equal: int = 0
    num_measured: int = 0

    def joined(self, other: OutputError) -> OutputError:
        """Return the difference of two parts of an output together."""
        return OutputError(
            max(self.max_abs_error, other.max_abs_error),
            min(self.cosine, other.cosine),
            max(self.scale, other.scale),
            self.passed and other.passed,
            self.num_equal + other.num_equal,
            self.num_measured + other.num_measured,
        )


INCOMPARABLE = OutputError(math.inf, -1.0, 1.0, passed=False)


@dataclass(frozen=True)
class Spread:
    """The variation of an output with few columns over all rows of a reference.

    A bias moves all rows of a column, and softmax ignores what all columns of a row share. Neither may set the scale
    of errors, so rows are compared with the mean of their column, with and without the mean of the row.

    Attributes:
        centre: the mean of each column, float64 [C].
        reach: the largest distance from it in each column, float64 [C].
        deviations: the root mean square distance of all numbers from it, and the same without the mean of each row; one
            of them for a single column.
    """

    centre: Floats
    reach: Floats
    deviations: tuple[float, ...]

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]]) -> Spread | None:
        """Return the spread of all rows of an output on several inputs; None if it does not have few columns."""
        widths = {array.shape[1:] if array.ndim < 3 else array.shape[2:] for array in arrays}
        width = math.prod(next(iter(widths), ()))
        kinds = {(array.dtype.kind, 0 < array.ndim < 4) for array in arrays}
        if len(widths) > 1 or not 0 < width < _FEW_COLUMNS or kinds != {("f", True)}:
            return None
        rows = np.concatenate([array.reshape(-1, width) for array in arrays]).astype(np.float64)
        is_kept = informative(rows, rows)
        if is_kept is None or not is_kept.any() or len(rows) < _FEWEST:
            return None
        counts = np.maximum(is_kept.sum(axis=0), 1)
        centre = np.where(is_kept, rows, 0.0).sum(axis=0) / counts
        deviation = np.where(is_kept, rows - centre, 0.0)
        deviations = tuple(float(np.sqrt(np.square(view).sum() / is_kept.sum())) for view in _views(deviation, is_kept))
        return cls(centre, np.abs(deviation).max(axis=0), deviations)

    def measure(self, actual: NDArray[Any], expected: NDArray[Any], tolerance: Tolerance) -> OutputError:
        """Measure rows of this output relative to its spread."""
        actual, expected = (array.reshape(-1, len(self.centre)).astype(np.float64) for array in (actual, expected))
        is_kept = informative(actual, expected)
        if is_kept is None:
            return INCOMPARABLE
        if not is_kept.any():
            return OutputError(num_equal=is_kept.size)
        error = np.where(is_kept, actual - expected, 0.0)
        rounding = np.where(is_kept, tolerance.rounding * np.abs(expected), 0.0)
        allowed = tolerance.atol + tolerance.rtol * self.reach + rounding
        cosines = [1.0]
        for view, deviation in zip(_views(error, is_kept), self.deviations, strict=True):
            if deviation > rounding.max():  # else it does not vary in this precision
                beyond = np.maximum(np.abs(view) - rounding, 0.0)
                cosines.append(cosine_of(float(np.square(beyond).sum() / is_kept.sum()), deviation**2))
        passed = bool((np.abs(error) <= allowed).all()) and min(cosines) >= tolerance.cosine
        num_kept = int(is_kept.sum())
        scale = float(self.reach.max())
        return OutputError(float(np.abs(error).max()), min(cosines), scale, passed, is_kept.size - num_kept, num_kept)


def _views(numbers: Floats, is_kept: Bools) -> Iterator[Floats]:
    """Yield numbers [R, C] as they are and, for several columns, without the mean of each row."""
    yield numbers
    if numbers.shape[1] > 1:
        means = numbers.sum(axis=1, keepdims=True) / np.maximum(is_kept.sum(axis=1, keepdims=True), 1)
        yield np.where(is_kept, numbers - means, 0.0)


def cosine_of(square_error: float, square: float) -> float:
    """Return the cosine between numbers and the same ones with an error that has no direction in common with them."""
    return 1.0 if square_error == 0.0 else float((1.0 + square_error / square) ** -0.5) if square else 0.0


def measure(
    actual: NDArray[Any],
    expected: NDArray[Any],
    valid: Bools | None = None,
    tolerance: Tolerance = TOLERANCES["fp32"],
    *,
    batched: bool = False,
    spread: Spread | None = None,
) -> OutputError:
    """Measure how far an output is from its reference, in float64, a piece at a time.

    Args:
        actual: any shape; the first two axes are B and S if it has a sequence, or it is [B, H, S, D].
        expected: the same shape.
        valid: bool [B, S], false on padding, where values have no meaning. None compares everything.
        tolerance: what `passed` and the scale of outlying rows refer to.
        batched: whether the first axis is B, so that each of its rows has its own scale.
        spread: how the output varies, if it has few columns.
    """
    if actual.shape != expected.shape:
        return INCOMPARABLE
    if expected.dtype.kind not in "biuf":  # strings, which are equal or not
        return OutputError() if np.array_equal(actual, expected) else INCOMPARABLE
    if (expected.dtype.kind in "iu" and expected.dtype.itemsize > 1) or expected.dtype.kind == "b":
        return _measure_integers(selected(actual, valid), selected(expected, valid), tolerance)
    if spread is not None:
        return spread.measure(selected(actual, valid), selected(expected, valid), tolerance)
    total = OutputError()
    for actual_part, expected_part in _samples(actual, expected, valid, batched=batched):
        total = total.joined(_measure_numbers(actual_part, expected_part, tolerance))
    return total


def selected(array: NDArray[Any], valid: Bools | None) -> NDArray[Any]:
    """Return the real tokens of an output as `real_tokens` does; one without padding as it is."""
    return array if valid is None or valid.all() else real_tokens(array, valid)


def real_tokens(array: NDArray[Any], valid: Bools | None) -> NDArray[Any]:
    """Return the real tokens of an output [B, S, ...], or of keys or values [B, H, S, D], in one axis; others as is."""
    if valid is not None and array.shape[:2] == valid.shape:
        return array[valid]
    is_cache = valid is not None and array.ndim == 4 and array.shape[::2] == valid.shape
    return array.swapaxes(1, 2)[valid] if is_cache else array


def _samples(
    actual: NDArray[Any], expected: NDArray[Any], valid: Bools | None, *, batched: bool
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for row in range(len(expected)) if batched else (slice(None),):
        part = slice(row, row + 1) if isinstance(row, int) else row
        rows = None if valid is None else valid[part]
        yield selected(actual[part], rows), selected(expected[part], rows)


def _measure_integers(actual: NDArray[Any], expected: NDArray[Any], tolerance: Tolerance) -> OutputError:
    """Compare ids, indices and counts, whose size says nothing about an error: a few of them may differ."""
    share = float((actual == expected).mean()) if expected.size else 1.0
    error = float(np.abs(actual.astype(np.float64) - expected).max(initial=0.0))
    return OutputError(error, share, 1.0, passed=share >= tolerance.cosine, num_measured=expected.size)


def informative(actual: NDArray[Any], expected: NDArray[Any]) -> Bools | None:
    """Mark the values to measure; None if one is NaN or infinite in only one of the two.

    Left out are NaN, infinities and fills that are equal in both: a model that masks with them is right if both have
    the same ones, and next to them nothing else would be seen. A fill is a constant that is farther from all other
    values than these are from each other. Leaving out equal values never hides a difference.
    """
    is_kept: Bools = np.isfinite(expected)
    if (
        not np.array_equal(actual[~is_kept], expected[~is_kept], equal_nan=True)
        or not np.isfinite(actual[is_kept]).all()
    ):
        return None
    for _ in range(_MOST_FILLS):
        ends = _ends(expected, is_kept)
        if not max(map(abs, ends)) > _SATURATED or math.isinf(ends[0]):
            break
        fills = [fill for end in ends if (fill := _fill(actual, expected, is_kept, end)) is not None]
        if not fills:
            break
        for fill in fills:
            is_kept = is_kept & ~fill
    return is_kept


def _fill(actual: NDArray[Any], expected: NDArray[Any], is_kept: Bools, value: float) -> Bools | None:
    """Return where both have the smallest or largest value, if it is a fill."""
    same: Bools = is_kept & (expected == value) & (actual == value)
    count = int(np.count_nonzero(same))
    if count == 0 or (count == 1 and abs(value) < _CERTAIN_FILL):
        return None
    others = is_kept & ~same
    low, high = _ends(expected, others)
    least = _ROUNDING * abs(value) if abs(value) < _CERTAIN_FILL else 0.0
    return same if math.isfinite(low) and max(low - value, value - high) > high - low >= least else None


def _ends(numbers: NDArray[Any], is_kept: Bools) -> tuple[float, float]:
    """Return the smallest and the largest of the kept numbers; infinity and its negative for none."""
    return float(numbers.min(where=is_kept, initial=np.inf)), float(numbers.max(where=is_kept, initial=-np.inf))


@dataclass(frozen=True)
class Scales:
    """The scale of each number of a sample [R, C].

    Attributes:
        offset: what all numbers share; 0 for nothing.
        reach: the largest distance from the offset.
        usual: the scale of all numbers but outlying ones; `reach` if there are none.
        rows: the scales of rows, [R, 1], at least the usual one.
        columns: the scales of columns, [1, C].
        far: magnitude from which on numbers are masked scores and the like, with a scale of their own each.
    """

    offset: float
    reach: float
    usual: float
    rows: Floats
    columns: Floats
    far: float = math.inf

    @classmethod
    def of(cls, expected: NDArray[Any], is_kept: Bools, rounding: float) -> Scales:
        """Return the scales of the kept numbers [R, C], whose relative rounding error is `rounding`."""
        numbers = _some(expected, is_kept)
        mean, deviation = float(numbers.mean()), float(numbers.std())
        is_shared = numbers.size >= _FEWEST and 4 * rounding * abs(mean) < deviation < abs(mean) / _SHARED
        offset = mean if is_shared else 0.0
        ends = _ends(expected, is_kept)
        reach = max(abs(end - offset) for end in ends)
        usual = _OUTLYING * _median(np.abs(numbers - offset))
        plain = np.full((1, 1), reach)
        if reach <= usual or not usual or (ends[0] >= 0 and ends[1] <= _SATURATED):
            return cls(offset, reach, reach, plain, plain)
        magnitudes = np.where(is_kept, np.abs(expected - np.float32(offset)), 0)
        far, top = math.inf, reach
        while top and not ((magnitudes > top / (3 * _GAP)) & (magnitudes < top / 3)).any():
            if not (magnitudes[magnitudes < top / 3] > 0).any():
                break
            far = top / 3
            magnitudes[magnitudes >= far] = 0
            top = float(magnitudes.max())
        usual = min(_OUTLYING * _median(_some(magnitudes, magnitudes > 0)), top)
        step = max(1, len(magnitudes) // 256), max(1, magnitudes.shape[1] // 1024)
        rows, columns = (_medians(magnitudes[:, :: step[1]], 1), _medians(magnitudes[:: step[0]], 0))
        rows, columns = (np.where(scale > usual, (_OUTLYING * scale).clip(max=top), usual) for scale in (rows, columns))
        return cls(offset, reach, usual, rows, columns, far)

    def weights(self, magnitude: Floats, shared: Floats) -> Floats:
        """Return what reduces outlying numbers with the scales `shared` to the usual magnitude."""
        if self.usual >= self.reach:
            return np.ones((1, 1))
        own = self.usual / _OUTLYING / np.maximum(magnitude, self.usual)
        return np.where(magnitude >= self.far, own, self.usual / shared)


def _some(numbers: NDArray[Any], is_kept: Bools) -> Floats:
    """Return some of the kept numbers, spread over all columns, as float64."""
    step = max(1, numbers.size // _SAMPLE)
    while math.gcd(step, numbers.shape[-1]) > 1:
        step += 1
    some: Floats = numbers.reshape(-1)[::step][is_kept.reshape(-1)[::step]].astype(np.float64)
    return some if some.size else numbers[is_kept].astype(np.float64)


def _median(magnitudes: Floats) -> float:
    """Return the lower median of the numbers that are not zero."""
    numbers = magnitudes[magnitudes > 0]
    return float(np.partition(numbers, (numbers.size - 1) // 2)[(numbers.size - 1) // 2]) if numbers.size else 0.0


def _medians(magnitudes: NDArray[Any], axis: int) -> Floats:
    """Return the lower medians of rows or columns; zeros if these have one number each."""
    size = magnitudes.shape[axis]
    place = (size - 1) // 2
    middle: Floats = np.partition(magnitudes, place, axis=axis).take([place], axis=axis).astype(np.float64)
    return middle if size > 1 else np.zeros_like(middle)


def _measure_numbers(actual: NDArray[Any], expected: NDArray[Any], tolerance: Tolerance) -> OutputError:
    """Measure one sample, or an output whose first axis is no batch."""
    width = expected.shape[-1] if expected.ndim > 1 else expected.size
    if not expected.size:
        return OutputError()
    actual, expected = (_as_floats(array).reshape(-1, width) for array in (actual, expected))
    is_kept = informative(actual, expected)
    if is_kept is None:
        return INCOMPARABLE
    num_kept = int(np.count_nonzero(is_kept))
    if not num_kept:
        return OutputError(num_equal=is_kept.size)
    scales = Scales.of(expected, is_kept, tolerance.rounding)
    slack = tolerance.rounding * abs(scales.offset)
    error, is_within = 0.0, True
    dot = squares = wanted_squares = square_error = 0.0
    step = max(1, _PIECE // width)
    for start in range(0, len(expected), step):
        part = slice(start, start + step)
        values, reference = (
            np.where(is_kept[part], array[part].astype(np.float64) - scales.offset, 0.0) for array in (actual, expected)
        )
        difference = np.abs(values - reference)
        error = max(error, float(difference.max()))
        if scales.usual < scales.reach:
            magnitude = np.abs(reference)
            shared = np.maximum(scales.rows[part], scales.columns)
            allowed = tolerance.atol + tolerance.rtol * np.maximum(shared, magnitude) + slack
            weight = scales.weights(magnitude, np.maximum(shared, magnitude))
            values, reference = values * weight, reference * weight
            is_within &= bool((difference <= allowed).all())
        if scales.offset:
            square_error += float(np.square(np.maximum(difference - slack, 0.0)).sum())
        dot += float((values * reference).sum())
        squares += float(np.square(values).sum())
        wanted_squares += float(np.square(reference).sum())
    if scales.usual >= scales.reach:
        is_within = error <= tolerance.atol + tolerance.rtol * scales.reach + slack
    norms = (squares * wanted_squares) ** 0.5
    cosine = min(1.0, dot / norms) if norms else float(error == 0.0)
    if scales.offset:
        cosine = cosine_of(square_error, wanted_squares)
    return OutputError(
        error, cosine, scales.reach, is_within and cosine >= tolerance.cosine, is_kept.size - num_kept, num_kept
    )


def _as_floats(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype.kind == "f" and array.dtype.itemsize > 2 else array.astype(np.float32)


def spreads_of(outputs: Sequence[Mapping[str, NDArray[Any]]], masks: Sequence[Bools | None]) -> dict[str, Spread]:
    """Return the spreads of the outputs with few columns over several runs, by name.

    Args:
        outputs: arrays by output name, for each run.
        masks: bool [B, S], false on padding, for each run; None without padding.
    """
    arrays = {
        name: [selected(actual[name], valid) for actual, valid in zip(outputs, masks, strict=True)]
        for name in (outputs[0] if outputs else ())
    }
    actual = {name: Spread.of(several) for name, several in arrays.items()}
    return {name: spread for name, spread in actual.items() if spread is not None}
