"""Write the vectors of a shard: JSON Lines as Anserini reads them, Parquet, or an array with a file of ids.

The same texts and vectors give the same bytes. Letters of shapes: N texts, H hidden size.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from onnxtool.corpus.parquet import require_pyarrow
from onnxtool.corpus.sources import Document
from onnxtool.infer.vectors import DenseVectors, SparseVectors

# Anserini reads a corpus as if each term occurred in its text as often as its weight says, and drops the fraction
# (JsonVectorCollection), so weights are scaled before. Its own encoder has 256 steps for weights up to 5
# (SpladePlusPlusEncoder), in float32, and rounds half up as Java's Math.round does.
WEIGHT_RANGE = 5
QUANTIZATION_STEPS = 256


def quantize_weights(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """Turn weights, float32 of any shape, into int64 of the same shape: round(weight / 5 * 256)."""
    scaled = weights.astype(np.float32) / np.float32(WEIGHT_RANGE) * np.float32(QUANTIZATION_STEPS)
    # In float64, as adding a half in float32 rounds a second time.
    return np.asarray(np.floor(scaled.astype(np.float64) + 0.5), np.int64)


@dataclass(frozen=True)
class ShardFormat:
    """What the files of the output are.

    Attributes:
        kind: one of OUTPUT_FORMATS.
        gzip: whether jsonl is compressed.
        contents: whether texts are written beside their vectors.
        weights: `int` or `float`, of the terms of sparse vectors.
    """

    kind: str
    gzip: bool
    contents: bool
    weights: str

    def names(self, shard: int) -> tuple[str, ...]:
        """Return the files of a shard, counted from 0."""
        stem = f"part-{shard:05d}"
        if self.kind == "npy":
            return f"{stem}.npy", f"{stem}.ids.jsonl"
        return (f"{stem}.{self.kind}{'.gz' if self.gzip else ''}",)

    def check(self) -> None:
        """Fail before any work where what writes this format is not installed.

        Raises:
            InputError: pyarrow is missing.
        """
        if self.kind == "parquet":
            require_pyarrow()

    def open(self, paths: Sequence[Path]) -> ShardWriter:
        """Begin the files of a shard, `paths` in the order of `names`."""
        if self.kind == "npy":
            array, ids = paths
            return _ArrayWriter(array, ids, contents=self.contents)
        (path,) = paths
        if self.kind == "parquet":
            return _ParquetWriter(path, contents=self.contents)
        return _JsonWriter(path, self)


class _JsonWriter:
    """A text a line: `id`, `contents` and `vector`, an object of terms and weights or a list of numbers."""

    def __init__(self, path: Path, shard_format: ShardFormat) -> None:
        self._format = shard_format
        self._raw = path.open("wb")
        self._file: BinaryIO | gzip.GzipFile = self._raw
        if shard_format.gzip:  # without name and time, which would make each file another
            self._file = gzip.GzipFile(filename="", mode="wb", fileobj=self._raw, mtime=0)

    def append(self, documents: Sequence[Document], vectors: DenseVectors | SparseVectors) -> None:
        rows = self._terms(vectors) if isinstance(vectors, SparseVectors) else _numbers(vectors)
        for document, row in zip(documents, rows, strict=True):
            head = _fields(document, contents=self._format.contents)
            self._file.write(f'{{{head}, "vector": {row}}}\n'.encode())

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def _terms(self, vectors: SparseVectors) -> Iterator[str]:
        """Yield each text's object of terms, in the order of the vocabulary, with those of weight 0 left out."""
        keys = np.array([f"{_json(term)}: " for term in vectors.vocabulary], dtype=object)
        is_int = self._format.weights == "int"
        for place in range(len(vectors)):
            ids, weights = vectors.row(place)
            values = quantize_weights(weights) if is_int else weights
            kept = values != 0
            # numpy writes the fewest digits that are this float32; of a float64 Python would write twice as many.
            written = values[kept].astype(str).tolist()
            yield f"{{{', '.join(map(add, keys[ids[kept]].tolist(), written))}}}"


def _numbers(vectors: DenseVectors) -> Iterator[str]:
    for row in vectors:
        yield f"[{', '.join(row.astype(str).tolist())}]"


class _ParquetWriter:
    """A table of `id`, `contents` where they are wanted, and `vector`, a list of H float32; a row group per window."""

    def __init__(self, path: Path, *, contents: bool) -> None:
        self._arrow, self._parquet = require_pyarrow()
        self._path = path
        self._contents = contents
        self._writer: Any = None

    def append(self, documents: Sequence[Document], vectors: DenseVectors | SparseVectors) -> None:
        dense = _dense(vectors)
        columns: dict[str, Any] = {"id": [document.id for document in documents]}
        if self._contents:
            columns["contents"] = [document.contents for document in documents]
        kind = self._arrow.list_(self._arrow.float32(), dense.shape[1])
        columns["vector"] = self._arrow.FixedSizeListArray.from_arrays(self._arrow.array(dense.reshape(-1)), type=kind)
        table = self._arrow.table(columns)
        if self._writer is None:
            # Dictionaries of floats cost time and save nothing.
            self._writer = self._parquet.ParquetWriter(
                self._path, table.schema, use_dictionary=False, compression="zstd"
            )
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _ArrayWriter:
    """An array, float32 [N, H], and a line of JSON for each of its rows, with the `id`."""

    def __init__(self, array: Path, ids: Path, *, contents: bool) -> None:
        self._array = array.open("wb")
        self._ids = ids.open("wb")
        self._contents = contents
        self._shape = (0, 0)

    def append(self, documents: Sequence[Document], vectors: DenseVectors | SparseVectors) -> None:
        dense = np.ascontiguousarray(_dense(vectors))
        if not self._shape[0]:
            self._write_header((0, dense.shape[1]))
        self._array.write(dense.tobytes())
        self._shape = (self._shape[0] + len(dense), dense.shape[1])
        self._ids.writelines(f"{{{_fields(document, contents=self._contents)}}}\n".encode() for document in documents)

    def close(self) -> None:
        if self._shape[0]:
            self._array.seek(0)
            self._write_header(self._shape)
        self._array.close()
        self._ids.close()

    def _write_header(self, shape: tuple[int, int]) -> None:
        """Write numpy's header, which leaves room for the number of rows to grow (since numpy 1.24)."""
        np.lib.format.write_array_header_1_0(self._array, {"descr": "<f4", "fortran_order": False, "shape": shape})


def _dense(vectors: DenseVectors | SparseVectors) -> DenseVectors:
    return vectors.to_dense() if isinstance(vectors, SparseVectors) else vectors


def _fields(document: Document, *, contents: bool) -> str:
    text = f', "contents": {_json(document.contents)}' if contents else ""
    return f'"id": {_json(document.id)}{text}'


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


ShardWriter = _JsonWriter | _ParquetWriter | _ArrayWriter
"""Writes the files of a shard, a window at a time; `close` writes what belongs at the end, and closes them."""
