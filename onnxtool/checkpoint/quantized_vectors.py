"""Stored vectors: embeddings quantized to codes of 256 steps or to bits.

Matches `quantize_embeddings` of sentence-transformers 6.2 bit for bit.

Shape letters: N vectors, W numbers per vector, C stored columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxtool.checkpoint.module_forms import Floats
from onnxtool.checkpoint.vector_types import BITS, CODES, VECTOR_TYPES, check_ranges_options
from onnxtool.errors import InputError, first_line
from onnxtool.options import Option, StrPath, checked
from onnxtool.reading import load_array, read_json
from onnxtool.reports import Json

# float32 [2, W]: the minimum and maximum of each number.
Ranges = NDArray[np.float32]
RangesLike = StrPath | NDArray[np.float32]
StoredAs = Annotated[str, Option(choices=VECTOR_TYPES)]

FEWEST_FOR_RANGES = 100  # vectors; with fewer, sentence-transformers warns

_STEPS = 255
_ZERO_OF_INT8 = 128  # offset from uint8 to int8
_DTYPES = {"float32": "float32", "float16": "float16", "int8": "int8", "uint8": "uint8"} | {
    "binary": "int8",
    "ubinary": "uint8",
}


@dataclass(frozen=True, eq=False)
class VectorType:
    """A storage type of vectors.

    Attributes:
        name: one of VECTOR_TYPES.
        ranges: the ranges of int8 and uint8; None for others.
    """

    name: str
    ranges: Ranges | None = None

    @classmethod
    def of(cls, name: str, ranges: Ranges | None = None) -> VectorType:
        """Check the name, and that ranges are given exactly if needed.

        Raises:
            InputError: the name is unknown, or ranges are missing or superfluous.
        """
        if name not in VECTOR_TYPES:
            raise InputError(f"vectors cannot be stored as {name!r}", f"use one of {', '.join(VECTOR_TYPES)}")
        if name in CODES and ranges is None:
            check_ranges_options(name, None, None)
        if name not in CODES and ranges is not None:
            raise InputError(
                f"ranges were passed, but vectors stored as {name} have none", f"they are for {' and '.join(CODES)}"
            )
        return cls(name, ranges)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array."""
        return np.dtype(_DTYPES[self.name])

    @property
    def numbers_of_a_column(self) -> int:
        """W / C."""
        return 8 if self.name in BITS else 1

    @property
    def is_float(self) -> bool:
        """Whether vectors are stored as floats."""
        return self.name not in (*CODES, *BITS)

    def columns(self, width: int) -> int:
        """Return C for vectors of W = `width` numbers.

        Raises:
            InputError: the ranges have another width, or bits do not fill whole bytes.
        """
        if self.ranges is not None and self.ranges.shape[1] != width:
            raise InputError(
                f"the ranges cover {self.ranges.shape[1]} numbers, but the vectors have {width}",
                "measure them on vectors of the same model and the same --dimensions",
            )
        if self.name not in BITS:
            return width
        if width % 8:
            raise InputError(
                f"{self.name} vectors have eight numbers to a byte, and these have {width}",
                f"keep a multiple of 8 of them: --dimensions {max(8, width - width % 8)}, where they are at least 8",
            )
        return width // 8

    def apply(self, vectors: Floats) -> NDArray[Any]:
        """Store vectors, float32 [N, W]: [N, C].

        Raises:
            InputError: see `columns`; or a number is too large for float16.
        """
        self.columns(vectors.shape[-1])
        if self.ranges is not None:
            starts, steps = _starts_and_steps(self.ranges)
            codes = np.clip(np.floor((vectors - starts) / steps), 0, _STEPS)
            return np.asarray(codes if self.name == "uint8" else codes - _ZERO_OF_INT8).astype(self.dtype)
        if self.name in BITS:
            packed = np.packbits(vectors > 0, axis=-1)
            return packed if self.name == "ubinary" else (packed - np.uint8(_ZERO_OF_INT8)).view(np.int8)
        with np.errstate(over="ignore"):
            stored = vectors.astype(self.dtype)
        if self.name == "float16" and not np.isfinite(stored).all():
            raise InputError(f"a vector contains {np.abs(vectors).max():g}, but float16 ends at 65504", "store float32")
        return stored

    def restore(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Return the midpoints of stored vectors: float32 [..., W] from [..., C].

        For codes, the middle of each step; for bits, -1 and 1.

        Raises:
            InputError: the array holds something else, or the ranges have another width.
        """
        codes = np.empty(0, self.dtype)
        if stored.ndim and stored.dtype.kind in ("f" if self.is_float else "iu"):
            with np.errstate(over="ignore"):
                codes = stored.astype(self.dtype)
        if not np.array_equal(codes, stored, equal_nan=self.is_float):
            raise InputError(
                f"an array {stored.dtype} {list(stored.shape)} holds no vectors stored as {self.name}",
                f"pass vectors as they were stored: {self.dtype} in rows",
            )
        if self.name in BITS:
            sign_bit = np.uint8(_ZERO_OF_INT8 if self.name == "binary" else 0)
            return np.asarray(2.0 * np.unpackbits(codes.view(np.uint8) ^ sign_bit, axis=-1) - 1.0, np.float32)
        self.columns(codes.shape[-1])
        if self.ranges is None:
            return codes.astype(np.float32)
        low, high = self.ranges.astype(np.float64)
        places = codes + (128.5 if self.name == "int8" else 0.5)
        return np.asarray(low + places * ((high - low) / _STEPS), np.float32)

    def describe(self, width: int) -> dict[str, Json]:
        """Describe the storage of vectors of W = `width` numbers as JSON."""
        description: dict[str, Json] = {"as": self.name, "dtype": str(self.dtype), "dimensions": width}
        if self.ranges is not None:
            description["ranges"] = numbers_of(self.ranges)
            offset = f" - {_ZERO_OF_INT8}" if self.name == "int8" else ""
            description["code"] = (
                f"clip(floor((x - ranges[0]) / ((ranges[1] - ranges[0]) / {_STEPS})), 0, {_STEPS}){offset}"
            )
        if self.name in BITS:
            offset = f", less {_ZERO_OF_INT8}" if self.name == "binary" else ""
            description["code"] = f"x > 0, eight numbers a byte, the first in the highest bit{offset}"
        return description


@checked
def restore_vectors(
    stored: ArrayLike, vectors_as: StoredAs, *, ranges: RangesLike | None = None
) -> NDArray[np.float32]:
    """Dequantize stored vectors: float32 [N, W] from codes [N, W] or bits [N, W / 8].

    A code becomes the middle of its step, so the error is at most half a step, except for numbers outside the range.
    Bits become -1 and 1. `quantize_embeddings` of sentence-transformers maps the result back to the same codes.

    Args:
        stored: vectors from `encode` or a corpus with `vectors_as`, per text or token; also lists of numbers.
        vectors_as: the storage type: float32, float16, int8, uint8, binary or ubinary.
        ranges: the ranges used to store int8 and uint8: float32 [2, W]; or a file: a .npy, or the manifest of a corpus.

    Raises:
        InputError: the vectors do not match the type, or ranges are missing, superfluous or malformed.
    """
    checked_ranges = None if ranges is None else given_ranges(ranges)
    try:
        array = np.asarray(stored)
    except ValueError:  # rows of different lengths
        raise InputError("vectors have different lengths", "pass rows of one length") from None
    return VectorType.of(vectors_as, checked_ranges).restore(array)


def _starts_and_steps(ranges: Ranges) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    starts = ranges[0]
    steps = (ranges[1] - starts) / np.float32(_STEPS)
    return starts, np.where(steps == 0, np.float32(1), steps)


def given_ranges(ranges: RangesLike) -> Ranges:
    """Return the caller's ranges: an array, or a file for `read_ranges`.

    Raises:
        InputError: they are not valid ranges.
    """
    return check_ranges(ranges, "ranges") if isinstance(ranges, np.ndarray) else read_ranges(Path(ranges))


def check_ranges(ranges: object, label: str) -> Ranges:
    """Return ranges as float32 [2, W].

    Raises:
        InputError: they are not finite numbers of that shape, or a minimum exceeds its maximum.
    """
    try:
        array = np.asarray(ranges)
    except ValueError:  # rows of different lengths
        raise _bad_ranges(label, "has rows of different lengths") from None
    if array.dtype.kind not in "fiu":
        raise _bad_ranges(label, f"holds {array.dtype}, not numbers")
    if array.ndim != 2 or array.shape[0] != 2 or not array.shape[1]:
        raise _bad_ranges(label, f"has the shape {list(array.shape)}, not [2, numbers of a vector]")
    with np.errstate(over="ignore"):
        converted = array.astype(np.float32)
        span = converted[1] - converted[0]
    if not np.isfinite(converted).all() or not np.isfinite(span).all():
        raise _bad_ranges(label, "has a number that is not finite in float32")
    if (span < 0).any():
        raise _bad_ranges(label, f"has a minimum above its maximum, in column {int(np.argmin(span))}")
    return converted


def _bad_ranges(label: str, reason: str) -> InputError:
    return InputError(
        f"{label} {reason}",
        "pass a .npy with the minimum and the maximum of each number, or the manifest of an encoded corpus",
    )


def measure_ranges(parts: Iterable[Floats]) -> tuple[Ranges, int]:
    """Return the minimum and maximum of each number over vectors, float32 [2, W], and the count of vectors.

    Args:
        parts: arrays float32 [N, W].

    Raises:
        InputError: there are fewer than two.
    """
    extremes: list[Floats] = []
    count = 0
    for part in parts:
        count += len(part)
        extremes += [part.min(axis=0), part.max(axis=0)] if len(part) else []
    if count < 2:
        raise InputError(
            f"{count} vector does not define a range", "calibrate on at least two texts, preferably a few hundred"
        )
    stacked = np.stack(extremes)
    return check_ranges(np.stack([stacked.min(axis=0), stacked.max(axis=0)]), "what is measured"), count


def few_vectors(count: int) -> str:
    """Warn that ranges were measured on few vectors; an empty string if there are enough."""
    if count >= FEWEST_FOR_RANGES:
        return ""
    return f"the ranges were measured on {count} vectors, which is few: values outside are clipped; use a few hundred"


def read_ranges(path: Path) -> Ranges:
    """Read ranges from a .npy file, or from the manifest of a corpus.

    Raises:
        InputError: the file cannot be read, is not one of these, or holds no valid ranges.
    """
    try:
        if path.suffix == ".json":
            return _manifest_ranges(read_json(path), path)
        array = load_array(path)
    except OSError as error:
        raise InputError(f"cannot read the ranges {path}: {error.strerror or error}", "check --ranges") from None
    except ValueError as error:
        raise _bad_ranges(str(path), f"is not an array of numbers: {first_line(error)}") from None
    return check_ranges(array, str(path))


def _manifest_ranges(content: Json, path: Path) -> Ranges:
    entry: Any = content
    for key in ("identity", "vectors", "ranges"):
        entry = entry.get(key) if isinstance(entry, Mapping) else None
    if entry is None:
        raise _bad_ranges(str(path), "is not the manifest of a corpus whose vectors have ranges")
    return check_ranges(entry, f"the ranges in {path}")


def numbers_of(array: NDArray[np.float32]) -> Json:
    """Return an array as lists of the shortest decimals that round-trip to the same float32."""
    return [[float(str(value)) for value in row] for row in array]
