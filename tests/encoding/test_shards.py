"""The files of a shard hold its vectors, whatever they are, and other libraries read them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from onnxtool.encoding.shards import ShardFormat, quantize_weights
from onnxtool.encoding.sources import Document
from onnxtool.infer import SparseVectors, TokenVectors
from onnxtool.infer.vectors import AnyVectors
from tests.encoding.corpora import lines_of

DTYPES = ("float32", "float16", "int8", "uint8")
COUNTS = (3, 0, 1, 5)  # tokens of each text


def _write(folder: Path, kind: str, parts: Sequence[AnyVectors], **settings: Any) -> Path:
    """Write `parts`, a window each, with the texts t0, t1 and so on."""
    shard_format = ShardFormat(kind, False, **{"weights": "float", **settings})
    writer = shard_format.open([folder / name for name in shard_format.names("part-00000")])
    count = 0
    for part in parts:
        writer.append([Document(f"t{count + place}", "", "", 1) for place in range(len(part))], part)
        count += len(part)
    writer.close()
    return folder / shard_format.names("part-00000")[0]


def _tokens(dtype: str) -> list[TokenVectors]:
    """Two windows of the same texts, whose second one begins with a text without a token."""
    values = np.random.default_rng(0).uniform(0, 9, (sum(COUNTS), 4)).astype(dtype)
    whole = TokenVectors(np.cumsum([0, *COUNTS]), values)
    return [whole, whole.take([1, 3, 0])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_of_tokens_are_arrays_with_the_place_of_each_text(tmp_path: Path, dtype: str) -> None:
    """[T, W] and int64 [N + 1], over the windows of a shard as over those of a text."""
    _write(tmp_path, "npy", _tokens(dtype), by_token=True)
    found = TokenVectors(np.load(tmp_path / "part-00000.indptr.npy"), np.load(tmp_path / "part-00000.npy"))
    wanted = TokenVectors.concatenate(_tokens(dtype))
    assert found.vectors.dtype == dtype
    np.testing.assert_array_equal(found.indptr, wanted.indptr)
    np.testing.assert_array_equal(found.vectors, wanted.vectors)
    assert [line["id"] for line in lines_of(tmp_path)] == [f"t{place}" for place in range(7)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_of_tokens_are_lists_of_lists_in_a_table(tmp_path: Path, dtype: str) -> None:
    """A text without a token has an empty list."""
    table = pq.read_table(_write(tmp_path, "parquet", _tokens(dtype), by_token=True))
    element = {"float32": "float", "float16": "halffloat"}.get(dtype, dtype)
    assert str(table.schema.field("vectors").type) == f"list<element: fixed_size_list<element: {element}>[4]>"
    wanted = TokenVectors.concatenate(_tokens(dtype))
    assert table.column("vectors").to_pylist() == [wanted.row(place).tolist() for place in range(7)]
    _write(tmp_path, "jsonl", _tokens(dtype), by_token=True)
    for line, place in zip(lines_of(tmp_path), range(7), strict=True):
        np.testing.assert_array_equal(np.array(line["vector"], dtype).reshape(-1, 4), wanted.row(place))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_vector_a_text_keeps_its_dtype(tmp_path: Path, dtype: str) -> None:
    """In arrays, tables and lines."""
    vectors = np.random.default_rng(0).uniform(0, 9, (5, 8)).astype(dtype)
    np.testing.assert_array_equal(np.load(_write(tmp_path, "npy", [vectors[:2], vectors[2:]])), vectors)
    table = pq.read_table(_write(tmp_path, "parquet", [vectors[:2], vectors[2:]]))
    assert table.column("vector").to_pylist() == vectors.tolist()
    _write(tmp_path / "", "jsonl", [vectors])
    found = [line["vector"] for line in lines_of(tmp_path) if "vector" in line]
    np.testing.assert_array_equal(np.array(found, dtype), vectors)


@pytest.mark.parametrize("weights", ["int", "float"])
def test_terms_are_two_lists_in_a_table(tmp_path: Path, weights: str) -> None:
    """Ids ascending, and weights beside them; a text without terms has empty lists."""
    dense = np.zeros((3, 6), np.float32)
    dense[0, [1, 4]], dense[2, [0, 2, 5]] = (1.5, 0.001), (2.0, 0.25, 4.0)  # 0.001 is counted as 0
    vectors = SparseVectors.from_dense(dense, list("abcdef"))
    table = pq.read_table(_write(tmp_path, "parquet", [vectors.take([0]), vectors.take([1, 2])], weights=weights))
    element = "int32" if weights == "int" else "float"
    assert [str(table.schema.field(name).type) for name in ("indices", "values")] == [
        "list<element: int32>",
        f"list<element: {element}>",
    ]
    written: Any = quantize_weights(dense) if weights == "int" else dense
    for row, ids, values in zip(written, *(table.column(n).to_pylist() for n in ("indices", "values")), strict=True):
        assert ids == np.flatnonzero(row).tolist()
        assert values == row[row != 0].tolist()
