"""Encode splits of a corpus into a folder, with one loop for whole runs and parts, so that their bytes are identical.

A shard with a record is done. Two machines that make the same shard write the same bytes, without waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from onnxtool.encoding.files import entry, on_this_machine
from onnxtool.encoding.job import Job
from onnxtool.encoding.locations import Location
from onnxtool.encoding.options import VectorOptions
from onnxtool.encoding.output import OutputFolder, StagedShard
from onnxtool.encoding.pipeline import encode_windows
from onnxtool.encoding.progress import Event, OnEvent, OnRunning, ignore
from onnxtool.encoding.records import RUN_FILE, Records, ShardEntry, ShardTexts, begin_run
from onnxtool.encoding.sources import LineCounts, Reject, SourceReader
from onnxtool.encoding.splits import SplitWindows, Window, split_corpus
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

    def encode(self, numbers: Iterable[int], on_event: OnEvent, on_running: OnRunning = ignore) -> None:
        """Write splits and their records.

        Args:
            numbers: the numbers of the splits.
            on_event: receives each batch, as for `encode_windows`, and each finished shard and split.
            on_running: as for `encode_windows`.

        Raises:
            InputError: the input cannot be read or has changed, or a line has no text and the task is strict.
            OnnxtoolError: as for `encode_corpus`.
        """
        windows = (window for number in numbers for window in self._windows(number))
        shard: StagedShard | None = None
        try:
            with (
                self.folder.writing(),
                closing(encode_windows(self.job.model, windows, self.job.plan, on_event, on_running)) as encoded,
            ):
                for part in encoded:
                    name = part.window.shard
                    if part.window.end is not None:
                        begins_inside, num_texts = self.splits[name.split].begin > 0, self._num_texts.pop(name.split)
                        end = part.window.end._replace(num_texts=num_texts, begins_inside=begins_inside)
                        self._begun.write_split(name.split, end)
                        on_event(Event(splits=1, rejects=len(end.rejects), size_bytes=part.window.size_bytes))
                        continue
                    if part.rejects:
                        self._require_lenient(part.rejects[0], name.split)
                    shard = shard or StagedShard(self.folder, self.job.shard_format, name, self.job.description)
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

    def _windows(self, number: int) -> Iterator[Window]:
        """Yield the windows of a split that are not encoded yet."""
        begun = self._begun.begun(number)
        self._num_texts[number] = sum(shard.num_texts for shard in begun)
        done = [shard.digest for shard in begun]
        split = self.splits[number]
        (first, *_) = split.sources
        # Texts without ids are named after their line numbers.
        before = self._counts.before(first, split.begin) if split.begin and first.suffix == ".txt" else 0
        reader = SourceReader(split.sources, split.begin, split.end, before)
        yield from SplitWindows(
            number, reader, self.job.limits, done, lambda reject: self._require_lenient(reject, number)
        )

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
