"""The rows of a corpus in Parquet files, which need pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

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
    path: Location, begin: int = 0, end: int | None = None
) -> Iterator[tuple[dict[str, object] | LineError, float]]:
    """Yield the rows of the row groups that begin in a range of bytes, and the share of these rows that is read.

    The first range has what begins before it as well, and the one without an end what begins behind the file, so that
    no group of a file that lies about them is lost. A row whose text is not UTF-8, which Parquet does not check, is an
    error instead of its columns.

    Raises:
        InputError: pyarrow is not there, or the file is no Parquet, or damaged.
    """
    pyarrow, parquet = require_pyarrow()
    number = 0
    try:
        with open_file(path) as opened, parquet.ParquetFile(opened) as file:
            columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
            groups = [
                place
                for place, group in enumerate(_groups(file))
                if (not begin or group.begin >= begin) and (end is None or group.begin < end)
            ]
            num_rows = max(1, sum(_groups(file)[place].num_rows for place in groups))
            for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, row_groups=groups, columns=columns):
                for row in _rows(batch):
                    number += 1
                    yield row, number / num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; pyarrow's own have no number
            raise
        raise InputError(f"{path} cannot be read after row {number}: {error}", "write it again") from error


def rows_before(path: Location, place: int) -> int:
    """Return how many rows are in row groups that begin before a byte of a file.

    Raises:
        InputError: pyarrow is not there, or the file is no Parquet.
    """
    pyarrow, parquet = require_pyarrow()
    try:
        with open_file(path) as opened, parquet.ParquetFile(opened) as file:
            return sum(group.num_rows for group in _groups(file) if group.begin < place)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} cannot be read: {error}", "write it again") from error


class _Group(NamedTuple):
    """A row group: the byte at which it begins, and its rows."""

    begin: int
    num_rows: int


def _groups(file: Any) -> list[_Group]:
    groups = [file.metadata.row_group(place) for place in range(file.num_row_groups)]
    firsts = [group.column(0) if group.num_columns else None for group in groups]
    return [
        _Group(first.dictionary_page_offset or first.data_page_offset if first else 0, group.num_rows)
        for group, first in zip(groups, firsts, strict=True)
    ]


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
