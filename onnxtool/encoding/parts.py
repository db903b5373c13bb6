"""Encode shards of a plan on any machine, say how far all machines are, and publish what they made.

A shard has a record, `NAME.parts/part-NNNNN.json`, which is written after its files: what has no record is not done. No
machine waits for another. Two that make the same shard write the same bytes under names of their own, and rename them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from onnxtool.encoding.job import Job
from onnxtool.encoding.manifest import Manifest, ShardRecord, difference, file_sha256, parse_shard, read_manifest
from onnxtool.encoding.options import CorpusProgress, OnProgress, Workers
from onnxtool.encoding.output import OutputFolder, publish, staged
from onnxtool.encoding.plan import CorpusPlan, PlannedShard, read_plan
from onnxtool.encoding.report import MergeReport, PartReport, StatusReport
from onnxtool.encoding.sources import Document, Reject, SourceReader, find_sources, no_texts
from onnxtool.encoding.windows import Placed, Window, repeated_id
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.interruption import check_interrupted
from onnxtool.options import Option

_FORMAT = 1
_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class PartOptions:
    """Which shards of a plan are encoded, and how.

    Attributes:
        part: `2/7` is the second of seven parts, which are equal; `slurm` and `kubernetes` read it from the variables
            of an array of jobs.
        shards: in place of it numbers and ranges of shards, such as `3, 7-12`.
        model_path: the model, where it is not at the place that the plan says.
        input_path: likewise the corpus.
        workers: batches that run at once, as of CorpusOptions.
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
    model_path: Annotated[Path | None, Option("The model, where it lies elsewhere than when it was planned.")] = None
    input_path: Annotated[
        Path | None, Option("The collection, where it lies elsewhere than when it was planned.", name="input")
    ] = None
    workers: Workers = 0


class PartRecord(NamedTuple):
    """A shard that is written, and the lines among its own that gave no text."""

    shard: ShardRecord
    rejects: tuple[Reject, ...]


class Records:
    """The records of shards that were made by a plan."""

    def __init__(self, plan: CorpusPlan) -> None:
        self._plan = plan
        self.path = plan.folder.records_path

    def file(self, number: int) -> Path:
        """Return where the record of a shard lies."""
        return self.path / f"part-{number:05d}.json"

    def write(self, number: int, record: PartRecord) -> None:
        """Write the record of a shard whose files are in place."""
        content = {"format": _FORMAT, "plan": self._plan.sha256, **_fields(record)}
        path, token = self.file(number), secrets.token_hex(4)
        self.path.mkdir(exist_ok=True)
        staged(path, token).write_text(json.dumps(content) + "\n", encoding="utf-8")
        publish(path, token)

    def read(self, number: int) -> PartRecord | str:
        """Return the record of a shard that is done, else why it is not."""
        planned = self._plan.shards[number]
        try:
            content = json.loads(self.file(number).read_bytes())
            if content["format"] != _FORMAT or content["plan"] != self._plan.sha256:
                return "was made by another plan"
            record = PartRecord(parse_shard(content["shard"]), tuple(Reject(**entry) for entry in content["rejects"]))
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
            return f"has a record that cannot be read: {error}"
        shard = record.shard
        found = (shard.digest, shard.num_texts + len(shard.rejects), len(record.rejects))
        if found != (planned.digest, planned.texts, planned.rejects):
            return "has a record of other texts"
        for file in shard.files:
            # A name of the record is compared before anything is read: it may lead elsewhere.
            if not re.fullmatch(rf"part-{number:05d}\.[a-z.]+", file.name):
                return f"has a record of a file {file.name!r}"
            try:
                size = (self._plan.folder.path / file.name).stat().st_size
            except OSError:
                return f"lacks {file.name}"
            if size != file.size_bytes:
                return f"has {file.name} of another size"
        return record

    def verify(self, number: int) -> PartRecord | str:
        """As `read`, and read the files as well."""
        record = self.read(number)
        if not isinstance(record, str):
            for file in record.shard.files:
                if file_sha256(self._plan.folder.path / file.name) != file.sha256:
                    return f"has {file.name} with other contents than were written"
        return record


def _fields(record: PartRecord) -> dict[str, object]:
    return {"shard": asdict(record.shard), "rejects": [asdict(reject) for reject in record.rejects]}


def encode_part(
    plan_path: Path | str, options: PartOptions | None = None, *, on_progress: OnProgress = lambda _progress: None
) -> PartReport:
    """Encode shards of a plan; those that are done are left as they are.

    Raises:
        InputError: there is no such plan or part, or model, corpus or versions are not those that were planned with.
        OnnxtoolError: as `encode_corpus`.
    """
    options = options or PartOptions()
    start = time.perf_counter()
    plan = read_plan(Path(plan_path))
    wanted = _wanted(plan, options)
    folder, records = plan.folder, Records(plan)
    with folder.writing():
        folder.require_names()
        if _is_merged(plan):
            missing: list[int] = []
        else:
            missing = [number for number in wanted if isinstance(records.read(number), str)]
        num_texts = sum(plan.shards[number].texts for number in missing)
        if missing:
            _encode(plan, options, missing, records, num_texts, on_progress)
    seconds = time.perf_counter() - start
    return PartReport(
        plan=str(plan.path),
        output=str(folder.path),
        shards=shard_ranges(wanted),
        num_shards=len(wanted),
        num_encoded_shards=len(missing),
        num_texts=sum(plan.shards[number].texts for number in wanted),
        num_encoded=num_texts,
        seconds=seconds,
        texts_per_s=num_texts / seconds,
    )


