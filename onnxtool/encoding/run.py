"""Encode a corpus into a folder of vectors, from the first text or from where an earlier run was stopped."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from onnxtool.encoding.clock import Clock
from onnxtool.encoding.form import CorpusForm, choose_form
from onnxtool.encoding.manifest import Identity, Manifest, ShardRecord, make_identity
from onnxtool.encoding.options import CorpusOptions, OnProgress
from onnxtool.encoding.output import OutputFolder, StagedShard, publish, staged
from onnxtool.encoding.pipeline import CorpusModel, Plan, batch_rules, encode_windows
from onnxtool.encoding.report import CorpusReport
from onnxtool.encoding.shards import ShardFormat
from onnxtool.encoding.sources import Reject, Source, SourceReader, find_picture_sources, find_sources
from onnxtool.encoding.windows import Window, accepted, split_corpus
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import VectorHead
from onnxtool.infer.loading import LoadedModel, load
from onnxtool.infer.pictures.model import PictureModel, load_pictures, takes_pictures
from onnxtool.interruption import check_interrupted
from onnxtool.model_file import ModelFile
from onnxtool.reports import PlannedFile, WritePlan, planned_files
from onnxtool.runtime.providers import resolve_provider
from onnxtool.runtime.session import available_cores
from onnxtool.runtime.timing import peak_rss_bytes

# Measured by scripts/bench_infer.py: larger batches leave the caches of a core, smaller ones keep it waiting.
_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}
_WORKERS_OF_A_DEVICE = 2  # one computes while the other's vectors are fetched
# Bounds a batch's logits of a vocabulary, inside of the graph or as its output: 128 MB and 1 GB of float32.
_MAX_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
# 40 MB of pixels at 224 x 224; a page that is cut has as many.
_WINDOW_PICTURES, _WINDOW_PAGES = 64, 4
_CHARACTERS_OF_TOKENS = 1 << 19  # of a window whose texts have a vector for each token: 64 MB of float32 by 128


def encode_corpus(
    model_path: Path | str,
    corpus: Path | str,
    output: Path | str,
    options: CorpusOptions | None = None,
    *,
    on_progress: OnProgress = lambda _progress: None,
) -> CorpusReport:
    """Encode the texts of `corpus` into the folder `output`.

    After a kill at any moment, the same call resumes, and the files are byte for byte those of an uninterrupted run.

    Args:
        model_path: the ONNX file of a sparse encoder or an embedder, of texts or pictures; its tokenizer or image
            processor is found beside it.
        corpus: a file, or a folder of files: JSON Lines, plain or gzipped, Parquet, or plain text. For a model of
            pictures, a folder of them, or a list.
        output: a folder that is empty, not there, or of the same call; beside it go `NAME.manifest.json` and, where a
            line gives no text, `NAME.rejects.jsonl`.
        options: how it is done.
        on_progress: called after each batch.

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
    provider = resolve_provider(options.provider)
    threads = options.threads or 1
    model: CorpusModel
    left_out: tuple[str, ...] = ()
    if takes_pictures(ModelFile.open(Path(model_path))):
        sources = find_picture_sources(Path(corpus))
        model = load_pictures(model_path, model_name=options.model_name, provider=provider, threads=threads)
        _refuse_for_pictures(options)
    else:
        sources, left_out = find_sources(Path(corpus))
        model = load(
            model_path,
            model_name=options.model_name,
            provider=provider,
            threads=threads,
            representation=options.representation,
        )
        model.require_documents(options.task or options.prompt)
    kind = _kind(model, options)
    form = choose_form(model, options)
    shard_format = _shard_format(model, options, kind, by_token=form.by_token)
    plan = _plan(model, options, form)
    folder = OutputFolder(Path(output))
    with folder.locked():
        identity = _identity(model, sources, shard_format, options, plan, form)
        manifest = folder.begin(Manifest(identity), force=options.force)
        run = _Run(model, sources, folder, shard_format, plan, options, on_progress, manifest, form)
        run.encode()
    return run.report(left_out)


def plan_corpus(model_path: Path, corpus: Path, output: Path, options: CorpusOptions) -> WritePlan:
    """Check the model file, the corpus and the folder, and say what `encode_corpus` would write; loads no weights.

    Raises:
        OnnxtoolError: as `encode_corpus`, as far as it is known without the model.
    """
    resolve_provider(options.provider)
    if takes_pictures(ModelFile.open(model_path)):
        find_picture_sources(corpus)
    else:
        find_sources(corpus)
    folder = OutputFolder(output)
    is_known = folder.require_own(force=options.force)
    notes = ["shards are called part-NNNNN; how many there are depends on the texts"]
    if is_known and not options.force:
        notes.append("what an earlier run of the same command has encoded stays; another command needs --force")
    written = PlannedFile(f"{folder.path}{os.sep}", "replaced" if is_known and options.force else "new")
    if is_known and not options.force:
        written = written._replace(change="unchanged")
    return WritePlan("infer", (written, *planned_files([folder.manifest_path])), tuple(notes))


