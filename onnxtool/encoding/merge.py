"""Publish encoded parts: check every shard, drop duplicate ids, and write the manifest last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.text_files import FIELDS_PAGE
from onnxtool.encoding.files import START_AGAIN, Entry, on_this_machine, read_bytes, remove
from onnxtool.encoding.locations import OutputLocation, Uri
from onnxtool.encoding.manifest import Manifest, difference, read_manifest
from onnxtool.encoding.output import OutputFolder
from onnxtool.encoding.parquet import require_pyarrow
from onnxtool.encoding.records import (
    Records,
    Run,
    ShardEntry,
    ShardTexts,
    read_run,
    remove_records,
    written_by_another,
)
from onnxtool.encoding.report import MergeReport, StatusReport
from onnxtool.encoding.sources import REPEATED_ID, Reject
from onnxtool.encoding.splits import ShardName, SplitRecord, format_ranges
from onnxtool.errors import InputError, OutputExistsError, some
from onnxtool.interruption import check_interrupted, critical
from onnxtool.options import checked
from onnxtool.reading import load_array, parse_json, written_lines
from onnxtool.reports import from_json

_RECORDS_AT_ONCE = 128  # fetched concurrently, because stores are slow per request
_MOST_NAMED = 20  # ids in an error
_NOT_READ_BACK = (
    "sizes and names were compared, which have the digests of the contents; --read_back reads every shard again"
)


@checked
def merge_parts(output: OutputLocation, *, read_back: bool = False, strict: bool = False) -> MergeReport:
    """Check all shards that parts have encoded, and write the manifest and the rejected lines, as `encode_corpus` does.

    If a shard is missing or damaged, nothing is written, and the report lists the splits to encode; records of damaged
    splits are dropped, so that the next part makes them again. Of texts with the same id, the first is kept.

    Args:
        output: the folder of vectors.
        read_back: whether all files are read again, even from a store.
        strict: whether a duplicate id is an error.

    Raises:
        InputError: nothing is encoded there, no text of the corpus has a token, or ids are duplicated and `strict` is
            set.
        OnnxtoolError: the folder cannot be read or written.
    """
    folder = OutputFolder(output)
    if isinstance(folder.path, Path) and not folder.path.is_dir():  # which the lock would make
        raise _nothing(folder)
    with folder.locked(waits=True):
        return publish(folder, read_run(folder), read_back=read_back, strict=strict)


def publish(folder: OutputFolder, run: Run | None, *, read_back: bool = False, strict: bool = False) -> MergeReport:
    """Do the work of `merge_parts` while holding the folder's lock."""
    files = folder.require_names()
    if (merged := _merged(folder, run)) is not None:
        remove_records(folder)
        return _report(folder, merged, folder.remove_others(merged, files))
    if run is None:
        raise _nothing(folder)
    records = Records(folder, run)
    verify = read_back or not isinstance(folder.path, Uri)
    splits, shards, problems = _read_records(records, files, verify=verify)
    if problems:
        if (merged := _merged(folder, run)) is not None:  # by another run of the same command, meanwhile
            remove_records(folder)
            return _report(folder, merged)
        if (other := read_run(folder)) is not None and other.sha256 != run.sha256:
            raise written_by_another(folder, difference(other.identity, run.identity) or "another one")
        return _unmerged(folder, run, problems)
    _require_one_version(splits)
    repeated = find_repeated([written.texts for written in shards.values()])
    names, lines_before = [*shards], _lines_before(splits)
    if strict and repeated:
        places = [
            f"{texts.files[file]}:{line + lines_before[names[shard].split]}"
            for shard, dropped in repeated.items()
            for texts in [shards[names[shard]].texts]
            for file, line in texts.places[dropped].tolist()
        ]
        raise _repeated_error(folder, places)
    for place, dropped in repeated.items():
        shards[names[place]] = _without(records, names[place], shards[names[place]], dropped)
    done = [
        replace(shard, rejects=_counted(shard.rejects, lines_before[name.split])) for name, (shard, _) in shards.items()
    ]
    of_splits = [list(_counted(split.rejects, before)) for split, before in zip(splits, lines_before, strict=True)]
    for name, shard in zip(names, done, strict=True):
        of_splits[name.split] += shard.rejects
    for of_split in of_splits:
        of_split.sort(key=lambda reject: (reject.file, reject.line))
    rejects = [*chain(*of_splits)]
    manifest = Manifest(run.identity, tuple(done), len(rejects))
    if rejects:
        folder.write(folder.rejects_path, "".join(reject.to_json() for reject in rejects).encode())
    else:
        remove([folder.rejects_path])
    if not manifest.num_texts:
        raise _no_texts(run, rejects, folder)
    with critical():  # a published corpus with the records of its run would remain
        num_removed = folder.publish(manifest, None if repeated else files)
        remove_records(folder)
    return _report(folder, manifest, num_removed, () if verify else (_NOT_READ_BACK,))


