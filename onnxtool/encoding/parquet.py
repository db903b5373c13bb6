"""The rows of a corpus in Parquet files, which need pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from onnxtool.errors import InputError

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
