"""The rows of a corpus in Parquet files, which need pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from onnxtool.checkpoint.text_files import LineError
from onnxtool.encoding.files import open_file
from onnxtool.encoding.locations import Location
from onnxtool.errors import InputError, imported
from onnxtool.reading import MOST_LINE_BYTES

_LEAST_ROWS, _MOST_ROWS = 16, 1024  # at a time; one by one takes 30 us each
_MOST_BATCH_BYTES = 1 << 28
_MOST_PAGE_BYTES = 1 << 30  # pages are read whole, and have about a thousand rows
_COLUMNS = ("id", "_id", "contents", "title", "text", "query-id", "corpus-id", "score")


def require_pyarrow() -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and its module for Parquet.

    Raises:
        InputError: it is not installed.
    """
    why = "Parquet needs pyarrow", "pip install 'onnxtool-cli[parquet]', or use jsonl or npy"
    return imported("pyarrow", *why), imported("pyarrow.parquet", *why)


def read_rows(
    path: Location, begin: int = 0, end: int | None = None
) -> Iterator[tuple[dict[str, object] | LineError, float]]:
    """Yield the rows of the row groups that begin in a byte range, and the fraction of these rows read so far.

    Row groups that begin before the first range belong to it, and groups that begin after the file's end to the range
    without an end, so that no group is lost if the file misstates them. A row whose text is not UTF-8, which Parquet
    does not check, or is longer than a line may be, yields an error instead of its columns. The number of rows read at
    a time assumes that each is as long as its whole group: in a dictionary, one text may be that of every row.

    Raises:
        InputError: pyarrow is missing, the file is not Parquet or damaged, or a group is too large for its rows.
    """
    pyarrow, parquet = require_pyarrow()
    number = 0
    try:
        with open_file(path) as opened, parquet.ParquetFile(opened) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if name in _COLUMNS]
            is_named = any({name, text} <= {*columns} for name in ("id", "_id") for text in ("contents", "text"))
            absent = {} if is_named else dict.fromkeys(names)  # for an error, which lists them
            groups = {
                place: group
                for place, group in enumerate(_groups(file))
                if (not begin or group.begin >= begin) and (end is None or group.begin < end)
            }
            num_rows = max(1, sum(group.num_rows for group in groups.values()))
            for place, group in groups.items():
                if group.size_bytes * min(1.0, _MOST_ROWS / max(1, group.num_rows)) > _MOST_PAGE_BYTES:
                    raise InputError(
                        f"{path} has {group.size_bytes} bytes in {group.num_rows} rows that are read at once",
                        "write it in smaller row groups, or texts that are this long as jsonl",
                    )
                size = min(_MOST_ROWS, max(_LEAST_ROWS, _MOST_BATCH_BYTES // max(1, group.size_bytes)))
                for batch in file.iter_batches(batch_size=size, row_groups=[place], columns=columns):
                    for row in range(len(batch)):
                        number += 1
                        yield _row(batch, row, absent), number / num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; pyarrow's own have no number
            raise
        raise InputError(f"{path} cannot be read after row {number}: {error}", "write it again") from error


def rows_before(path: Location, place: int) -> int:
    """Return the number of rows in row groups that begin before a byte offset.

    Raises:
        InputError: pyarrow is missing, or the file is not Parquet.
    """
    pyarrow, parquet = require_pyarrow()
    try:
        with open_file(path) as opened, parquet.ParquetFile(opened) as file:
            return sum(group.num_rows for group in _groups(file) if group.begin < place)
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} cannot be read: {error}", "write it again") from error


class _Group(NamedTuple):
    """A row group: the byte at which it begins, its rows, and the bytes of the columns that are read, unpacked."""

    begin: int
    num_rows: int
    size_bytes: int


def _groups(file: Any) -> list[_Group]:
    return [_group(file.metadata.row_group(place)) for place in range(file.num_row_groups)]


def _group(group: Any) -> _Group:
    columns = [group.column(place) for place in range(group.num_columns)]
    begin = columns[0].dictionary_page_offset or columns[0].data_page_offset if columns else 0
    sizes = [column.total_uncompressed_size for column in columns if column.path_in_schema in _COLUMNS]
    return _Group(begin, group.num_rows, sum(sizes))


def _row(batch: Any, place: int, columns: Mapping[str, object]) -> dict[str, object] | LineError:
    row = {**columns}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[place].as_py()
        except UnicodeDecodeError as error:
            return LineError(f"is not UTF-8: {error.reason} at byte {error.start} of {name}", "convert it to UTF-8")
        except (ValueError, OverflowError):  # a timestamp that Python cannot represent; it is not an id or text
            row[name] = None
        if column.nbytes > MOST_LINE_BYTES and len(str(row[name])) > MOST_LINE_BYTES:
            return LineError(f"has more than {MOST_LINE_BYTES} characters", "split the text")
    return row