def _nothing(folder: OutputFolder) -> InputError:
    return InputError(f"nothing is encoded in {folder.path}", "encode it: onnxtool encode part, or encode run")


def _merged(folder: OutputFolder, run: Run | None) -> Manifest | None:
    """Return the manifest if everything is published.

    Raises:
        OutputExistsError: it does not match the records.
    """
    manifest = read_manifest(folder.manifest_path)
    if manifest is not None and run is not None and manifest.identity != run.identity:
        raise OutputExistsError(
            f"{folder.path} belongs to another command than the records next to it",
            START_AGAIN,
        )
    return manifest


def _read_records(
    records: Records, files: Mapping[str, Entry], *, verify: bool
) -> tuple[list[SplitRecord], dict[ShardName, ShardEntry], dict[int, str]]:
    """Return the records of all splits and shards, or the problems of splits, whose records are dropped."""
    numbers = range(records.run.num_splits)
    problems: dict[int, str] = {}
    shards: dict[ShardName, ShardEntry] = {}
    # With a store, most of the time is spent waiting.
    with ThreadPoolExecutor(_RECORDS_AT_ONCE if isinstance(records.path, Uri) else None, "records") as workers:
        listed = records.done()
        records_of_splits = list(
            workers.map(lambda number: records.read_split(number) if number in listed else "is missing", numbers)
        )
        names = [
            ShardName(number, shard)
            for number, split in enumerate(records_of_splits)
            if not isinstance(split, str)
            for shard in range(min(split.num_shards, len(files) + 1))  # bounded, in case a record is wrong
        ]

        def read_entry(name: ShardName) -> ShardEntry | str:
            check_interrupted()
            written = records.read_shard(name)
            if isinstance(written, str):
                return written
            return records.fault(name, written.shard, files, verify=verify) or written

        for name, written in zip(names, workers.map(read_entry, names), strict=True):
            if isinstance(written, str):
                problems.setdefault(name.split, written)
                records.forget(name.split, [name])
            else:
                shards[name] = written
    for number, split in enumerate(records_of_splits):
        if isinstance(split, str):
            problems[number] = split
            if number in listed:
                records.forget(number, [])
    splits = [split for split in records_of_splits if not isinstance(split, str)]
    return splits, shards, dict(sorted(problems.items()))


def _require_one_version(splits: Sequence[SplitRecord]) -> None:
    """Refuse ranges of a file that was replaced between them, by one of the same size."""
    for number, (before, after) in enumerate(pairwise(splits), start=1):
        if after.begins_inside and before.tag and after.tag and before.tag != after.tag:
            raise InputError(
                f"splits {number - 1} and {number} were read from different versions of a file", START_AGAIN
            )


def _lines_before(splits: Sequence[SplitRecord]) -> list[int]:
    """Return the number of lines before each split in its file."""
    before, counts = 0, []
    for split in splits:
        before = before if split.begins_inside else 0
        counts.append(before)
        before += split.num_lines
    return counts


def _counted(rejects: Sequence[Reject], before: int) -> tuple[Reject, ...]:
    """Number the lines of rejects from the start of their file."""
    return tuple(replace(reject, line=reject.line + before) for reject in rejects) if before else tuple(rejects)


