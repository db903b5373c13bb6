"""Encode a corpus into a folder of vectors, from the first text or from where an earlier run was stopped."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from onnxtool.encoding.clock import Clock
from onnxtool.encoding.fetched_model import model_on_this_machine
from onnxtool.encoding.files import entries, entry, remove, staged
from onnxtool.encoding.job import Job, stopped_by
from onnxtool.encoding.locations import AnyLocation, Location, parse_location
from onnxtool.encoding.manifest import Identity, Manifest, ShardRecord, read_manifest
from onnxtool.encoding.options import CorpusOptions
from onnxtool.encoding.output import OutputFolder
from onnxtool.encoding.records import PartRecord, Records, begin_run, remove_records, require_same
from onnxtool.encoding.report import CorpusReport
from onnxtool.encoding.sources import Reject, SourceReader, find_picture_sources, find_sources, left_out_notes, no_texts
from onnxtool.encoding.windows import Window, accepted
from onnxtool.infer.pictures import takes_pictures
from onnxtool.interruption import check_interrupted
from onnxtool.model_file import ModelFile
from onnxtool.options import checked
from onnxtool.progress import listener
from onnxtool.reports import PlannedFile, WritePlan
from onnxtool.runtime.providers import resolve_provider
from onnxtool.runtime.timing import peak_rss_bytes


@checked
def encode_corpus(
    model_path: AnyLocation,
    corpus: AnyLocation,
    output: AnyLocation,
    options: CorpusOptions | None = None,
) -> CorpusReport:
    """Encode the texts of `corpus` into the folder `output`.

    After a kill at any moment, the same call resumes, and the files are byte for byte those of an uninterrupted run.

    Args:
        model_path: the ONNX file of a sparse encoder or an embedder, of texts or pictures; its tokenizer or image
            processor is found beside it. Each of these three may be the address of an object store, `s3://…`.
        corpus: a file, or a folder of files: JSON Lines, plain or gzipped, Parquet, or plain text. For a model of
            pictures, a folder of them, or a list.
        output: a folder that is empty, not there, or of the same call; beside it go `NAME.manifest.json` and, where a
            line gives no text, `NAME.rejects.jsonl`.
        options: how it is done.

    Raises:
        InputError: the corpus cannot be read or has changed, no line gives a text, one gives none and `strict` is set,
            or the model gives no vectors.
        ModelFileError: the model or its external data cannot be used.
        OutputExistsError: the folder belongs to something else.
        OutputWriteError: the disk is full, the folder cannot be written, …
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load or run the model, or it gives no numbers.
    """
    options = options or CorpusOptions()
    model_path = parse_location(model_path)
    job = Job.open(model_path, corpus, options, workers=options.workers)
    folder = OutputFolder(output)
    with folder.locked():
        run = _Run(job, model_path, folder, options, *_begin(folder, job.identity, force=options.force))
        run.encode()
        remove_records(folder)
    return run.report()


def _begin(
    folder: OutputFolder, identity: Identity, *, force: bool
) -> tuple[Manifest | None, Records, tuple[ShardRecord, ...]]:
    """Return the manifest that is there, where shards are recorded, and those that an earlier run has written."""
    if isinstance(folder.path, Path):  # of a killed run, whichever it was
        half = (folder.path.with_name(f"{folder.path.name}.{suffix}") for suffix in ("manifest.json", "rejects.jsonl"))
        remove(map(staged, half))
    if force:
        remove_records(folder)
    manifest = None if force else read_manifest(folder.manifest_path)
    known = force or manifest is not None or bool(entries(folder.records_path))
    folder.require_names(is_known=known)
    if manifest is not None:
        remove_records(folder)  # of a run that was killed as it began to replace the vectors, or had published them
        require_same(folder, manifest, identity)
        folder.require_whole(manifest)
    records, shards = begin_run(folder, identity)
    if force:  # now that the records tell whose the files are
        remove([folder.manifest_path, folder.rejects_path])
    shards = shards if manifest is None else manifest.shards
    if isinstance(folder.path, Path):  # in a store, files that nothing records yet may be those of another machine
        folder.remove_others(Manifest(identity, shards, 0))
    return manifest, records, shards


@checked
def plan_corpus(model_path: AnyLocation, corpus: AnyLocation, output: AnyLocation, options: CorpusOptions) -> WritePlan:
    """Check the model file, the corpus and the folder, and say what `encode_corpus` would write; loads no weights.

    Raises:
        OnnxtoolError: as `encode_corpus`, as far as it is known without the model.
    """
    resolve_provider(options.provider)
    notes = ["shards are called part-NNNNN; how many there are depends on the texts"]
    model_path, corpus = parse_location(model_path), parse_location(corpus)
    if takes_pictures(ModelFile.open(model_on_this_machine(model_path))):
        find_picture_sources(corpus)
    else:
        notes += left_out_notes(find_sources(corpus)[1])
    folder = OutputFolder(output)
    is_known = folder.require_own(force=options.force)
    if is_known and not options.force:
        notes.append("what an earlier run of the same command has encoded stays; another command needs --force")
    written = PlannedFile(
        f"{folder.path}{os.sep if isinstance(folder.path, Path) else '/'}",
        "replaced" if is_known and options.force else "new",
    )
    if is_known and not options.force:
        written = written._replace(change="unchanged")
    change = "replaced" if entry(folder.manifest_path) else "new"
    return WritePlan("infer", (written, PlannedFile(str(folder.manifest_path), change)), tuple(notes))


@dataclass
class _Run:
    """One run, from the shards that are there to all of them."""

    job: Job
    model_path: Location | str
    folder: OutputFolder
    options: CorpusOptions
    manifest: Manifest | None
    records: Records
    earlier: tuple[ShardRecord, ...]
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.shards = list(self.earlier)

    def encode(self) -> None:
        """Write all shards that are not there, the lines that gave no text, and the manifest."""
        start = time.perf_counter()
        with self.folder.staged_rejects() as rejects:
            with rejects.open("w", encoding="utf-8") as file:
                self._write_shards(file, start)
                for shard in self.shards:
                    for reject in shard.rejects:
                        self._reject(reject, file)
            if self.reasons:
                self.folder.publish_rejects(rejects)
            else:
                remove([self.folder.rejects_path])
        manifest = Manifest(self.job.identity, tuple(self.shards), self.reasons.total())
        if not manifest.num_texts:
            raise no_texts(self.job.sources, self.reasons, f"{self.folder.rejects_path} says why for each line")
        if manifest != self.manifest:
            self.folder.publish(manifest)
        self.seconds = time.perf_counter() - start

    def _write_shards(self, rejects: IO[str], start: float) -> None:
        reader = SourceReader(self.job.sources)
        documents = accepted(reader, lambda reject: self._reject(reject, rejects))
        windows = self.job.split(documents, tuple(shard.digest for shard in self.earlier))
        before = sum(shard.num_texts for shard in self.earlier)
        say = listener()
        clock = Clock(start, sum(source.size_bytes for source in self.job.sources), before)

        def tell(window: Window, num_texts: int, share: float) -> None:
            check_interrupted()
            say(clock.after(window, num_texts, share))

        for number, record in self.job.encode(windows, self.folder, tell, strict=self.options.strict):
            self.records.write(number, PartRecord(record))
            self.shards.append(record)

    def _reject(self, reject: Reject, file: IO[str]) -> None:
        if self.options.strict:
            raise stopped_by(reject)
        self.reasons[reject.kind] += 1
        file.write(reject.to_json())

    def report(self) -> CorpusReport:
        """Sum up, once all is written."""
        shards = self.shards
        files = [file for shard in shards for file in shard.files]
        num_tokens = sum(shard.num_tokens for shard in shards)
        num_padding = sum(shard.num_padding for shard in shards)
        num_texts = sum(shard.num_texts for shard in shards)
        num_encoded = num_texts - sum(shard.num_texts for shard in self.earlier)
        num_truncated = sum(shard.num_truncated for shard in shards)
        session = self.job.model.session
        return CorpusReport(
            model=str(self.model_path),
            provider=session.provider,
            task=self.job.model.task,
            output=str(self.folder.path),
            output_format=self.job.shard_format.kind,
            manifest=str(self.folder.manifest_path),
            num_texts=num_texts,
            num_passages=sum(shard.num_passages for shard in shards),
            num_encoded=num_encoded,
            num_tokens=num_tokens,
            padding_share=num_padding / max(1, num_tokens + num_padding),
            num_truncated=num_truncated,
            rejects=dict(sorted(self.reasons.items())),
            rejects_path=str(self.folder.rejects_path) if self.reasons else "",
            files=tuple(file.name for file in files),
            size_bytes=sum(file.size_bytes for file in files),
            seconds=self.seconds,
            texts_per_s=num_encoded / self.seconds,
            load_ms=session.load_ms,
            workers=self.job.plan.workers,
            threads=session.threads,
            peak_rss_bytes=peak_rss_bytes(),
            resumed=bool(self.earlier),
            vectors_as=str(self.job.form.description["as"]),
            dimensions=self.job.form.dimensions,
            notes=tuple(self.job.notes(num_truncated)),
        )
