"""Write the vectors of a shard: JSON Lines in Anserini's layout, Parquet, or arrays with a file of ids.

The same texts and vectors give the same bytes. Shape letters: N texts, H numbers of a vector, T terms or tokens of
all texts together, W numbers of a token's vector.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding.parquet import require_pyarrow
from onnxtool.encoding.sources import Document
from onnxtool.infer.vectors import AnyVectors, SparseVectors, TokenVectors
from onnxtool.reports import Json

PARQUET_METADATA = "onnxtool.vectors"


# Anserini reads a corpus as if each term occurred in its text as often as its weight says, and drops the fraction
# (JsonVectorCollection), so weights are scaled before. Its own encoder has 256 steps for weights up to 5
# (SpladePlusPlusEncoder), in float32, and rounds half up as Java's Math.round does.
WEIGHT_RANGE = 5
QUANTIZATION_STEPS = 256


def quantize_weights(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """Turn weights, float32 of any shape, into int64 of the same shape: round(weight / 5 * 256)."""
    scaled = weights.astype(np.float32) / np.float32(WEIGHT_RANGE) * np.float32(QUANTIZATION_STEPS)
    # In float64, because adding a half in float32 would round twice.
    return np.asarray(np.floor(scaled.astype(np.float64) + 0.5), np.int64)


@dataclass(frozen=True)
class ShardFormat:
    """The output file format.

    Attributes:
        kind: one of OUTPUT_FORMATS.
        contents: whether texts are written with their vectors.
        weights: `int` or `float`, for the terms of sparse vectors.
        by_token: whether a text has one vector per token.
    """

    kind: str
    contents: bool
    weights: str
    by_token: bool = False

    def names(self, stem: str) -> tuple[str, ...]:
        """Return the file names of a shard, which start with its name."""
        if self.kind == "npy":
            return f"{stem}.npy", *((f"{stem}.indptr.npy",) if self.by_token else ()), f"{stem}.ids.jsonl"
        return (f"{stem}.{self.kind}",)

    def open(self, paths: Sequence[Path], description: Mapping[str, Json] = MappingProxyType({})) -> ShardWriter:
        """Begin the files of a shard, `paths` in the order of `names`; `description` describes the vectors."""
        if self.kind == "npy":
            *arrays, ids = paths
            return _ArrayWriter(arrays, ids, contents=self.contents)
        (path,) = paths
        return _ParquetWriter(path, self, description) if self.kind == "parquet" else _JsonWriter(path, self)


def _written_terms(vectors: SparseVectors, weights: str) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any]]:
    """Return the terms to write, in the layout of SparseVectors, without those whose quantized weight is 0."""
    values: NDArray[Any] = quantize_weights(vectors.weights) if weights == "int" else vectors.weights
    kept = values != 0
    before = np.concatenate([[0], np.cumsum(kept)])
    return before[vectors.indptr], vectors.indices[kept], values[kept]


class _JsonWriter:
    """One text per line: `id`, `contents` and `vector`: terms and weights, numbers, or a list of numbers per token.

    For passages, `begin` and `end` are their character offsets in the text.
    """

    def __init__(self, path: Path, shard_format: ShardFormat) -> None:
        self._format = shard_format
        self._file = path.open("wb")

    def append(self, documents: Sequence[Document], vectors: AnyVectors) -> None:
        for document, row in zip(documents, self._rows(vectors), strict=True):
            head = _fields(document, contents=self._format.contents)
            self._file.write(f'{{{head}, "vector": {row}}}\n'.encode())

    def close(self) -> None:
        self._file.close()

    def _rows(self, vectors: AnyVectors) -> Iterator[str]:
        if isinstance(vectors, SparseVectors):
            yield from self._terms(vectors)
        elif isinstance(vectors, TokenVectors):
            yield from (_list(map(_numbers, vectors.row(place))) for place in range(len(vectors)))
        else:
            yield from map(_numbers, vectors)

    def _terms(self, vectors: SparseVectors) -> Iterator[str]:
        """Yield each text's object of terms, in vocabulary order."""
        keys = np.array([f"{_json(term)}: " for term in vectors.vocabulary], dtype=object)
        indptr, indices, values = _written_terms(vectors, self._format.weights)
        for start, end in itertools.pairwise(indptr):
            # numpy writes the fewest digits that are this float32; of a float64 Python would write twice as many.
            written = values[start:end].astype(str).tolist()
            yield f"{{{', '.join(map(add, keys[indices[start:end]].tolist(), written))}}}"


def _numbers(row: NDArray[Any]) -> str:
    return _list(row.astype(str).tolist())