def _without(records: Records, name: ShardName, entry: ShardEntry, dropped: Sequence[int]) -> ShardEntry:
    """Drop texts from a shard's files, and then from its record."""
    folder, shard = records.folder, entry.shard
    with ExitStack() as stack:
        paths = [stack.enter_context(on_this_machine(folder.path / file.name)) for file in shard.files]
        plain = [folder.plain_name(file.name) for file in shard.files]
        targets = {file: folder.staged(file) for file in plain}
        ids, num_rows = drop_texts(paths, [*targets.values()], dropped)
        files = folder.commit_shard(targets) if num_rows else ()
    places = entry.texts.places[list(dropped)]
    rejects = tuple(
        Reject(entry.texts.files[file], int(line), REPEATED_ID, name)
        for (file, line), name in zip(places.tolist(), ids, strict=True)
    )
    shard = replace(
        shard,
        files=files,
        num_texts=shard.num_texts - len(dropped),
        num_passages=num_rows if shard.num_passages else 0,
        rejects=tuple(sorted((*shard.rejects, *rejects), key=lambda reject: (reject.file, reject.line))),
    )
    kept = ShardEntry(shard, entry.texts.without(dropped))
    records.write_shard(name, kept)
    remove(folder.path / file.name for file in entry.shard.files if file.name not in {new.name for new in files})
    return kept


def find_repeated(shards: Sequence[ShardTexts]) -> dict[int, list[int]]:
    """Return the texts whose id occurs earlier: ascending positions by shard number."""
    starts = np.cumsum([0, *(len(texts.digests) for texts in shards)])
    digests = np.concatenate([texts.digests for texts in shards]) if shards else np.empty(0, "V16")
    halves = digests.view("<u8").reshape(-1, 2)
    # Equal ids are then adjacent, in corpus order.
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    same = (halves[order][1:] == halves[order][:-1]).all(axis=1)
    repeated: dict[int, list[int]] = {}
    for place in np.sort(order[1:][same]).tolist():
        shard = int(np.searchsorted(starts, place, "right")) - 1
        repeated.setdefault(shard, []).append(place - int(starts[shard]))
    return repeated


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
    lines = [] if is_table else [*written_lines(last)]
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
            targets[-1].write_bytes(b"".join(compress(lines, kept)))
            _write_arrays(paths[:-1], targets[:-1], kept)
    return ids, int(kept.sum())


def _write_arrays(paths: Sequence[Path], targets: Sequence[Path], is_kept: NDArray[np.bool_]) -> None:
    """Write the array of N rows, or the array of all tokens and the array of the start of each text."""
    arrays = [load_array(path) for path in paths]
    if len(arrays) == 2:
        rows, indptr = arrays
        lengths = np.diff(indptr)
        arrays = [
            rows[np.repeat(is_kept, lengths)],
            np.concatenate([[0], np.cumsum(lengths[is_kept])]).astype(np.int64),
        ]
    elif arrays:
        arrays = [arrays[0][is_kept]]
    for array, target in zip(arrays, targets, strict=True):
        with target.open("wb") as file:
            np.save(file, array)


def _table(path: Path) -> Any:
    _, parquet = require_pyarrow()
    with parquet.ParquetFile(path) as file:
        return file.read()


def _write_table(path: Path, target: Path, is_kept: NDArray[np.bool_]) -> None:
    pyarrow, parquet = require_pyarrow()
    table = _table(path).filter(pyarrow.array(is_kept))
    parquet.write_table(table, target, use_dictionary=False, compression="zstd")


def _repeated_error(folder: OutputFolder, places: Sequence[str]) -> InputError:
    return InputError(
        f"{len(places)} lines repeat the id of an earlier line: {some(places, _MOST_NAMED)}",
        f"give them other ids, or leave out --strict to keep the first text of each; {folder.path} is not published",
    )


def _no_texts(run: Run, rejects: Sequence[Reject], folder: OutputFolder) -> InputError:
    first = (run.identity.get("input") or [{}])[0].get("name", "the collection")
    if not rejects:
        return InputError(f"{first} has no texts", "put one on each line")
    reasons = Counter(reject.kind for reject in rejects)
    first_of = {reject.kind: reject.reason for reject in reversed(rejects)}
    counts = ", ".join(
        f"{first_of[kind]} ({count} {'line' if count == 1 else 'lines'})" for kind, count in reasons.most_common(3)
    )
    return InputError(
        f"no line of {first} gave a text: {counts}", f"{folder.rejects_path} says why for each line; see {FIELDS_PAGE}"
    )


