"""Sparse vectors are those of a dictionary for each text."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onnxtool.infer import SparseVectors, TokenVectors
from onnxtool.infer.heads.head import softmax
from onnxtool.infer.vectors import cosine_similarities

NAMES = ("a", "b", "c", "d", "e")
DENSE = np.array([[0, 2, 0, 1, 0], [0, 0, 0, 0, 0], [3, 0, 0, 0, 3], [0.5, 1, 1.5, 2, 0]], np.float32)
VECTORS = SparseVectors.from_dense(DENSE, NAMES)


def test_terms_come_with_the_heaviest_first() -> None:
    """Of equals that with the lowest id; a text without terms has none."""
    wanted = [{"b": 2.0, "d": 1.0}, {}, {"a": 3.0, "e": 3.0}, {"d": 2.0, "c": 1.5, "b": 1.0, "a": 0.5}]
    assert VECTORS.terms() == wanted
    assert [list(terms) for terms in VECTORS.terms()] == [list(terms) for terms in wanted]
    assert VECTORS.terms(1) == [{"b": 2.0}, {}, {"a": 3.0}, {"d": 2.0}]


def test_many_terms_of_one_weight_stay_in_order() -> None:
    """Sorting is stable, whatever their number."""
    names = [str(place) for place in range(500)]
    (terms,) = SparseVectors.from_dense(np.ones((1, 500), np.float32), names).terms()
    assert list(terms) == names


def test_rows_are_kept() -> None:
    """In compressed rows, with the dtypes that scipy takes, and back."""
    assert VECTORS.shape == (4, 5)
    assert VECTORS.indptr.tolist() == [0, 2, 2, 4, 8]
    arrays = (VECTORS.indptr, VECTORS.indices, VECTORS.weights)
    assert [str(array.dtype) for array in arrays] == ["int64", "int32", "float32"]
    np.testing.assert_array_equal(VECTORS.to_dense(), DENSE)
    assert [array.tolist() for array in VECTORS.row(2)] == [[0, 4], [3.0, 3.0]]


def test_texts_can_be_taken_and_put_together() -> None:
    """In any order, twice as well."""
    for places in ([3, 0, 1, 2], [1], [2, 2], []):
        np.testing.assert_array_equal(VECTORS.take(places).to_dense(), DENSE[places])
    both = SparseVectors.concatenate([VECTORS, VECTORS.take([2])])
    np.testing.assert_array_equal(both.to_dense(), DENSE[[0, 1, 2, 3, 2]])


def test_terms_can_be_left_out() -> None:
    """Everywhere."""
    wanted = DENSE.copy()
    wanted[:, [0, 3]] = 0
    np.testing.assert_array_equal(VECTORS.without({0, 3}).to_dense(), wanted)
    assert VECTORS.without({0, 3}).indptr.tolist() == [0, 1, 1, 2, 4]


def test_cosines_are_those_of_the_definition() -> None:
    """Symmetric, one on the diagonal, and 0 for a vector of zeros."""
    vectors = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    vectors[3] = 0.0
    cosines = cosine_similarities(vectors)
    for i in range(3):
        for j in range(3):
            a, b = vectors[i].tolist(), vectors[j].tolist()
            wanted = sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
            assert cosines[i, j] == pytest.approx(wanted, abs=1e-9)
    assert not cosines[3].any()
    assert np.abs(cosines).max() <= 1.0


def test_probabilities_do_not_overflow() -> None:
    """Logits of fp16's range are fine, and so are those that a mask set to minus infinity."""
    logits = np.array([[6e4, 6e4, -np.inf], [0.0, math.log(3.0), -np.inf]])
    np.testing.assert_allclose(softmax(logits), [[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]], rtol=1e-12)


def test_vectors_of_tokens_are_kept_text_by_text() -> None:
    """Also where a text has none; parts are put together, and texts taken out, without mixing them."""
    rows = [np.arange(6, dtype=np.float32).reshape(3, 2), np.zeros((0, 2), np.float32), np.full((1, 2), 9, np.float32)]
    vectors = TokenVectors.stack(rows)
    assert (len(vectors), vectors.width, vectors.indptr.tolist()) == (3, 2, [0, 3, 3, 4])
    again = TokenVectors.concatenate([vectors, vectors.take([2, 0])])
    for place, row in enumerate([*rows, rows[2], rows[0]]):
        np.testing.assert_array_equal(again.row(place), row)
