"""The rows of a corpus in Parquet files, which need pyarrow."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from types import ModuleType
from typing import Any

from onnxtool.checkpoint.text_files import LineError
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


def read_rows(
    path: Location, number: int = 0, end: int | None = None
) -> Iterator[tuple[int, dict[str, object] | LineError, float]]:
    """Yield the rows after the first `number` ones: number, columns, and the share of rows that is read.

    Row groups that lie before are not read, nor those from row `end` on, with which a group begins. A row whose text is
    not UTF-8, which Parquet does not check, is an error in place of its columns.

    Raises:
        InputError: pyarrow is not there, or the file is no Parquet, or damaged.
    """
    pyarrow, parquet = require_pyarrow()
    try:
        with open_file(path) as opened, parquet.ParquetFile(opened) as file:
            num_rows = max(1, file.metadata.num_rows)
            columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
            ends = _ends(file)
            first = bisect_right(ends, number)
            last = len(ends) if end is None else bisect_left(ends, end) + 1
            groups = range(first, min(last, len(ends)))
            skipped = number - (ends[first - 1] if first else 0)
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, row_groups=groups, columns=columns):
                rows = _rows(batch.slice(skipped))
                skipped = max(0, skipped - len(batch))
                for row in rows:
                    number += 1
                    yield number, row, number / num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; pyarrow's own have no number
            raise
        raise InputError(f"{path} cannot be read after row {number}: {error}", "write it again") from error


def _rows(batch: Any) -> list[dict[str, object] | LineError]:
    """Return the rows of a batch; one by one where that fails for all of them at once."""
    try:
        rows: list[dict[str, object] | LineError] = batch.to_pylist()
    except (ValueError, OverflowError):
        return [_row(batch, place) for place in range(len(batch))]
    return rows


def _row(batch: Any, place: int) -> dict[str, object] | LineError:
    row: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[place].as_py()
        except UnicodeDecodeError as error:
            return LineError(f"is not UTF-8: {error.reason} at byte {error.start} of {name}", "convert it to UTF-8")
        except (ValueError, OverflowError):  # a time that Python has none for, which is neither an id nor a text
            row[name] = None
    return row


def group_ends(path: Location) -> list[int]:
    """Return the number of rows up to the end of each row group; none where that cannot be read."""
    pyarrow, parquet = require_pyarrow()
    try:
        with open_file(path) as opened, parquet.ParquetFile(opened) as file:
            return _ends(file)
    except (pyarrow.ArrowException, OSError):
        return []


def _ends(file: Any) -> list[int]:
    return list(accumulate(file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)))