def _refuse_for_pictures(options: CorpusOptions) -> None:
    """Refuse what is for texts alone.

    Raises:
        InputError: it was passed.
    """
    alone = {
        "--prompt": options.prompt,
        "--task": options.task,
        "--representation": options.representation,
        "--keep_special": options.keep_special,
        "--weights": options.weights,
    }
    if given := [name for name, value in alone.items() if value]:
        raise InputError(f"{' and '.join(given)} was passed, which is for texts, and the corpus is of pictures")


def _is_sparse(model: CorpusModel) -> bool:
    return isinstance(model, LoadedModel) and model.is_sparse


def _kind(model: CorpusModel, options: CorpusOptions) -> str:
    """Choose one of OUTPUT_FORMATS.

    Raises:
        InputError: the model gives no vectors, or the format is not for them.
    """
    if isinstance(model, LoadedModel) and not model.gives_vectors:
        raise InputError(
            f"{model.session.model.path} is for {model.task}, and gives no vector for a text",
            "encode with a model for sentence-similarity or sparse-encoding",
        )
    kind = options.output_format or ("jsonl" if _is_sparse(model) else "npy")
    if _is_sparse(model) and kind == "npy":
        raise InputError(f"the model gives weights of terms, which {kind} has no place for", "use jsonl or parquet")
    if options.gzip and kind != "jsonl":
        raise InputError(f"gzip is for jsonl, and the output is {kind}", "leave out --gzip")
    return kind


def _shard_format(model: CorpusModel, options: CorpusOptions, kind: str, *, by_token: bool) -> ShardFormat:
    """Choose what the files are.

    Raises:
        InputError: pyarrow is missing.
    """
    contents = kind == "jsonl" if options.contents is None else options.contents
    weights = options.weights or ("float" if kind == "parquet" else "int")
    shard_format = ShardFormat(kind, options.gzip, contents, weights if _is_sparse(model) else "float", by_token)
    shard_format.check()
    return shard_format


