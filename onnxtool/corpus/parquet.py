"""Tables in Parquet files, which need pyarrow: the rows of a corpus, and shards of dense vectors.

Letters of shapes: N texts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from onnxtool.errors import InputError
from onnxtool.infer.vectors import DenseVectors

_ROWS_AT_A_TIME = 1024
_COLUMNS = ("id", "_id", "contents", "title", "text")


def require_pyarrow() -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and its module for Parquet.

    Raises:
        InputError: it is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise InputError(
            f"Parquet needs pyarrow, which cannot be imported: {error}",
            "pip install 'onnxtool[parquet]', or use jsonl or npy",
        ) from error
    return pa, pq


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, object], float]]:
    """Yield number, from 1, and columns of each row, and which share of the rows is read.

    Raises:
        InputError: pyarrow is not there, or the file is no Parquet.
    """
    pyarrow, parquet = require_pyarrow()
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            num_rows = max(1, file.metadata.num_rows)
            columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row, number / num_rows
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} cannot be read after row {number}: {error}", "write it again") from error


class ParquetTable:
    """A file with `id`: string, `vector`: a list of H float32, and `contents`: string where it is wanted."""

    def __init__(self, path: Path, width: int, *, contents: bool) -> None:
        self._arrow, parquet = require_pyarrow()
        self._vector_type = self._arrow.list_(self._arrow.float32(), width)
        fields = [("id", self._arrow.string()), ("vector", self._vector_type)]
        if contents:
            fields.insert(1, ("contents", self._arrow.string()))
        self._schema = self._arrow.schema(fields)
        # Dictionaries of floats cost time and save nothing.
        self._writer = parquet.ParquetWriter(path, self._schema, use_dictionary=False, compression="zstd")

    def append(self, columns: Mapping[str, Sequence[str]], vectors: DenseVectors) -> None:
        """Write N rows as a row group; `vectors` is float32 [N, H]."""
        flat = self._arrow.array(vectors.reshape(-1))
        arrays: dict[str, Any] = {name: self._arrow.array(values) for name, values in columns.items()}
        arrays["vector"] = self._arrow.FixedSizeListArray.from_arrays(flat, type=self._vector_type)
        self._writer.write_table(self._arrow.table([arrays[name] for name in self._schema.names], schema=self._schema))

    def close(self) -> None:
        """Write what belongs at the end of the file."""
        self._writer.close()