def empty_notes(num_empty: int) -> tuple[str, ...]:
    """Say that some texts cannot be found."""
    return (f"{num_empty} texts have no term, and no query finds them",) if num_empty else ()


def _report(folder: OutputFolder, manifest: Manifest, num_removed: int = 0, notes: tuple[str, ...] = ()) -> MergeReport:
    files = [file for shard in manifest.shards for file in shard.files]
    if num_truncated := sum(shard.num_truncated for shard in manifest.shards):
        notes = (*notes, f"{num_truncated} texts are longer than the model's limit, and were cut")
    num_empty = sum(shard.num_empty for shard in manifest.shards)
    notes = (*notes, *empty_notes(num_empty))
    return MergeReport(
        output=str(folder.path),
        manifest=str(folder.manifest_path),
        num_splits=manifest.identity.get("num_splits", 0),
        num_shards=len(manifest.shards),
        num_texts=manifest.num_texts,
        num_passages=manifest.num_passages,
        num_tokens=sum(shard.num_tokens for shard in manifest.shards),
        num_truncated=num_truncated,
        num_empty=num_empty,
        num_rejects=manifest.num_rejects,
        rejects_path=str(folder.rejects_path) if manifest.num_rejects else "",
        num_files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
        num_removed=num_removed,
        notes=notes,
    )


def _unmerged(folder: OutputFolder, run: Run, problems: Mapping[int, str]) -> MergeReport:
    return MergeReport(
        output=str(folder.path),
        manifest="",
        num_splits=run.num_splits,
        to_do=format_ranges(problems),
        problems={
            reason: format_ranges(number for number, problem in problems.items() if problem == reason)
            for reason in dict.fromkeys(problems.values())
        },
    )


def reasons_of(folder: OutputFolder, manifest: Manifest) -> Counter[str]:
    """Count the rejected lines of a published corpus by reason."""
    if not manifest.num_rejects:
        return Counter()
    lines = read_bytes(folder.rejects_path).splitlines()
    return Counter(from_json(Reject, parse_json(line)).kind for line in lines)


@checked
def corpus_status(output: OutputLocation) -> StatusReport:
    """Report the progress of all machines from the records of splits; `merge_parts` checks them.

    Raises:
        InputError: nothing is encoded there.
        OutputExistsError: the folder belongs to something else.
    """
    folder = OutputFolder(output)
    run = read_run(folder)
    if (manifest := _merged(folder, run)) is not None:
        count = manifest.identity.get("num_splits", 0)
        return StatusReport(
            str(folder.path), merged=True, num_splits=count, num_done=count, num_texts=manifest.num_texts, share=1.0
        )
    if run is None:
        raise _nothing(folder)
    records = Records(folder, run)
    times = {number: entry.modified for number, entry in records.done().items()}
    with ThreadPoolExecutor(_RECORDS_AT_ONCE if isinstance(records.path, Uri) else None, "records") as workers:
        records_of_splits = dict(zip(times, workers.map(records.read_split, times), strict=True))
    texts = {number: 0 if isinstance(split, str) else split.num_texts for number, split in records_of_splits.items()}
    to_do = tuple(number for number in range(run.num_splits) if number not in times)
    first = min(times, key=lambda number: times[number], default=0)
    seconds = max(times.values()) - times[first] if times else 0.0
    # The start time of the first split is unknown.
    rate = sum(count for number, count in texts.items() if number != first) / seconds if seconds else None
    return StatusReport(
        output=str(folder.path),
        merged=False,
        num_splits=run.num_splits,
        num_done=len(times),
        to_do=format_ranges(to_do),
        half_written=folder.half_written(),
        num_texts=sum(texts.values()) + sum(shard.num_texts for number in to_do for shard in records.begun(number)),
        share=len(times) / run.num_splits,
        texts_per_s=rate,
        seconds_left=len(to_do) * seconds / (len(times) - 1) if seconds else None,
    )
