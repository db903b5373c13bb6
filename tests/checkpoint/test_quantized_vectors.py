"""Vectors are stored as codes and bits by their definition, and ranges that are none end in one clear error."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers.util import quantize_embeddings

from onnxtool.checkpoint.quantized_vectors import VectorType, measure_ranges, read_ranges, restore_vectors
from onnxtool.checkpoint.vector_types import BITS, CODES, VECTOR_TYPES
from onnxtool.errors import InputError

VECTORS = np.random.default_rng(0).standard_normal((40, 16)).astype(np.float32)
VECTORS[0, :3] = 0.0, -0.0, 1e-30  # only what is above zero is a bit
VECTORS[:, 5] = 0.25  # a range of one value
RANGES, _ = measure_ranges([VECTORS[:20], VECTORS[20:30]])  # the last ten lie partly outside


def _code(value: float, low: float, high: float) -> int:
    """The step in which a number lies, from 0 to 255, in float32 as the vectors are."""
    step = (np.float32(high) - np.float32(low)) / np.float32(255) or np.float32(1)
    return int(min(255, max(0, np.floor((np.float32(value) - np.float32(low)) / step))))


def _byte(row: NDArray[np.float32], place: int) -> int:
    return sum((value > 0) << (7 - position) for position, value in enumerate(row[8 * place : 8 * place + 8]))


@pytest.mark.parametrize(("name", "offset"), [("int8", 128), ("uint8", 0)])
def test_codes_are_the_steps_of_the_range_of_each_number(name: str, offset: int) -> None:
    """What lies outside is cut to the first and the last."""
    codes = VectorType.of(name, RANGES).apply(VECTORS)
    assert codes.dtype == name
    wanted = [[_code(v, *RANGES[:, column]) - offset for column, v in enumerate(row)] for row in VECTORS]
    assert codes.tolist() == wanted
    assert {-offset, 255 - offset} <= set(codes[30:].reshape(-1).tolist())


@pytest.mark.parametrize(("name", "dtype", "offset"), [("binary", "int8", 128), ("ubinary", "uint8", 0)])
def test_bits_are_the_numbers_above_zero(name: str, dtype: str, offset: int) -> None:
    """Eight to a byte, the first in the highest bit."""
    bits = VectorType.of(name).apply(VECTORS)
    assert bits.dtype == dtype
    assert bits.tolist() == [[_byte(row, place) - offset for place in range(2)] for row in VECTORS]


@pytest.mark.parametrize("name", VECTOR_TYPES)
def test_restored_vectors_are_in_the_middle_of_what_is_stored_so(name: Any) -> None:
    """So that they are stored as the same codes again, by sentence-transformers as well, and are off by half a step."""
    ranges = RANGES if name in CODES else None
    stored = VectorType.of(name, ranges).apply(VECTORS)
    restored = restore_vectors(stored, name, ranges=ranges)
    assert restored.dtype == np.float32
    assert restored.shape == VECTORS.shape
    np.testing.assert_array_equal(restore_vectors(stored.tolist(), name, ranges=ranges), restored)
    np.testing.assert_array_equal(restore_vectors(stored[None], name, ranges=ranges), restored[None])
    np.testing.assert_array_equal(restored[:, 5], restored[0, 5])
    if name in CODES:
        np.testing.assert_array_equal(quantize_embeddings(restored, name, ranges), stored)
        cut = np.clip(VECTORS, *RANGES)
        assert (np.abs(restored - cut) <= (RANGES[1] - RANGES[0]) * 0.501 / 255).all()
        np.testing.assert_array_equal(restored[:, 5], VECTORS[:, 5])  # a range of one value
    elif name in BITS:
        np.testing.assert_array_equal(quantize_embeddings(restored, name), stored)
        np.testing.assert_array_equal(restored, np.where(VECTORS > 0, 1, -1))
    else:
        np.testing.assert_allclose(restored, VECTORS, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("stored", "name", "ranges", "reason"),
    [
        (np.zeros((2, 16), np.float32), "int8", RANGES, r"float32 \[2, 16\] holds no vectors stored as int8"),
        (np.full((2, 16), 200), "int8", RANGES, r"int64 \[2, 16\] holds no vectors stored as int8"),
        (np.zeros((2, 16), np.int8), "float16", None, "holds no vectors stored as float16"),
        (np.int8(3), "binary", None, r"int8 \[\] holds no vectors"),
        ([[1, 2], [3]], "int8", RANGES, "different lengths"),
        (np.zeros((2, 16), "U1"), "uint8", RANGES, "holds no vectors stored as uint8"),
        (np.zeros((2, 15), np.int8), "int8", RANGES, "the ranges cover 16 numbers, but the vectors have 15"),
        (np.zeros((2, 16), np.int8), "int8", None, "need the range of each number"),
        (np.zeros((2, 16), np.int8), "binary", RANGES, "have none"),
        (np.zeros((2, 16), np.int8), "int4", None, "'int4' is not one of"),
        (np.zeros((2, 16), np.int8), "int8", [["a"] * 16] * 2, r"ranges: .* is not a path"),
    ],
)
def test_what_is_not_stored_so_is_not_restored(stored: Any, name: str, ranges: Any, reason: str) -> None:
    """In one error that says what it is."""
    with pytest.raises(InputError, match=reason):
        restore_vectors(stored, name, ranges=ranges)


def test_float16_refuses_what_it_cannot_hold() -> None:
    """An infinity is no nearest number."""
    with pytest.raises(InputError, match="float16 ends at 65504"):
        VectorType.of("float16").apply(np.full((1, 2), 7e4, np.float32))


def _npy(array: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **settings)
    return file.getvalue()


def _header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, RANGES)
    return file.getvalue()


def _manifest(ranges: object) -> bytes:
    return json.dumps({"identity": {"vectors": {"ranges": ranges}}}).encode()


class _Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, ("raise SystemExit('a pickle ran')",)


FILES: dict[str, tuple[str, bytes, str]] = {
    "cut": ("r.npy", _npy(RANGES)[:-8], "not an array of numbers"),
    "empty": ("r.npy", b"", "not an array of numbers"),
    "promising": ("r.npy", _header((2, 1 << 40)) + bytes(64), "not an array of numbers"),
    "a pickle": ("r.npy", pickle.dumps(_Evil()), "not an array of numbers"),
    "objects": ("r.npy", _npy(np.array([[_Evil()], [1]], object), allow_pickle=True), "not an array of numbers"),
    "texts": ("r.npy", _npy(np.array([["a"], ["b"]])), "holds <U1"),
    "an archive": ("r.npy", _npz(), "archive"),
    "a row": ("r.npy", _npy(RANGES[0]), r"shape \[16\]"),
    "of no numbers": ("r.npy", _npy(RANGES[:, :0]), r"shape \[2, 0\]"),
    "not finite": ("r.npy", _npy(np.array([[0, np.nan], [1, 1]], np.float32)), "not finite"),
    "too far": ("r.npy", _npy(np.array([[-3e38], [3e38]], np.float32)), "not finite"),
    "too large": ("r.npy", _npy(np.array([[0.0], [1e300]])), "not finite"),
    "upside down": ("r.npy", _npy(RANGES[::-1]), "minimum above its maximum"),
    "another JSON": ("r.json", b'{"identity": [1]}', "not the manifest"),
    "no JSON": ("r.json", b"{", "not an array of numbers"),
    "deep": ("r.json", b"[" * 200_000, "not an array of numbers"),
    "uneven": ("r.json", _manifest([[1.0], [1.0, 2.0]]), "rows of different lengths"),
    "words": ("r.json", _manifest([["a"], ["b"]]), "holds <U1"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_holds_no_ranges_ends_in_one_error(tmp_path: Path, case: str) -> None:
    """Nothing of it runs, and nothing that it promises is allocated."""
    name, content, reason = FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        read_ranges(tmp_path / name)
    assert caught.value.hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With the way out."""
    for name in ("r.npy", "r.json"):
        with pytest.raises(InputError, match=f"{name}: No such file"):
            read_ranges(tmp_path / name)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_ranges_are_read_as_float32(tmp_path: Path, dtype: str) -> None:
    """Of any float."""
    np.save(tmp_path / "r.npy", RANGES.astype(dtype))
    np.testing.assert_array_equal(read_ranges(tmp_path / "r.npy"), RANGES.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "ranges", "width", "reason"),
    [
        ("int4", None, 16, "cannot be stored as 'int4'"),
        ("int8", None, 16, "need the range of each number"),
        ("binary", RANGES, 16, "have none"),
        ("uint8", RANGES, 15, "ranges cover 16 numbers, but the vectors have 15"),
        ("ubinary", None, 12, "eight numbers to a byte, and these have 12"),
    ],
)
def test_types_that_do_not_fit_are_refused(name: str, ranges: Any, width: int, reason: str) -> None:
    """With the way out."""
    with pytest.raises(InputError, match=reason) as caught:
        VectorType.of(name, ranges).apply(np.ones((1, width), np.float32))
    assert caught.value.hint


def test_one_vector_shows_no_range() -> None:
    """As in sentence-transformers."""
    with pytest.raises(InputError, match="1 vector does not define a range"):
        measure_ranges([VECTORS[:1], VECTORS[:0]])