def _list(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


class _ParquetWriter:
    """A table of `id`, optional `contents`, and the vectors; one row group per window.

    For passages, `begin` and `end` are their character offsets in the text.

    `vector` is a list of H numbers, `vectors` one such list for each token; for sparse vectors, `indices` are the ids
    of the terms, ascending, and `values` their weights. The metadata `onnxtool.vectors` describes the vectors in JSON
    as the manifest does, with the ranges of quantized numbers.
    """

    def __init__(self, path: Path, shard_format: ShardFormat, description: Mapping[str, Json]) -> None:
        self._arrow, self._parquet = require_pyarrow()
        self._path = path
        self._format = shard_format
        self._metadata = {PARQUET_METADATA: json.dumps(dict(description))}
        self._writer: Any = None

    def append(self, documents: Sequence[Document], vectors: AnyVectors) -> None:
        columns: dict[str, Any] = {"id": [document.id for document in documents]}
        if self._format.contents:
            columns["contents"] = [document.contents for document in documents]
        if spans := [document.span for document in documents if document.span is not None]:
            columns |= {
                name: self._arrow.array(np.array(column, np.int32))
                for name, column in zip(("begin", "end"), zip(*spans, strict=True), strict=True)
            }
        table = self._arrow.table(columns | self._columns(vectors)).replace_schema_metadata(self._metadata)
        if self._writer is None:
            # Dictionaries of floats cost time and save nothing.
            self._writer = self._parquet.ParquetWriter(
                self._path, table.schema, use_dictionary=False, compression="zstd"
            )
        self._writer.write_table(table)

    def _columns(self, vectors: AnyVectors) -> dict[str, Any]:
        if isinstance(vectors, SparseVectors):
            indptr, indices, values = _written_terms(vectors, self._format.weights)
            values = values.astype(np.int32 if self._format.weights == "int" else np.float32)
            return {"indices": self._lists(indptr, indices), "values": self._lists(indptr, values)}
        if isinstance(vectors, TokenVectors):
            return {"vectors": self._lists(vectors.indptr, self._rows(vectors.vectors))}
        return {"vector": self._rows(vectors)}

    def _lists(self, indptr: NDArray[np.int64], values: Any) -> Any:
        return self._arrow.ListArray.from_arrays(self._arrow.array(indptr.astype(np.int32)), self._arrow.array(values))

    def _rows(self, array: NDArray[Any]) -> Any:
        flat = self._arrow.array(array.reshape(-1))
        return self._arrow.FixedSizeListArray.from_arrays(flat, type=self._arrow.list_(flat.type, array.shape[1]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _ArrayWriter:
    """An array of vectors, [N, H], and a line of JSON for each text, with the `id`, and `begin` and `end` of passages.

    For token vectors, the array is [T, W], and a second one, int64 [N + 1], holds the start of each text.
    """

    def __init__(self, arrays: Sequence[Path], ids: Path, *, contents: bool) -> None:
        self._arrays = [_GrowingArray(path) for path in arrays]
        self._ids = ids.open("wb")
        self._contents = contents
        self._num_tokens = 0

    def append(self, documents: Sequence[Document], vectors: AnyVectors) -> None:
        if isinstance(vectors, TokenVectors):
            rows, places = self._arrays
            rows.append(vectors.vectors)
            places.append(vectors.indptr[places.num_rows > 0 :] + self._num_tokens)
            self._num_tokens += len(vectors.vectors)
        else:
            (rows,) = self._arrays
            assert isinstance(vectors, np.ndarray)  # noqa: S101  terms have no place in an array
            rows.append(vectors)
        self._ids.writelines(f"{{{_fields(document, contents=self._contents)}}}\n".encode() for document in documents)

    def close(self) -> None:
        for array in self._arrays:
            array.close()
        self._ids.close()


class _GrowingArray:
    """An array file to which rows are appended; the first rows determine dtype and other sizes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._first: NDArray[Any] | None = None
        self.num_rows = 0

    def append(self, rows: NDArray[Any]) -> None:
        if self._first is None:
            self._first = rows[:0]
            self._write_header()
        self._file.write(np.ascontiguousarray(rows).tobytes())
        self.num_rows += len(rows)

    def close(self) -> None:
        if self._first is not None:
            self._file.seek(0)
            self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """Write numpy's header, which leaves room for the number of rows to grow (since numpy 1.24)."""
        assert self._first is not None  # noqa: S101  there are rows
        descr, shape = np.lib.format.dtype_to_descr(self._first.dtype), (self.num_rows, *self._first.shape[1:])
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


def write_vectors(path: Path, ids: Sequence[str], vectors: AnyVectors) -> None:
    """Write the vectors of N texts to one file, by its suffix.

    .npy has the array alone, float32 [N, H]. .npz has `ids` and `vectors`, with the `indptr` of token vectors; or terms
    as scipy.sparse.save_npz writes them. .parquet is the table of a corpus.
    """
    if path.suffix.lower() == ".parquet":
        writer = _ParquetWriter(path, ShardFormat("parquet", contents=False, weights="float"), {})
        writer.append([Document(name, "", "", 0) for name in ids], vectors)
        writer.close()
        return
    arrays: dict[str, Any]
    if isinstance(vectors, SparseVectors):
        arrays = {"data": vectors.weights, "indices": vectors.indices, "indptr": vectors.indptr}
        arrays |= {"shape": vectors.shape, "format": b"csr"}
    elif isinstance(vectors, TokenVectors):
        arrays = {"vectors": vectors.vectors, "indptr": vectors.indptr}
    else:
        arrays = {"vectors": vectors}
    with path.open("wb") as file:
        if path.suffix.lower() == ".npy":
            np.save(file, arrays["vectors"])
        else:
            np.savez(file, allow_pickle=False, ids=np.array(ids), **arrays)


def _fields(document: Document, *, contents: bool) -> str:
    text = f', "contents": {_json(document.contents)}' if contents else ""
    place = "" if document.span is None else f', "begin": {document.span[0]}, "end": {document.span[1]}'
    return f'"id": {_json(document.id)}{text}{place}'


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


ShardWriter = _JsonWriter | _ParquetWriter | _ArrayWriter
"""Writes the files of a shard, one window at a time; `close` writes the last part, and closes them."""
