"""The rows of a corpus in Parquet files, which need pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from onnxtool.encoding.files import open_file
from onnxtool.encoding.locations import Location
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


def read_rows(path: Location, number: int = 0) -> Iterator[tuple[int, dict[str, object], float]]:
    """Yield the rows after the first `number` ones: number, columns, and the share of rows that is read.

    Row groups that lie before are not read.

    Raises:
        InputError: pyarrow is not there, or the file is no Parquet.
    """
    pyarrow, parquet = require_pyarrow()
    try:
        with open_file(path) as opened, parquet.ParquetFile(opened) as file:
            num_rows = max(1, file.metadata.num_rows)
            columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
            skipped, first = number, 0
            while first < file.num_row_groups and skipped >= file.metadata.row_group(first).num_rows:
                skipped -= file.metadata.row_group(first).num_rows
                first += 1
            groups = range(first, file.num_row_groups)
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, row_groups=groups, columns=columns):
                rows = batch.slice(skipped).to_pylist()
                skipped = max(0, skipped - len(batch))
                for row in rows:
                    number += 1
                    yield number, row, number / num_rows
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} cannot be read after row {number}: {error}", "write it again") from error
