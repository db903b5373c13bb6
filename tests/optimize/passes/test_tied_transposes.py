"""Transposed copies of weights."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from onnxtool.optimize.passes.duplicates import tied_transposes
from onnxtool.optimize.passes.products import transposed_weights
from tests.optimize.passes.builders import (
    assert_left_alone,
    assert_same_numbers,
    build,
    normal,
    operators,
)
from tests.optimize.passes.properties import Row

TABLE = normal(512, 128)
COPY = np.ascontiguousarray(TABLE.T)
TIED = "g (int64[B, S] ids) => (float[B, S, 512] y) { x = Gather(table, ids) y = MatMul(x, head) }"
IDS = {"ids": np.array([[0, 511, 7]])}


def test_an_output_layer_that_is_a_copy_of_the_embedding_is_tied_to_it() -> None:
    """One tensor is left, and the product transposes while it multiplies."""
    model = build(TIED, {"table": TABLE, "head": COPY})
    assert_same_numbers(tied_transposes, model, IDS, atol=1e-4)
    assert operators(model) == ["Gather", "Transpose", "MatMul"]
    assert list(model.graph.initializers) == ["table"]
    assert_same_numbers(transposed_weights, model, IDS, atol=1e-4)
    assert operators(model) == ["Gather", "FusedMatMul"]


def test_two_products_that_are_each_other_s_transpose_keep_one_weight() -> None:
    """The one that comes first goes."""
    text = "g (float[B, 512] x) => (float[B, 512] y) { h = MatMul(x, table) y = MatMul(h, head) }"
    model = build(text, {"table": TABLE, "head": COPY})
    assert_same_numbers(tied_transposes, model, atol=0.2)  # sums of squares of 512 numbers
    assert len(model.graph.initializers) == 1


def changed(place: tuple[int, int], value: float) -> np.ndarray:
    """Return the copy with another number in one place."""
    copy = COPY.copy()
    copy[place] = value
    return copy


@pytest.mark.parametrize("copy", [changed((100, 300), 1.0), normal(128, 512, seed=1)], ids=["in one number", "wholly"])
def test_another_weight_is_left_alone(copy: np.ndarray) -> None:
    """Every bit is compared, not only the samples."""
    assert_left_alone(tied_transposes, build(TIED, {"table": TABLE, "head": copy}))


def test_zeros_of_another_sign_are_another_weight() -> None:
    """They are equal, and not the same."""
    table = TABLE.copy()
    table[300, 100] = -0.0
    assert_left_alone(tied_transposes, build(TIED, {"table": table, "head": changed((100, 300), 0.0)}))


@pytest.mark.parametrize(
    "text",
    [
        "g (int64[B, S] ids) => (float[B, S, 128] x, float[128, 512] y) { x = Gather(table, ids) y = Neg(head) }",
        "g (float[512, 128] x) => (float[512, 512] y, float[128, 128] z) { y = MatMul(x, head) z = MatMul(head, x) }",
        "g (float[B, 128] x, float[128, 512] head) => (float[B, 512] y) { y = MatMul(x, head) z = Neg(table) }",
    ],
    ids=["no product", "from the left", "an input"],
)
def test_other_uses_are_left_alone(text: str) -> None:
    """A transposition would cost more than the copy."""
    assert_left_alone(tied_transposes, build(text, {"table": TABLE, "head": COPY}))


def test_types_that_no_product_transposes_are_left_alone() -> None:
    """A Transpose in the file would be all that comes of it."""
    text = "g (int64[B, S] ids) => (double[B, S, 512] y) { x = Gather(table, ids) y = MatMul(x, head) }"
    model = build(text, {"table": TABLE.astype(np.float64), "head": COPY.astype(np.float64)})
    assert_left_alone(tied_transposes, model)


def test_small_weights_are_not_looked_at() -> None:
    """There is nothing to win."""
    text = "g (int64[B] ids) => (float[B, 8] y) { x = Gather(table, ids) y = MatMul(x, head) }"
    assert_left_alone(tied_transposes, build(text, {"table": TABLE[:8, :8], "head": TABLE[:8, :8].T.copy()}))


def test_types_that_differ_are_left_alone() -> None:
    """A weight in half precision is no copy."""
    body = "y = MatMul(x, head) z = MatMul(v, table)"
    model = build(
        f"g (float[B, 128] x, float16[B, 512] v) => (float[B, 512] y, float16[B, 128] z) {{ {body} }}",
        {"table": TABLE.astype(np.float16), "head": COPY},
    )
    assert_left_alone(tied_transposes, model)


# Sums of 512 products in another order.
ROW = Row(tied_transposes, {"head": partial(build, TIED, {"table": TABLE, "head": COPY})}, IDS, atol=1e-4)
