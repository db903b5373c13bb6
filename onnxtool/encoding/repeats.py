"""Duplicate ids in a corpus: found by digest once everything is encoded, and dropped from the shards."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding.parquet import require_pyarrow
from onnxtool.encoding.records import ShardTexts
from onnxtool.reading import lines_of, load_array, open_lines, parse_json

REPEATED_ID = "repeats the id of an earlier line"


def find_repeated(shards: Sequence[ShardTexts]) -> dict[int, list[int]]:
    """Return the texts whose id occurs earlier: ascending positions by shard number."""
    starts = np.cumsum([0, *(len(texts.digests) for texts in shards)])
    digests = np.concatenate([texts.digests for texts in shards]) if shards else np.empty(0, "V16")
    halves = digests.view("<u8").reshape(-1, 2)
    # Equal ids are then adjacent, in corpus order.
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
    found: dict[int, list[int]] = {}
    for place in np.sort(order[1:][same]).tolist():
        shard = int(np.searchsorted(starts, place, "right")) - 1
        found.setdefault(shard, []).append(place - int(starts[shard]))
    return found


def drop_texts(paths: Sequence[Path], targets: Sequence[Path], dropped: Sequence[int]) -> tuple[list[str], int]:
    """Rewrite the files of a shard without some of its texts.

    Args:
        paths: the files.
        targets: output paths; nothing is written if no text is left.
        dropped: the positions of texts, ascending.

    Returns:
        the ids of these texts, and how many rows are left: texts, or passages of texts.
    """
    first, last = paths[0], paths[-1]
    is_table = first.suffix == ".parquet"
    lines = [] if is_table else _read_lines(last)
    rows = _table(first).select(["id"]).to_pylist() if is_table else [parse_json(line) for line in lines]
    names = [str(row["id"]) for row in rows]
    has_passages = bool(is_table and "begin" in _table(first).column_names) or (not is_table and "begin" in rows[0])
    # A text has one row, or one for each of its passages, of which the first is called `ID#0`.
    begins = np.array([name.endswith("#0") for name in names]) if has_passages else np.ones(len(names), bool)
    text_of_row = np.cumsum(begins) - 1
    kept = ~np.isin(text_of_row, np.asarray(dropped))
    (firsts,) = np.nonzero(begins)
    ids = [names[firsts[place]].removesuffix("#0" if has_passages else "") for place in dropped]
    if kept.any():
        if is_table:
            _write_table(first, targets[0], kept)
        else:
            _write_lines(targets[-1], [line for line, is_kept in zip(lines, kept, strict=True) if is_kept])
            _write_arrays(paths[:-1], targets[:-1], kept)
    return ids, int(kept.sum())


def _read_lines(path: Path) -> list[bytes]:
    with open_lines(path) as file:
        return [line or b"" for line, _ in lines_of(file)]


def _write_lines(path: Path, lines: Sequence[bytes]) -> None:
    with path.open("wb") as raw:
        if ".gz" not in path.suffixes:
            raw.writelines(lines)
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
            file.writelines(lines)


def _write_arrays(paths: Sequence[Path], targets: Sequence[Path], kept: NDArray[np.bool_]) -> None:
    """Write the array of N rows, or the array of all tokens and the array of the start of each text."""
    arrays = [load_array(path) for path in paths]
    if len(arrays) == 2:
        rows, indptr = arrays
        lengths = np.diff(indptr)
        arrays = [rows[np.repeat(kept, lengths)], np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int64)]
    elif arrays:
        arrays = [arrays[0][kept]]
    for array, target in zip(arrays, targets, strict=True):
        with target.open("wb") as file:
            np.save(file, array)


def _table(path: Path) -> Any:
    _, parquet = require_pyarrow()
    with parquet.ParquetFile(path) as file:
        return file.read()


def _write_table(path: Path, target: Path, kept: NDArray[np.bool_]) -> None:
    pyarrow, parquet = require_pyarrow()
    table = _table(path).filter(pyarrow.array(kept))
    parquet.write_table(table, target, use_dictionary=False, compression="zstd")
