"""Shards of a plan: which a machine encodes, how far all machines are, and publishing what they made.

No machine waits for another: a shard that has a record is done, and two that make the same shard write the same bytes.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

from onnxtool.encoding.files import Entry, on_this_machine, remove, write
from onnxtool.encoding.job import Job
from onnxtool.encoding.locations import AnyLocation, Uri
from onnxtool.encoding.manifest import Manifest, difference, read_manifest
from onnxtool.encoding.options import InputElsewhere, MemoryLimit, ModelElsewhere, Workers
from onnxtool.encoding.output import OutputFolder
from onnxtool.encoding.pipeline import OnBatch
from onnxtool.encoding.plan import CorpusPlan, read_plan
from onnxtool.encoding.planned_shards import PlannedShard
from onnxtool.encoding.records import PartRecord, Records, remove_records
from onnxtool.encoding.report import MergeReport, StatusReport
from onnxtool.encoding.sources import Document, Reject, SourceReader, find_sources, no_texts
from onnxtool.encoding.windows import Placed, Window, repeated_id
from onnxtool.encoding.workers import RunOptions
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.interruption import check_interrupted
from onnxtool.options import UNSET, Option, Options, checked

RECORDS_AT_ONCE = 128  # are asked for, of a store that takes a while for each
_NOT_READ_BACK = (
    "sizes and names were compared, which have the digests of the contents; --read_back reads every shard again"
)
_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class PartOptions(Options):
    """Which shards of a plan are encoded, and how.

    Attributes:
        part: `2/7` is the second of seven parts, which are equal; `slurm` and `kubernetes` read it from the variables
            of an array of jobs.
        shards: in place of it numbers and ranges of shards, such as `3, 7-12`.
        model_path: the model, where it is not at the place that the plan says.
        input_path: likewise the corpus.
        workers: batches that run at once, as of CorpusOptions.
        memory_limit: as of RunOptions.
    """

    part: Annotated[
        str | None,
        Option(
            "Encode this part of the shards: 2/7 is the second of seven; slurm and kubernetes read it from the "
            "variables of an array of jobs.",
            metavar="I/N",
            default="all shards",
        ),
    ] = None
    shards: Annotated[
        str | None, Option("Encode these shards: numbers and ranges from 0, as merge lists them.", metavar="3,7-12")
    ] = None
    model_path: ModelElsewhere = UNSET
    input_path: InputElsewhere = UNSET
    workers: Workers = 0
    memory_limit: MemoryLimit = 0

    def of_a_run(self) -> RunOptions:
        """Return the same as options of one worker of this machine."""
        return RunOptions(
            workers=1,
            threads=self.workers,
            memory_limit=self.memory_limit,
            model_path=self.model_path,
            input_path=self.input_path,
        )


def _checked(record: PartRecord | str, planned: PlannedShard) -> PartRecord | str:
    """Return the record of a shard that was made from the texts of the plan, else why it was not."""
    if not isinstance(record, str):
        shard = record.shard
        found = (shard.digest, shard.num_texts + len(shard.rejects), len(record.rejects))
        if found != (planned.digest, planned.texts, planned.rejects):
            return "has a record of other texts"
    return record


def missing_shards(plan: CorpusPlan, wanted: Sequence[int]) -> list[int]:
    """Return which of the shards are not done; none where all are merged.

    Raises:
        OutputExistsError: the folder has files of others, or belongs to something else.
    """
    files = plan.folder.require_names()
    if _is_merged(plan):
        return []
    found = _read_records(plan, Records(plan.folder, plan.sha256), wanted, files)
    return [number for number in wanted if isinstance(found[number], str)]


def _read_records(
    plan: CorpusPlan,
    records: Records,
    numbers: Sequence[int],
    files: Mapping[str, Entry],
    *,
    verify: bool = False,
    known: Mapping[int, PartRecord] | None = None,
    listed: Mapping[str, Entry] | None = None,
) -> dict[int, PartRecord | str]:
    """Return the record of each shard, or why it is not done; with `verify`, their files are read as well."""
    done = records.done(len(plan.shards), listed)

    def read(number: int) -> PartRecord | str:
        check_interrupted()
        if number not in done:
            return "is missing"
        record = (known or {}).get(number) or records.read(number)
        if not isinstance(record, str):
            record = records.checked(number, record, files)
        record = _checked(record, plan.shards[number])
        return record if isinstance(record, str) or not verify else records.altered(record) or record

    # Of a store most of the time is waited for.
    with ThreadPoolExecutor(RECORDS_AT_ONCE if isinstance(records.path, Uri) else None, "records") as workers:
        return dict(zip(numbers, workers.map(read, numbers), strict=True))


class ShardEncoder:
    """A plan and the model that encodes its shards, which is loaded once.

    Raises:
        InputError: model, corpus or versions are not those of the plan.
        OnnxtoolError: as `encode_corpus`.
    """

    def __init__(self, plan: CorpusPlan, options: PartOptions) -> None:
        self.plan = plan
        self.records = Records(plan.folder, plan.sha256)
        with ExitStack() as stack:
            vectors = plan.options
            if vectors.ranges is not None:
                vectors = replace(vectors, ranges=stack.enter_context(on_this_machine(plan.path)))
            self.job = Job.open(
                options.model_path or plan.model_path,
                options.input_path or plan.corpus,
                vectors,
                workers=options.workers,
            )
        if plan.identity != self.job.identity:
            other = difference(plan.identity, self.job.identity) or "another identity"
            raise InputError(
                f"{plan.path} is a plan for something else: {other}",
                "use the model, collection and versions that it was made with, or plan again with --force",
            )

    def encode(
        self, numbers: Sequence[int], on_batch: OnBatch, left_out: Mapping[int, Mapping[int, str]] | None = None
    ) -> Iterator[tuple[int, PartRecord]]:
        """Write shards and their records, and yield each that is done.

        Args:
            numbers: of the shards, ascending.
            on_batch: as of `encode_windows`.
            left_out: of a shard, the places of texts that are rejected, and why.
        """
        rejects: dict[int, list[Reject]] = {}
        windows = _windows(self.plan, self.job, numbers, rejects)
        if left_out:
            windows = _without(windows, left_out)
        with self.plan.folder.writing():
            for number, shard in self.job.encode(windows, self.plan.folder, on_batch):
                record = PartRecord(shard, tuple(rejects.pop(number)))
                self.records.write(number, record)
                yield number, record

    def documents(self, number: int) -> list[Document]:
        """Read the texts of a shard."""
        return [document for window in _windows(self.plan, self.job, [number], {}) for document in window.documents]


def _without(windows: Iterator[Window], left_out: Mapping[int, Mapping[int, str]]) -> Iterator[Window]:
    """Reject texts of windows by their places in their shard."""
    shard = place = -1
    for window in windows:
        place = place if window.shard == shard else 0
        shard, reasons = window.shard, left_out.get(window.shard, {})
        placed = list(enumerate(window.documents, start=place))
        place += len(placed)
        refused = tuple(
            Reject(document.file, document.line, reasons[number], document.id)
            for number, document in placed
            if number in reasons
        )
        kept = tuple(document for number, document in placed if number not in reasons)
        yield replace(window, documents=kept, refused=refused)


def _windows(plan: CorpusPlan, job: Job, numbers: Sequence[int], rejects: dict[int, list[Reject]]) -> Iterator[Window]:
    """Yield the windows of shards, and gather the rejects of each before its last one.

    Shards that follow each other are read without a seek between them, which a packed file would begin again for.
    """
    reader = SourceReader(job.sources)
    lines: Iterator[Document | Reject] = iter(())
    for before, number in itertools.pairwise((-2, *numbers)):
        shard = plan.shards[number]
        if number != before + 1:
            reader = SourceReader(job.sources, shard.begin)
            lines = iter(reader)
        rejects[number] = []
        documents = _documents(reader, lines, shard, rejects[number], is_last=number == len(plan.shards) - 1)
        is_same = False
        for window in job.split_shard(documents, number):
            if window.digest:
                is_same = (window.digest, len(rejects[number])) == (shard.digest, shard.rejects)
            if is_same or not window.digest:
                yield window
        if not is_same:
            raise InputError(
                f"the input has changed: shard {number} was planned with other texts",
                "put it back, or plan again: onnxtool encode plan --force",
            )


def _documents(
    reader: SourceReader,
    lines: Iterator[Document | Reject],
    shard: PlannedShard,
    rejects: list[Reject],
    *,
    is_last: bool,
) -> Iterator[Placed]:
    """Yield the texts of a shard; the last one has all lines that are left."""
    repeated = deque(shard.repeated)
    num_read = num_texts = 0
    while num_texts < shard.texts or is_last:
        check_interrupted()
        line = next(lines, None)
        if line is None:
            return
        if isinstance(line, Reject):
            rejects.append(line)
            continue
        if repeated and num_read == repeated[0][1]:
            repeated.popleft()
        if repeated and num_read >= repeated[0][0]:
            rejects.append(repeated_id(line))
        else:
            num_texts += 1
            yield line, reader.position
        num_read += 1


@checked
def merge_parts(
    plan_path: AnyLocation, *, read_back: bool = False, known: Mapping[int, PartRecord] | None = None
) -> MergeReport:
    """Check all shards of a plan, and write the manifest and the rejected lines, as `encode_corpus` leaves them.

    Where a shard is missing or wrong, nothing is written, and the report says which; those that are wrong are
    forgotten, so that the next part makes them again.

    Args:
        plan_path: the plan.
        read_back: whether all files are read again, also of a store.
        known: records that were read before, by the numbers of their shards.

    Raises:
        InputError: there is no such plan, or no text of the corpus has a token.
        OnnxtoolError: the folder cannot be read or written.
    """
    plan = read_plan(plan_path)
    folder, records = plan.folder, Records(plan.folder, plan.sha256)
    with folder.locked():
        files = folder.require_names()
        if _is_merged(plan):
            remove_records(folder)
            manifest = read_manifest(folder.manifest_path)
            assert manifest is not None  # noqa: S101  it is merged
            return _merged(plan, manifest, folder.remove_others(manifest, files))
        verify = read_back or not isinstance(folder.path, Uri)
        listed = records.listed()
        numbers = range(len(plan.shards))
        found = _read_records(plan, records, numbers, files, verify=verify, known=known, listed=listed)
        problems = {number: record for number, record in found.items() if isinstance(record, str)}
        if problems:
            remove(records.file(number) for number, problem in problems.items() if problem != "is missing")
            return _unmerged(plan, problems)
        done = [record for record in found.values() if not isinstance(record, str)]
        manifest, num_removed = _publish(plan, folder, done, files)
        remove_records(folder, listed if isinstance(records.path, Uri) else None)
    return _merged(plan, manifest, num_removed, () if verify else (_NOT_READ_BACK,))


def _is_merged(plan: CorpusPlan) -> bool:
    """Whether the manifest is there.

    Raises:
        OutputExistsError: it is of something else.
    """
    manifest = read_manifest(plan.folder.manifest_path)
    if manifest is None:
        return False
    if manifest.identity != plan.identity:
        raise OutputExistsError(
            f"{plan.folder.path} belongs to a run of onnxtool infer, not to this plan",
            "plan again with --force, or with another --output",
        )
    return True


def _publish(
    plan: CorpusPlan, folder: OutputFolder, records: Sequence[PartRecord], files: Mapping[str, Entry]
) -> tuple[Manifest, int]:
    """Write the lines that gave no text, and then the manifest; return it, and how many files it does not name."""
    shards = tuple(record.shard for record in records)
    rejects = [
        *itertools.chain.from_iterable(record.rejects for record in records),
        *itertools.chain.from_iterable(shard.rejects for shard in shards),
    ]
    manifest = Manifest(plan.identity, shards, len(rejects))
    if rejects:
        write(folder.rejects_path, "".join(reject.to_json() for reject in rejects).encode())
    else:
        remove([folder.rejects_path])
    if not manifest.num_texts:
        reasons = Counter(reject.kind for reject in rejects)
        raise no_texts(find_sources(plan.corpus)[0], reasons, f"{folder.rejects_path} says why for each line")
    return manifest, folder.publish(manifest, files)


def _merged(plan: CorpusPlan, manifest: Manifest, num_removed: int = 0, notes: tuple[str, ...] = ()) -> MergeReport:
    files = [file for shard in manifest.shards for file in shard.files]
    return MergeReport(
        plan=str(plan.path),
        output=str(plan.folder.path),
        manifest=str(plan.folder.manifest_path),
        num_shards=len(plan.shards),
        num_texts=manifest.num_texts,
        num_passages=manifest.num_passages,
        num_tokens=sum(shard.num_tokens for shard in manifest.shards),
        num_rejects=manifest.num_rejects,
        rejects_path=str(plan.folder.rejects_path) if manifest.num_rejects else "",
        num_files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
        num_removed=num_removed,
        notes=notes,
    )


def _unmerged(plan: CorpusPlan, problems: Mapping[int, str]) -> MergeReport:
    return MergeReport(
        plan=str(plan.path),
        output=str(plan.folder.path),
        manifest="",
        num_shards=len(plan.shards),
        to_do=shard_ranges(problems),
        problems={
            reason: shard_ranges(number for number, found in problems.items() if found == reason)
            for reason in dict.fromkeys(problems.values())
        },
    )


@checked
def corpus_status(plan_path: AnyLocation) -> StatusReport:
    """Say how far the machines are that encode a plan, by the names of their records; `merge_parts` reads them.

    Raises:
        InputError: there is no such plan.
        OutputExistsError: the folder belongs to something else.
    """
    plan = read_plan(plan_path)
    is_merged = _is_merged(plan)
    done = {} if is_merged else Records(plan.folder, plan.sha256).done(len(plan.shards))
    times = {number: found.modified for number, found in done.items()}
    to_do = () if is_merged else tuple(number for number in range(len(plan.shards)) if number not in times)
    num_texts = sum(shard.texts for shard in plan.shards)
    num_left = sum(plan.shards[number].texts for number in to_do)
    first = min(times, key=lambda number: times[number], default=0)
    seconds = max(times.values()) - times[first] if times else 0.0
    # The first shard was begun at a time that nothing tells.
    rate = sum(plan.shards[number].texts for number in times if number != first) / seconds if seconds else None
    return StatusReport(
        plan=str(plan.path),
        output=str(plan.folder.path),
        merged=is_merged,
        num_shards=len(plan.shards),
        num_done=len(plan.shards) - len(to_do),
        to_do=shard_ranges(to_do),
        half_written=plan.folder.half_written(),
        num_texts=num_texts,
        num_encoded=num_texts - num_left,
        share=1 - num_left / num_texts,
        texts_per_s=rate,
        seconds_left=num_left / rate if rate else None,
    )


def wanted_shards(plan: CorpusPlan, options: PartOptions) -> tuple[int, ...]:
    """Return the shards that are asked for, ascending.

    Raises:
        InputError: there are no such ones.
    """
    count = len(plan.shards)
    if options.shards is not None:
        if options.part is not None:
            raise InputError("both a part and shards were passed", "leave out --part or --shards")
        return parse_shards(options.shards, count)
    if options.part is None:
        return tuple(range(count))
    index, parts = parse_part(options.part, os.environ)
    return tuple(range(index * count // parts, (index + 1) * count // parts))


def parse_part(text: str, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of a part, from 0, and how many there are.

    Raises:
        InputError: `text` is no part, or the variables of an array of jobs are missing or do not fit.
    """
    if text == "slurm":
        task, first, count, step = (
            _variable(f"SLURM_ARRAY_TASK_{name}", environment, text, default)
            for name, default in (("ID", None), ("MIN", None), ("COUNT", None), ("STEP", "1"))
        )
        index, rest = divmod(task - first, max(1, step))
        if rest or not 0 <= index < count:
            raise InputError(
                f"task {task} is not one of {count} from {first} on in steps of {step}",
                "give the array tasks that follow each other, such as --array=0-15, or pass --part I/N",
            )
        return index, count
    if text == "kubernetes":
        index = _variable("JOB_COMPLETION_INDEX", environment, text, None)
        count = _variable("JOB_COMPLETIONS", environment, text, None)
        if index >= count:
            raise InputError(
                f"JOB_COMPLETION_INDEX is {index}, and JOB_COMPLETIONS {count}",
                "give the container the completions of its job as JOB_COMPLETIONS",
            )
        return index, count
    match = _PART.fullmatch(text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(
            f"{text!r} is no part", "pass I/N with I from 1 to N, such as 2/7, or slurm, or kubernetes, as --part"
        )
    return int(match[1]) - 1, int(match[2])


def _variable(name: str, environment: Mapping[str, str], scheduler: str, default: str | None) -> int:
    value = environment.get(name, default)
    if value is None:
        raise InputError(
            f"the variable {name} is not set", f"pass --part {scheduler} in an array of jobs, else --part I/N"
        )
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise InputError(f"the variable {name} is {value!r}, and no number", "pass --part I/N")
    return int(value)


def parse_shards(text: str, count: int) -> tuple[int, ...]:
    """Return the numbers in a list such as `3, 7-12`, ascending.

    Raises:
        InputError: it is none, or a number is not below `count`.
    """
    numbers: set[int] = set()
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise InputError(f"{item.strip()!r} names no shards", "pass numbers and ranges such as 3,7-12 as --shards")
        if last >= count:
            raise InputError(f"there is no shard {last}: the plan has 0 to {count - 1}", "correct --shards")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def shard_ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers as `3, 7-12`."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)