def _encode(
    plan: CorpusPlan,
    options: PartOptions,
    numbers: Sequence[int],
    records: Records,
    num_texts: int,
    on_progress: OnProgress,
) -> None:
    job = Job.open(
        options.model_path or plan.model_path,
        options.input_path or plan.corpus,
        plan.options,
        workers=options.workers,
    )
    if plan.identity != job.identity:
        other = difference(plan.identity, job.identity) or "another identity"
        raise InputError(
            f"{plan.path} is a plan for something else: {other}",
            "use the model, collection and versions that it was made with, or plan again with --force",
        )
    rejects: dict[int, list[Reject]] = {}
    start, done = time.perf_counter(), 0

    def tell(_window: Window, num_encoded: int, _share: float) -> None:
        nonlocal done
        check_interrupted()
        done += num_encoded
        seconds = time.perf_counter() - start
        left = seconds * (num_texts - done) / done if done else None
        on_progress(CorpusProgress(done, done / num_texts, done / seconds, left))

    for number, record in job.encode(_windows(plan, job, numbers, rejects), plan.folder, tell):
        records.write(number, PartRecord(record, tuple(rejects.pop(number))))


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
    repeated = set(shard.repeated)
    num_read = num_texts = 0
    while num_texts < shard.texts or is_last:
        check_interrupted()
        line = next(lines, None)
        if line is None:
            return
        if isinstance(line, Reject):
            rejects.append(line)
            continue
        if num_read in repeated:
            rejects.append(repeated_id(line))
        else:
            num_texts += 1
            yield line, reader.position
        num_read += 1


def merge_parts(plan_path: Path | str) -> MergeReport:
    """Check all shards of a plan, and write the manifest and the rejected lines, as `encode_corpus` leaves them.

    Where a shard is missing or wrong, nothing is written, and the report says which; those that are wrong are
    forgotten, so that the next part makes them again.

    Raises:
        InputError: there is no such plan, or no text of the corpus has a token.
        OnnxtoolError: the folder cannot be read or written.
    """
    plan = read_plan(Path(plan_path))
    folder, records = plan.folder, Records(plan)
    with folder.locked():
        folder.require_names()
        if _is_merged(plan):
            folder.remove_records()
            manifest = read_manifest(folder.manifest_path)
            assert manifest is not None  # noqa: S101  it is merged
            return _merged(plan, manifest)
        found: dict[int, PartRecord] = {}
        problems: dict[int, str] = {}
        with ThreadPoolExecutor(thread_name_prefix="verify") as workers:
            for number, record in enumerate(workers.map(records.verify, range(len(plan.shards)))):
                check_interrupted()
                if isinstance(record, str):
                    problems[number] = record
                else:
                    found[number] = record
        if problems:
            for number in problems:
                records.file(number).unlink(missing_ok=True)
            return _unmerged(plan, problems)
        manifest = _publish(plan, folder, list(found.values()))
        folder.remove_records()
    return _merged(plan, manifest)


def _is_merged(plan: CorpusPlan) -> bool:
    """Whether the manifest is there.

    Raises:
        OutputExistsError: it is of something else.
    """
    manifest = read_manifest(plan.folder.manifest_path)
    if manifest is None:
        return False
    if manifest.identity != plan.identity or manifest.num_rejects is None:
        raise OutputExistsError(
            f"{plan.folder.path} belongs to a run of onnxtool infer, not to this plan",
            "plan again with --force, or with another --output",
        )
    return True


def _publish(plan: CorpusPlan, folder: OutputFolder, records: Sequence[PartRecord]) -> Manifest:
    """Write the lines that gave no text, and then the manifest."""
    shards = tuple(record.shard for record in records)
    rejects = [
        *itertools.chain.from_iterable(record.rejects for record in records),
        *itertools.chain.from_iterable(shard.rejects for shard in shards),
    ]
    manifest = Manifest(plan.identity, shards, len(rejects))
    if rejects:
        staged(folder.rejects_path).write_text("".join(reject.to_json() for reject in rejects), encoding="utf-8")
        publish(folder.rejects_path)
    else:
        folder.rejects_path.unlink(missing_ok=True)
    if not manifest.num_texts:
        reasons = Counter(reject.kind for reject in rejects)
        raise no_texts(find_sources(plan.corpus)[0], reasons, f"{folder.rejects_path} says why for each line")
    folder.remove_others(manifest)
    folder.write_manifest(manifest)
    return manifest


def _merged(plan: CorpusPlan, manifest: Manifest) -> MergeReport:
    files = [file for shard in manifest.shards for file in shard.files]
    return MergeReport(
        plan=str(plan.path),
        output=str(plan.folder.path),
        manifest=str(plan.folder.manifest_path),
        num_shards=len(plan.shards),
        num_texts=manifest.num_texts,
        num_passages=manifest.num_passages,
        num_tokens=sum(shard.num_tokens for shard in manifest.shards),
        num_rejects=manifest.num_rejects or 0,
        rejects_path=str(plan.folder.rejects_path) if manifest.num_rejects else "",
        num_files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
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


def corpus_status(plan_path: Path | str) -> StatusReport:
    """Say how far the machines are that encode a plan; their files are looked at, and not read.

    Raises:
        InputError: there is no such plan.
        OutputExistsError: the folder belongs to something else.
    """
    plan = read_plan(Path(plan_path))
    records = Records(plan)
    is_merged = _is_merged(plan)
    times: dict[int, float] = {}
    if not is_merged:
        for number in range(len(plan.shards)):
            if not isinstance(records.read(number), str):
                with suppress(OSError):
                    times[number] = records.file(number).stat().st_mtime
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
        num_texts=num_texts,
        num_encoded=num_texts - num_left,
        share=1 - num_left / num_texts,
        texts_per_s=rate,
        seconds_left=num_left / rate if rate else None,
    )


def _wanted(plan: CorpusPlan, options: PartOptions) -> tuple[int, ...]:
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
