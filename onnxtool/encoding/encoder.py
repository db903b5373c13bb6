"""Encode splits of a corpus into a folder, with one loop for whole runs and parts, so that their bytes are identical.

A shard with a record is done. Two machines that make the same shard write the same bytes, without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from onnxtool.encoding.files import entry, on_this_machine
from onnxtool.encoding.job import Job
from onnxtool.encoding.locations import Location
from onnxtool.encoding.options import VectorOptions
from onnxtool.encoding.output import OutputFolder, StagedShard
from onnxtool.encoding.pipeline import encode_windows
from onnxtool.encoding.progress import Event, OnEvent
from onnxtool.encoding.records import RUN_FILE, Records, ShardEntry, ShardTexts, SplitRecord, begin_run
from onnxtool.encoding.sources import Document, LineCounts, Reject, SourceReader
from onnxtool.encoding.splits import SplitEnd, SplitWindows, Window, split_corpus
from onnxtool.errors import InputError


@dataclass(frozen=True)
class Task:
    """The task: input, model, options and output folder.

    Attributes:
        workers: number of concurrent batches; 0 for one per core.
        strict: whether a line without a text is an error.
        force: whether to replace an output of another command.
    """

    model_path: Location
    corpus: Location
    output: Location
    options: VectorOptions
    workers: int = 0
    strict: bool = False
    force: bool = False


class SplitEncoder:
    """A corpus, the model that encodes it, loaded once, and the output folder.

    Attributes:
        splits: the splits of the corpus.
        identity: everything that determines the bytes of the output.
        records: the folder's records, once started; None if everything is already published.
    """

    def __init__(self, task: Task) -> None:
        """Load the model and find the files of the corpus.

        Raises:
            OnnxtoolError: as for `encode_corpus`, if detectable before a text is read.
        """
        self.folder = OutputFolder(task.output)
        self.job = self._open(task)
        self.splits = split_corpus(self.job.sources, task.options.split_bytes)
        self.identity = {**self.job.identity, "num_splits": len(self.splits)}
        self.records: Records | None = None
        self._strict, self._force = task.strict, task.force
        self._counts = LineCounts()
        self._num_texts: dict[int, int] = {}  # of splits that are begun

    def _open(self, task: Task) -> Job:
        options, measured = task.options, self.folder.records_path / RUN_FILE
        if options.calibration is not None and not task.force and entry(measured):
            # The first part measured the ranges; another kind of CPU might measure different ones.
            with on_this_machine(measured) as path:
                options = replace(options, calibration=None, ranges=path)
                return Job.open(task.model_path, task.corpus, options, workers=task.workers)
        return Job.open(task.model_path, task.corpus, options, workers=task.workers)

    def begin(self) -> SplitEncoder:
        """Claim the folder for this task.

        Raises:
            OutputExistsError: the folder belongs to something else.
        """
        with self.folder.writing():
            self.records = begin_run(self.folder, self.identity, force=self._force)
        return self

    @property
    def _begun(self) -> Records:
        """The folder's records; the folder must be claimed before a split is encoded."""
        assert self.records is not None  # noqa: S101  `begin` reads them
        return self.records

    def encode(
        self,
        numbers: Iterable[int],
        on_event: OnEvent,
        *,
        left_out: Mapping[int, str] | None = None,
        one_shard: bool = False,
    ) -> int:
        """Write splits and their records; return how many splits are done.

        Args:
            numbers: the numbers of the splits.
            on_event: receives each batch, as for `encode_windows`, and each finished shard and split.
            left_out: with `one_shard`, the positions of rejected texts, with reasons.
            one_shard: whether to write only the next shard of each split.

        Raises:
            InputError: the input cannot be read or has changed, or a line has no text and the task is strict.
            OnnxtoolError: as for `encode_corpus`.
        """
        windows: Iterator[Window] = (
            window for number in numbers for window in self._windows(number, one_shard=one_shard)
        )
        if left_out:
            windows = _without(windows, left_out)
        shard: StagedShard | None = None
        num_splits = 0
        try:
            with (
                self.folder.writing(),
                self.folder.staging() as staging,
                closing(encode_windows(self.job.model, windows, self.job.plan, on_event)) as encoded,
            ):
                for part in encoded:
                    name = part.window.shard
                    if part.window.end is not None:
                        self._record_split(name.split, part.window.end)
                        num_splits += 1
                        read_bytes, num_rejects = part.window.size_bytes, len(part.window.end.rejects)
                        on_event(Event(splits=1, rejects=num_rejects, size_bytes=read_bytes))
                        continue
                    if part.rejects:
                        self._require_lenient(part.rejects[0], name.split)
                    shard = shard or StagedShard(
                        self.folder, staging, self.job.shard_format, name, self.job.description
                    )
                    shard.append(part)
                    if part.window.digest:
                        written = ShardEntry(shard.commit(part.window.digest), ShardTexts.of(shard.documents))
                        shard = None
                        self._begun.write_shard(name, written)
                        num_texts, num_rejects = written.shard.num_texts, len(written.shard.rejects)
                        self._num_texts[name.split] += num_texts
                        on_event(Event(encoded=num_texts, tokens=written.shard.num_tokens, rejects=num_rejects))
        finally:
            if shard is not None:
                shard.abandon()
        return num_splits

    def _record_split(self, number: int, end: SplitEnd) -> None:
        begins_inside = self.splits[number].begin > 0
        num_texts = self._num_texts.pop(number)
        self._begun.write_split(
            number, SplitRecord(end.num_shards, num_texts, end.num_lines, begins_inside, end.tag, end.rejects)
        )

    def _windows(self, number: int, *, one_shard: bool) -> Iterator[Window]:
        """Yield the windows of a split that are not encoded yet; with `one_shard`, only from its next shard."""
        begun = self._begun.begun(number)
        self._num_texts[number] = sum(shard.num_texts for shard in begun)
        done = [shard.digest for shard in begun]
        for window in self._read(number, done, lambda reject: self._require_lenient(reject, number)):
            if one_shard and window.end is None and window.shard.number > len(done):
                return
            yield window

    def _read(self, number: int, done: Sequence[str], on_reject: Callable[[Reject], None]) -> SplitWindows:
        split = self.splits[number]
        (first, *_) = split.sources
        # Texts without ids are named after their line numbers.
        before = self._counts.before(first, split.begin) if split.begin and first.suffix == ".txt" else 0
        reader = SourceReader(split.sources, split.begin, split.end, before)
        return SplitWindows(number, reader, self.job.limits, done, on_reject)

    def _require_lenient(self, reject: Reject, number: int) -> None:
        """Refuse a line without a text if the task is strict.

        Raises:
            InputError: it is.
        """
        if self._strict:
            split = self.splits[number]
            line = reject.line + (self._counts.before(split.sources[0], split.begin) if split.begin else 0)
            raise InputError(
                f"{reject.file}:{line} {reject.reason}",
                "correct the line, or leave out --strict to have such lines counted and written to a file",
            )

    def next_texts(self, number: int) -> list[Document]:
        """Read the texts of a split's next unwritten shard; none if all are written."""
        done = [shard.digest for shard in self._begun.begun(number)]
        windows = self._read(number, done, lambda _reject: None)
        return [document for window in windows if window.shard.number == len(done) for document in window.documents]


def _without(windows: Iterator[Window], left_out: Mapping[int, str]) -> Iterator[Window]:
    """Reject texts in the windows of one shard by position."""
    before = 0
    for window in windows:
        placed = list(enumerate(window.documents, start=before))
        before += len(placed)
        refused = tuple(
            Reject(document.file, document.line, left_out[place], document.id)
            for place, document in placed
            if place in left_out
        )
        yield replace(window, documents=tuple(one for place, one in placed if place not in left_out), refused=refused)
