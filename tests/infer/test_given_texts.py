"""What counts as texts in a call: a string is one, lists and columns are many, and all else is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import onnxtool
from onnxtool.errors import OptionError
from onnxtool.infer import LoadedModel, TextInput, load
from tests.infer.tiny_models import VOCABULARY, model_for, table, write_model

V = len(VOCABULARY)
TEXTS = ["cat", "dog"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("given"), model_for("sparse-encoding", table(V, V), "logits"))


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load(path)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("dense")
    modules: dict[str, Any] = {"Transformer": {}, "Pooling": {"pooling_mode": "mean"}}
    return load(
        write_model(folder, model_for("sentence-similarity", table(V, 4), "last_hidden_state"), modules=modules)
    )


MANY: dict[str, Callable[[], Any]] = {
    "tuple": lambda: tuple(TEXTS),
    "generator": lambda: (text for text in TEXTS),
    "iterator": lambda: map(str, TEXTS),
    "values of a mapping": lambda: dict(enumerate(TEXTS)).values(),
    "array": lambda: np.array(TEXTS),
    "array of objects": lambda: np.array(TEXTS, dtype=object),
    "pandas": lambda: pd.Series(TEXTS, index=[7, 3]),
    "arrow": lambda: pa.array(TEXTS),
    "chunks of arrow": lambda: pa.chunked_array([[TEXTS[0]], [TEXTS[1]]]),
}


@pytest.mark.parametrize("kind", MANY)
def test_columns_and_iterators_are_many_texts(dense: LoadedModel, kind: str) -> None:
    """As a list of the same."""
    np.testing.assert_array_equal(dense.encode(MANY[kind]()), dense.encode(TEXTS))


def test_a_string_is_one_text_with_one_vector(model: LoadedModel, dense: LoadedModel) -> None:
    """It has no axis for the batch, as in sentence-transformers."""
    vector, vectors = dense.encode("cat"), dense.encode(["cat"])
    assert isinstance(vector, np.ndarray)
    assert vector.shape == (4,)
    np.testing.assert_array_equal(vector, np.asarray(vectors)[0])
    np.testing.assert_array_equal(np.asarray(dense.encode(np.str_("cat"))), vector)
    terms, rows = model.encode("cat dog"), model.encode(["cat dog"])
    assert isinstance(terms, onnxtool.infer.vectors.SparseVector)
    assert isinstance(rows, onnxtool.infer.SparseVectors)
    assert [terms.terms()] == rows.terms()
    np.testing.assert_array_equal(terms.to_dense(), rows.to_dense()[0])


def test_a_string_is_one_text_in_every_call(path: Path, model: LoadedModel) -> None:
    """In one answer, and where the model is loaded by the same call."""
    for one in ("cat dog", TextInput("cat dog")):
        assert [answer.text for answer in model.answer(one).answers] == ["cat dog"]
        assert [answer.text for report in model.stream(one) for answer in report.answers] == ["cat dog"]
    assert len(model.tokenize("cat dog")) == len(model.windows("cat dog")) == 1
    assert onnxtool.infer.InferOptions(path, texts="cat dog").texts == ("cat dog",)
    assert onnxtool.BenchmarkOptions(texts="cat dog").texts == (TextInput("cat dog"),)
    np.testing.assert_array_equal(
        onnxtool.encode(str(path), "cat").to_dense(),  # type: ignore[union-attr]  # a sparse encoder
        model.encode("cat").to_dense(),  # type: ignore[union-attr]
    )


WRONG: dict[str, Any] = {
    "mapping": {"cat": 1},
    "bytes": b"cat",
    "bytes in a list": [b"cat"],
    "nothing": None,
    "nothing in a list": ["cat", None],
    "number": 3,
    "numbers": [1, 2],
    "set": {"cat"},
    "lists in a list": [["cat", "dog"]],
    "array of numbers": np.zeros(2),
    "table": pd.DataFrame({"text": TEXTS}),
    "missing in a column": pd.Series(["cat", None]),
    "table of arrow": pa.table({"text": TEXTS}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_everything_else_is_an_error_that_says_what_was_given(path: Path, model: LoadedModel, kind: str) -> None:
    """Of ours, with the place in a list."""
    with pytest.raises(OptionError, match=r"^texts(\[\d\])?: .* is not a"):
        model.encode(WRONG[kind])
    with pytest.raises(OptionError, match=r"^texts(\[\d\])?: .* is not a"):
        onnxtool.encode(path, WRONG[kind])


def test_an_iterator_is_refused_at_the_text_that_is_none(model: LoadedModel) -> None:
    """It is read as it comes."""
    with pytest.raises(OptionError, match=r"^texts\[1\]: 3 is not a string"):
        model.encode(iter(["cat", 3]))  # type: ignore[arg-type]


def test_pairs_may_be_lists() -> None:
    """As JSON has them; more than two are no pair."""
    from onnxtool.infer.answering import Item
    from onnxtool.options import check

    assert check("pair", ["a", "b"], Item) == ("a", "b")
    with pytest.raises(OptionError, match="pair"):
        check("pair", ["a", "b", "c"], Item)


def test_a_row_beyond_the_last_is_no_row(model: LoadedModel) -> None:
    """A negative place counts from the end."""
    vectors = model.encode(TEXTS)
    assert isinstance(vectors, onnxtool.infer.SparseVectors)
    assert vectors[-1].terms() == vectors.terms()[1]
    with pytest.raises(IndexError):
        vectors.row(2)
    assert [vectors[place].shape for place in range(2)] == [(V,)] * 2
