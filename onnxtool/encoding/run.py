"""Encode a corpus into a folder of vectors: in this process, or in part or whole with several processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from onnxtool.encoding.encoder import EncodingTask, SplitEncoder
from onnxtool.encoding.files import START_AGAIN, entry, model_on_this_machine
from onnxtool.encoding.locations import AnyLocation, Location, OutputLocation, parse_location
from onnxtool.encoding.manifest import read_manifest
from onnxtool.encoding.merge import empty_notes, publish, reasons_of
from onnxtool.encoding.options import CorpusOptions, PartOptions, RunOptions, VectorOptions
from onnxtool.encoding.output import OutputFolder
from onnxtool.encoding.progress import Event, Tally
from onnxtool.encoding.ray import RayWorkers
from onnxtool.encoding.records import Run, read_run
from onnxtool.encoding.report import CorpusReport, MergeReport, PartReport, RunReport
from onnxtool.encoding.sources import find_picture_sources, find_sources, left_out_notes
from onnxtool.encoding.splits import format_ranges, wanted_splits
from onnxtool.encoding.workers import LocalWorkers, StartupFindings
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.interruption import check_interrupted
from onnxtool.model_file import ModelFile
from onnxtool.options import checked
from onnxtool.reports import PlannedFile, WritePlan
from onnxtool.runtime.machine import peak_rss_bytes
from onnxtool.runtime.providers import resolve_provider

_KEPT = (
    "the vectors of an earlier run are reused, because the collection's files still have the same sizes; for texts "
    f"that were edited without changing the size, {START_AGAIN}"
)
_REPEATS = 2
"""In a store that cannot replace a file atomically, the same command elsewhere may see half a record and drop it."""


@checked
def encode_corpus(
    model_path: AnyLocation, corpus: AnyLocation, output: OutputLocation, options: CorpusOptions | None = None
) -> CorpusReport:
    """Encode the texts of `corpus` into the folder `output`, in this process.

    After being killed at any moment, the same call resumes. The files are byte for byte the same as from an
    uninterrupted run, or from `encode_part` and `merge_parts`.

    Args:
        model_path: the ONNX file of a sparse encoder or embedder of texts or images; its tokenizer or image processor
            is found next to it. Each of these three may be an address in an object store, `s3://…`.
        corpus: a file or a folder of files: JSON Lines, plain or gzipped, Parquet, or plain text. For an image model, a
            folder or list of images.
        output: a folder that is empty, missing, or from the same call; `NAME.manifest.json` is written next to it and,
            if lines lack a text, `NAME.rejects.jsonl`.
        options: encoding options.

    Raises:
        InputError: the corpus cannot be read or has changed, no line has a text, one has none and `strict` is set, or
            the model returns no vectors.
        ModelFileError: the model or its external data cannot be used.
        OutputExistsError: the folder belongs to something else.
        OutputWriteError: the disk is full, or the folder cannot be written.
        ProviderError: the provider cannot run here.
        SessionError: onnxruntime cannot load or run the model, or it returns NaN.
    """
    options = options or CorpusOptions()
    model_path, place = parse_location(model_path), OutputFolder(output).path
    encoder = SplitEncoder(
        EncodingTask(model_path, parse_location(corpus), place, options, options.workers, options.strict, options.force)
    )
    folder = encoder.folder
    with folder.locked():
        encoder.begin()
        start = time.perf_counter()
        num_earlier, num_encoded = _encode_here(encoder)
        repeats = 0
        while (merged := publish(folder, read_run(folder), strict=options.strict)).to_do and repeats < _REPEATS:
            repeats += 1
            num_encoded += _encode_here(encoder)[1]
        if merged.to_do:
            raise InputError(
                f"the vectors of {folder.path} have changed: splits {merged.to_do}", "run the same command again"
            )
        seconds = time.perf_counter() - start
    return _corpus_report(encoder, merged, model_path, num_earlier, num_encoded, seconds)


def _encode_here(encoder: SplitEncoder) -> tuple[int, int]:
    """Encode what is missing; return the numbers of texts encoded by earlier runs and by this one."""
    records = encoder.records
    if records is None:
        return -1, 0
    earlier = records.done()
    missing = [split.number for split in encoder.splits if split.number not in earlier]
    total = sum(split.size_bytes for split in encoder.splits)
    records_of_splits = [records.read_split(number) for number in earlier]
    num_before = sum(0 if isinstance(split, str) else split.num_texts for split in records_of_splits)
    num_before += sum(shard.num_texts for number in missing for shard in records.begun(number))
    tally = Tally()
    tally.begin(total, total - sum(encoder.splits[number].size_bytes for number in missing), num_before)

    def on_event(event: Event) -> None:
        check_interrupted()
        tally.add(event)

    encoder.encode(missing, on_event)
    return num_before, tally.total.encoded


def _corpus_report(
    encoder: SplitEncoder, merged: MergeReport, model_path: Location, num_earlier: int, num_encoded: int, seconds: float
) -> CorpusReport:
    folder, session = encoder.folder, encoder.model.session
    manifest = read_manifest(folder.manifest_path)
    if manifest is None:
        raise OutputExistsError(f"another run is replacing {folder.path}", "wait for it, or pass another --output")
    num_padding = sum(shard.num_padding for shard in manifest.shards)
    return CorpusReport(
        **{
            **vars(merged),
            "notes": (*encoder.notes(merged.num_truncated), *empty_notes(merged.num_empty), *_kept(num_earlier != 0)),
        },
        model=str(model_path),
        provider=session.provider,
        task=encoder.model.task,
        output_format=encoder.shard_format.kind,
        num_encoded=num_encoded,
        padding_share=num_padding / max(1, merged.num_tokens + num_padding),
        rejects=dict(sorted(reasons_of(folder, manifest).items())),
        files=tuple(file.name for shard in manifest.shards for file in shard.files),
        seconds=seconds,
        texts_per_s=num_encoded / seconds,
        load_ms=session.load_ms,
        workers=encoder.plan.workers,
        threads=session.threads,
        peak_rss_bytes=peak_rss_bytes(),
        resumed=num_earlier != 0,
        vectors_as=str(encoder.description["as"]),
        dimensions=encoder.description["dimensions"],  # type: ignore[arg-type]  # JSON
    )


def _kept(is_kept: bool) -> tuple[str, ...]:
    return (_KEPT,) if is_kept else ()


def plan_corpus(
    model_path: AnyLocation, corpus: AnyLocation, output: OutputLocation, options: CorpusOptions
) -> WritePlan:
    """Check the model file, the corpus and the folder, and return what `encode_corpus` would write.

    Raises:
        OnnxtoolError: as for `encode_corpus`, if detectable without the model.
    """
    resolve_provider(options.provider)
    notes = ["shards are called part-NNNNN; how many there are depends on the texts"]
    model_path, corpus = parse_location(model_path), parse_location(corpus)
    if ModelFile.open(model_on_this_machine(model_path)).takes_pictures:
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


@checked
def encode_part(
    model_path: AnyLocation,
    corpus: AnyLocation,
    output: OutputLocation,
    options: VectorOptions | None = None,
    part: PartOptions | None = None,
) -> PartReport:
    """Encode some splits of a corpus with several processes; finished splits are left as they are.

    Every machine passes the same arguments except for `part`. Nothing is published: `merge_parts` does that.

    Args:
        model_path: as for `encode_corpus`.
        corpus: likewise.
        output: a folder that all machines can access.
        options: options of the vectors.
        part: the selected splits.

    Raises:
        InputError: there is no such part, or the input cannot be read or has changed.
        OutputExistsError: the folder belongs to another command, model, corpus or version of onnxtool.
        OnnxtoolError: as `encode_corpus`.
    """
    part, start, tally = part or PartOptions(), time.perf_counter(), Tally()
    with closing(LocalWorkers(_task(model_path, corpus, output, options), part, tally.add)) as workers:
        opened = workers.open()
        wanted = wanted_splits(part, len(opened.sizes))
        num_splits = _encode_missing(workers, opened, wanted, tally)
    return PartReport(
        output=str(OutputFolder(output).path),
        splits=format_ranges(wanted),
        num_splits=len(wanted),
        **_figures_of_work(num_splits, tally, start),
        notes=(*opened.notes, *_kept(num_splits < len(wanted))),
    )


def _encode_missing(
    workers: LocalWorkers | RayWorkers, opened: StartupFindings, numbers: Sequence[int], tally: Tally
) -> int:
    """Encode the missing ones of the `numbers` splits; return their number."""
    missing = sorted({*opened.missing} & {*numbers})
    tally.begin(sum(opened.sizes[number] for number in missing))
    if missing:
        workers.encode(missing)
    return len(missing)


def _figures_of_work(num_splits: int, tally: Tally, start: float) -> dict[str, Any]:
    """Return the figures of this run, by the fields of its report."""
    total, seconds = tally.total, time.perf_counter() - start
    return {
        "num_encoded_splits": num_splits,
        "num_encoded": total.encoded,
        "seconds": seconds,
        "texts_per_s": total.encoded / seconds,
    }


@checked
def encode_parts(
    model_path: AnyLocation,
    corpus: AnyLocation,
    output: OutputLocation,
    options: VectorOptions | None = None,
    run: RunOptions | None = None,
) -> RunReport:
    """Encode all remaining splits of a corpus with several processes, and publish them: `encode_part`, `merge_parts`.

    Args:
        model_path: as for `encode_corpus`.
        corpus: likewise.
        output: likewise.
        options: options of the vectors.
        run: process options.

    Raises:
        OnnxtoolError: as `encode_corpus`.
    """
    run, start, tally = run or RunOptions(), time.perf_counter(), Tally()
    task = replace(_task(model_path, corpus, output, options), strict=run.strict, force=run.force)
    folder = OutputFolder(output)
    engine = RayWorkers if run.engine == "ray" else LocalWorkers
    with closing(engine(task, run, tally.add)) as workers:
        opened = workers.open()
        num_splits = _encode_missing(workers, opened, range(len(opened.sizes)), tally)
    with folder.locked(waits=True):
        merged = publish(folder, Run.of(opened.identity), strict=run.strict)
    return RunReport(
        **{**vars(merged), "notes": (*opened.notes, *merged.notes, *_kept(num_splits < len(opened.sizes)))},
        engine=run.engine,
        processes=workers.num_processes if num_splits else 0,
        **_figures_of_work(num_splits, tally, start),
    )


def _task(
    model_path: AnyLocation, corpus: AnyLocation, output: OutputLocation, options: VectorOptions | None
) -> EncodingTask:
    """Return the task with absolute paths, for processes with another working directory."""
    options = options or VectorOptions()
    plain = {field.name: getattr(options, field.name) for field in fields(VectorOptions)}
    for name in ("model_name", "ranges", "calibration"):
        if plain[name] is not None and Path(plain[name]).exists():
            plain[name] = Path(plain[name]).absolute()
    places = (parse_location(place) for place in (model_path, corpus, OutputFolder(output).path))
    model, texts, folder = (place.absolute() if isinstance(place, Path) else place for place in places)
    return EncodingTask(model, texts, folder, VectorOptions(**plain))