def _plan(model: CorpusModel, options: CorpusOptions, form: CorpusForm) -> Plan:
    tokens = options.batch_tokens or _BATCH_TOKENS[model.session.provider]
    if isinstance(model, LoadedModel) and model.is_sparse and not options.batch_tokens:
        tokens = min(tokens, max(1, _MAX_LOGITS[model.session.provider] // model.tokenizer.vocabulary_size))
    on_device = model.session.provider != "cpu"
    workers = options.workers or (_WORKERS_OF_A_DEVICE if on_device else available_cores())
    task = model.task_of(options.task) if isinstance(model, LoadedModel) else None
    return Plan(batch_rules(model, tokens), workers, options.prompt, task, options.keep_special, form.form)


def _identity(
    model: CorpusModel,
    sources: tuple[Source, ...],
    shard_format: ShardFormat,
    options: CorpusOptions,
    plan: Plan,
    form: CorpusForm,
) -> Identity:
    """Gather what the bytes of the output depend on. How many workers there are changes nothing."""
    chosen = {
        **asdict(shard_format),
        "keep_special": options.keep_special,
        "prompt": model.prompts.find(options.prompt, plan.task) if isinstance(model, LoadedModel) else None,
        **({"reading": plan.task} if plan.task else {}),
        **({"representation": options.representation} if options.representation else {}),
        "shard_size": options.shard_size,
        "batch_tokens": plan.rules.max_tokens,
        "provider": model.session.provider,
        "threads": options.threads or 1,
        "task": model.task,
    }
    return make_identity(model.session.model, model.folder, sources, chosen, form.description)


@dataclass
class _Run:
    """One run, from the shards that are there to all of them."""

    model: CorpusModel
    sources: tuple[Source, ...]
    folder: OutputFolder
    shard_format: ShardFormat
    plan: Plan
    options: CorpusOptions
    on_progress: OnProgress
    manifest: Manifest
    form: CorpusForm
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.earlier = self.manifest.shards

    def encode(self) -> None:
        """Write all shards that are not there, the lines that gave no text, and the manifest."""
        start = time.perf_counter()
        rejects = staged(self.folder.rejects_path)
        try:
            with rejects.open("w", encoding="utf-8") as file:
                self._write_shards(file, start)
                for shard in self.manifest.shards:
                    for reject in shard.rejects:
                        self._reject(reject, file)
            if not self.manifest.num_texts and not self.reasons:
                raise InputError(f"{self.sources[0].path} has no texts", "put one on each line")
            if self.reasons:
                publish(self.folder.rejects_path)
            if not self.manifest.num_texts:
                counts = ", ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(3))
                raise InputError(
                    f"no line of {self.sources[0].path} gave a text: {counts}",
                    f"{self.folder.rejects_path} says why for each line",
                )
            self.manifest = replace(self.manifest, num_rejects=self.reasons.total())
            self.folder.write_manifest(self.manifest)
        finally:
            rejects.unlink(missing_ok=True)
        self.seconds = time.perf_counter() - start

    def _write_shards(self, rejects: IO[str], start: float) -> None:
        reader = SourceReader(self.sources)
        documents = accepted(reader, lambda reject: self._reject(reject, rejects))
        done = tuple(shard.digest for shard in self.earlier)
        most = _CHARACTERS_OF_TOKENS if self.shard_format.by_token else None
        texts = None
        if isinstance(self.model, PictureModel):
            texts = _WINDOW_PICTURES if self.model.parts is None else _WINDOW_PAGES
        windows = split_corpus(documents, self.options.shard_size, done, most_characters=most, most_texts=texts)
        clock = Clock(start, sum(source.size_bytes for source in self.sources), self.manifest.num_texts)

        def tell(window: Window, num_texts: int, share: float) -> None:
            check_interrupted()
            self.on_progress(clock.after(window, num_texts, share))

        shard = self._next_shard()
        try:
            with closing(encode_windows(self.model, windows, self.plan, tell)) as encoded:
                for window in encoded:
                    if self.options.strict and window.rejects:
                        raise _stopped_by(window.rejects[0])
                    shard.append(window)
                    if window.window.digest:
                        self._add(shard.commit(window.window.digest))
                        shard = self._next_shard()
        finally:
            shard.abandon()

    def _next_shard(self) -> StagedShard:
        return StagedShard(self.folder, self.shard_format, len(self.manifest.shards))

    def _add(self, record: ShardRecord) -> None:
        self.manifest = replace(self.manifest, shards=(*self.manifest.shards, record))
        self.folder.write_manifest(self.manifest)

    def _reject(self, reject: Reject, file: IO[str]) -> None:
        if self.options.strict:
            raise _stopped_by(reject)
        # What follows a colon is of that line alone.
        self.reasons[reject.reason.partition(":")[0]] += 1
        file.write(json.dumps(asdict(reject)) + "\n")

    def report(self, left_out: Sequence[str]) -> CorpusReport:
        """Sum up, once all is written."""
        shards = self.manifest.shards
        files = [file for shard in shards for file in shard.files]
        num_tokens = sum(shard.num_tokens for shard in shards)
        num_padding = sum(shard.num_padding for shard in shards)
        num_encoded = self.manifest.num_texts - sum(shard.num_texts for shard in self.earlier)
        num_truncated = sum(shard.num_truncated for shard in shards)
        session = self.model.session
        return CorpusReport(
            model=str(session.model.path),
            provider=session.provider,
            task=self.model.task,
            output=str(self.folder.path),
            output_format=self.shard_format.kind,
            manifest=str(self.folder.manifest_path),
            num_texts=self.manifest.num_texts,
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
            workers=self.plan.workers,
            threads=session.threads,
            peak_rss_bytes=peak_rss_bytes(),
            resumed=bool(self.earlier),
            vectors_as=str(self.form.description["as"]),
            dimensions=self.form.dimensions,
            notes=(*self.form.notes, *_notes(self.model, self.plan.task, num_truncated, left_out)),
        )


def _stopped_by(reject: Reject) -> InputError:
    return InputError(
        f"{reject.file}:{reject.line} {reject.reason}",
        "correct the line, or leave out --strict to have such lines counted and written to a file",
    )


def _notes(model: CorpusModel, task: str | None, num_truncated: int, left_out: Sequence[str]) -> Iterator[str]:
    if left_out:
        yield f"{len(left_out)} files of the folder are no part of a corpus by their suffix, such as {left_out[0]}"
    if isinstance(model, PictureModel):
        return
    if isinstance(model.head, VectorHead) and model.head.note:
        yield model.head.note
    limit = model.limit_of(task)
    if num_truncated and limit is not None:
        yield f"{num_truncated} texts were cut to {limit.tokens} tokens ({limit.source})"
    outputs = {info.name: info.shape for info in model.session.model.structure.outputs}
    if model.is_sparse and "logits" in outputs and len(outputs["logits"]) == 3:
        yield "the graph gives logits of every token; exported with --head splade it gives one vector, which is faster"
