"""A corpus with its encoder: the model, the form of its vectors, the file format, and the loop that writes splits.

Whole runs and parts have one loop, so that their bytes are identical. A shard with a record is done. Two machines that
make the same shard write the same bytes, without waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.quantized_vectors import VectorType, few_vectors, measure_ranges
from onnxtool.checkpoint.text_files import TextInput, read_texts
from onnxtool.encoding import splits
from onnxtool.encoding.files import entry, model_on_this_machine, on_this_machine
from onnxtool.encoding.locations import Location
from onnxtool.encoding.manifest import make_identity
from onnxtool.encoding.options import VectorOptions
from onnxtool.encoding.output import OutputFolder, StagedShard
from onnxtool.encoding.parquet import require_pyarrow
from onnxtool.encoding.pipeline import CorpusModel, EncodingSettings, batch_rules, encode_windows
from onnxtool.encoding.progress import Event, OnEvent, OnRunning, ignore
from onnxtool.encoding.records import RUN_FILE, Records, ShardEntry, ShardTexts, begin_run
from onnxtool.encoding.shards import ShardFormat
from onnxtool.encoding.sources import (
    LineCounts,
    Reject,
    SourceReader,
    find_picture_sources,
    find_sources,
    left_out_notes,
)
from onnxtool.encoding.splits import SplitWindows, TextWindow, WindowLimits, split_corpus
from onnxtool.errors import InputError
from onnxtool.infer.chats import CUT, LongTexts
from onnxtool.infer.heads.head import VectorForm, VectorHead
from onnxtool.infer.loading import LoadedModel, load_as
from onnxtool.infer.pictures import PictureModel, load_pictures
from onnxtool.infer.text_model import find_file
from onnxtool.infer.vectors import TokenVectors
from onnxtool.model_file import ModelFile
from onnxtool.reports import Json
from onnxtool.runtime.machine import available_cores
from onnxtool.runtime.providers import resolve_provider

# Measured by scripts/bench_infer.py: larger batches leave the caches of a core, smaller ones keep it waiting.
_BATCH_TOKENS = {"cpu": 512, "cuda": 16384}
_WORD = "a "  # a token or more of any tokenizer
_SAMPLE = "What a model gives for a text shows what its vectors are."
_TEXTS_AT_A_TIME = 1024
_WORKERS_OF_A_DEVICE = 2  # one computes while the other's vectors are fetched
# Bounds a batch's vocabulary logits, inside the graph or as its output: 128 MB and 1 GB of float32.
_MAX_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 28}
# 40 MB of pixels at 224 x 224; a page that is cut has as many.
_WINDOW_PICTURES, _WINDOW_PAGES = 64, 4
_CHARACTERS_OF_PASSAGES = 1 << 20  # of a window whose texts are not cut, and know where their tokens are
_CHARACTERS_OF_TOKENS = 1 << 19  # of a window whose texts have a vector for each token: 64 MB of float32 by 128


def load_for_texts(file: ModelFile, options: VectorOptions, threads: int) -> LoadedModel:
    """Load the model that encodes texts of the task: `file` or its partner.

    Raises:
        OnnxtoolError: as `onnxtool.infer.load`.
    """
    file, model_name = find_file(file, options.model_name, options.text_task)
    return load_as(options, file, model_name, threads)


def _refuse_for_pictures(options: VectorOptions) -> None:
    """Refuse options that are only for texts.

    Raises:
        InputError: it was passed.
    """
    own = {"--prompt": options.prompt, "--keep_special": options.keep_special, "--weights": options.weights}
    if names := [*(name for name, value in own.items() if value), *options.given_for_texts]:
        raise InputError(
            f"{' and '.join(names)} was passed, which is for texts, but the corpus consists of images",
            f"leave {' and '.join(names)} out",
        )


def _kind(model: CorpusModel, options: VectorOptions, *, is_sparse: bool) -> str:
    """Choose one of OUTPUT_FORMATS.

    Raises:
        InputError: the model returns no vectors, or the format does not support them.
    """
    if isinstance(model, LoadedModel) and not model.gives_vectors:
        raise InputError(
            f"{model.session.model.path} is for {model.task}, and gives no vector for a text",
            model.hint_of_vectors,
        )
    kind = options.output_format or ("jsonl" if is_sparse else "npy")
    if is_sparse and kind == "npy":
        raise InputError(f"the model gives term weights, which {kind} cannot store", "use jsonl or parquet")
    for_terms = {"--weights": options.weights, "--keep_special": options.keep_special}
    if not is_sparse and (names := [name for name, value in for_terms.items() if value]):
        raise InputError(
            f"{' and '.join(names)} was passed, which is for term weights, but the model gives embeddings",
            f"leave {' and '.join(names)} out",
        )
    return kind


def _form(model: CorpusModel, options: VectorOptions) -> tuple[VectorForm, dict[str, Json], tuple[str, ...]]:
    """Return the post-processing of the model's output, the description of the vectors, and notes for the user.

    Ranges are read, or measured on the calibration texts.

    Raises:
        InputError: the model's vectors do not support this storage, or ranges or texts cannot be read.
    """
    measured, head = options.calibration is not None, model.head
    form = VectorForm.of(
        head,
        vectors_as="float32" if measured else options.vectors_as,
        ranges=options.ranges,
        dimensions=options.dimensions,
        pruning=None if options.prune is None else _pruning(model, options.prune, options.text_task),
    )
    if isinstance(model, LoadedModel) and model.is_sparse:
        terms = model.encode([_SAMPLE], prompt=options.prompt, task=model.task_of(options.text_task))
        return form, {"of": "terms", **VectorType("float32").describe(terms.shape[1])}, ()
    notes: tuple[str, ...] = ()
    if isinstance(model, PictureModel) and measured:
        raise InputError("--calibration is a file of texts, but the corpus consists of images", "pass --ranges")
    if isinstance(model, LoadedModel) and options.calibration is not None and options.vectors_as is not None:
        ranges, count = measure_ranges(_vectors(model, read_texts(options.calibration), options))
        form = replace(form, stored=VectorType.of(options.vectors_as, ranges))
        notes = tuple(filter(None, [few_vectors(count)]))
    sample: Any = form.apply(
        model.run([model.blank()])
        if isinstance(model, PictureModel)
        else model.encode([_SAMPLE], prompt=options.prompt, task=model.task_of(options.text_task))
    )
    of, array = ("tokens", sample.vectors) if isinstance(sample, TokenVectors) else ("texts", sample)
    stored = form.stored or VectorType(str(array.dtype))
    return form, {"of": of, **stored.describe(array.shape[1] * stored.numbers_of_a_column)}, notes


def _pruning(model: CorpusModel, rule: str, task: str | None) -> str | None:
    return model.vector_head().pruning_for(rule, task) if isinstance(model, LoadedModel) else None


def _vectors(model: LoadedModel, texts: tuple[TextInput, ...], options: VectorOptions) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        part = [text.contents for text in texts[start : start + _TEXTS_AT_A_TIME]]
        vectors: Any = model.encode(
            part,
            prompt=options.prompt,
            task=model.task_of(options.text_task),
            dimensions=options.dimensions,
            prune=options.prune,
        )
        yield vectors.vectors if isinstance(vectors, TokenVectors) else vectors


def _plan(model: CorpusModel, options: VectorOptions, form: VectorForm, workers: int) -> EncodingSettings:
    tokens = options.batch_tokens or _BATCH_TOKENS[model.session.memory[0]]
    if isinstance(model, LoadedModel) and model.is_sparse and not options.batch_tokens:
        tokens = min(tokens, max(1, _MAX_LOGITS[model.session.memory[0]] // model.tokenizer.vocabulary_size))
    workers = workers or (_WORKERS_OF_A_DEVICE if model.session.on_device else available_cores())
    task = model.task_of(options.text_task) if isinstance(model, LoadedModel) else None
    long = _long(model, options, task) if isinstance(model, LoadedModel) else CUT
    return EncodingSettings(batch_rules(model, tokens), workers, options.prompt, task, options.keep_special, form, long)


def _long(model: LoadedModel, options: VectorOptions, task: str | None) -> LongTexts:
    """Choose the handling of long texts, and try it on one.

    Raises:
        InputError: there is no such way, or no room for windows with that overlap.
    """
    long, limit = LongTexts(options.long or CUT.way, options.overlap), model.limit_of(task)
    if long.way == "window" and limit is not None:
        model.windows([_WORD * limit.tokens], prompt=options.prompt, task=task, long=long)
        long = replace(long, overlap=long.overlap_of(limit))
    return long


def _chosen(
    model: CorpusModel, options: VectorOptions, shard_format: ShardFormat, plan: EncodingSettings
) -> dict[str, Json]:
    """Collect the settings that determine the bytes of the output. The number of workers does not."""
    optional: dict[str, Json] = {
        "reading": plan.task,
        "description": list(options.description.given.values()),
        "representation": options.representation,
        "adapter": options.adapter,
        "prune": plan.form.pruning,
        "long": plan.long.way if plan.long.way != CUT.way else None,
        "overlap": plan.long.overlap,
    }
    return {
        **asdict(shard_format),
        "keep_special": options.keep_special,
        "prompt": model.prompts.text_of(options.prompt, plan.task) if isinstance(model, LoadedModel) else None,
        **{name: value for name, value in optional.items() if value not in (None, "", [])},
        "shard_size": options.shard_size,
        "split_bytes": options.split_bytes,
        "batch_tokens": plan.rules.max_tokens,
        "provider": model.session.provider,
        "threads": options.threads or 1,
        "task": model.task,
    }


def _notes(model: CorpusModel, task: str | None, num_truncated: int) -> Iterator[str]:
    if isinstance(model, PictureModel):
        yield from model.session.notes
        return
    yield from (*model.reading_notes, *model.adapter_notes)
    if isinstance(model.head, VectorHead) and model.head.note:
        yield model.head.note
    if task is None and model.route_note:
        yield model.route_note
    limit = model.limit_of(task)
    if num_truncated and limit is not None:
        cut = f"{num_truncated} texts were cut to {limit.tokens} tokens ({limit.source})"
        yield cut if model.chats is not None else f"{cut}; --long window splits them into passages"
    outputs = {info.name: info.shape for info in model.session.model.structure.outputs}
    if model.is_sparse and "logits" in outputs and len(outputs["logits"]) == 3:
        yield "the graph gives logits of every token; exported with --head splade it gives one vector, which is faster"


@dataclass(frozen=True)
class EncodingTask:
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
        folder: the output folder.
        model: the model.
        plan: how texts are run.
        shard_format: the format of the files.
        description: the description of the vectors in the manifest.
        splits: the splits of the corpus.
        identity: everything that determines the bytes of the output.
        records: the folder's records, once started; None if everything is already published.
    """

    def __init__(self, task: EncodingTask) -> None:
        """Load the model and find the files of the corpus.

        Raises:
            OnnxtoolError: as for `encode_corpus`, if detectable before a text is read.
        """
        self.folder, options = OutputFolder(task.output), task.options
        self.records: Records | None = None
        self._strict, self._force, self._shard_size = task.strict, task.force, options.shard_size
        self._counts = LineCounts()
        self._num_texts: dict[int, int] = {}  # of splits that are begun
        measured = self.folder.records_path / RUN_FILE
        with ExitStack() as stack:
            if options.calibration is not None and not task.force and entry(measured):
                # The first part measured the ranges; another kind of CPU might measure different ones.
                ranges = stack.enter_context(on_this_machine(measured))
                options = replace(options, calibration=None, ranges=ranges)
            self._open(task, options)

    def _open(self, task: EncodingTask, options: VectorOptions) -> None:
        resolve_provider(options.provider)  # before anything is fetched
        file = ModelFile.open(model_on_this_machine(task.model_path, options.text_task))
        threads = options.threads or 1
        model: CorpusModel
        left_out: tuple[str, ...] = ()
        if file.takes_pictures:
            sources = find_picture_sources(task.corpus)
            model = load_pictures(file, model_name=options.model_name, provider=options.provider, threads=threads)
            _refuse_for_pictures(options)
        else:
            sources, left_out = find_sources(task.corpus)
            model = load_for_texts(file, options, threads)
            model.require_documents(options.text_task or options.prompt)
        is_sparse = isinstance(model, LoadedModel) and model.is_sparse
        kind = _kind(model, options, is_sparse=is_sparse)
        if kind == "parquet":
            require_pyarrow()  # before any work
        form, self.description, notes = _form(model, options)
        weights = options.weights or ("float" if kind == "parquet" else "int")
        self.shard_format = ShardFormat(
            kind,
            kind == "jsonl" if options.contents is None else options.contents,
            weights if is_sparse else "float",
            self.description["of"] == "tokens",
        )
        self.model, self.plan = model, _plan(model, options, form, task.workers)
        self.splits = split_corpus(sources, options.split_bytes)
        chosen = _chosen(model, options, self.shard_format, self.plan)
        identity = make_identity(model.session.model, model.folder, sources, chosen, self.description)
        self.identity = {**identity, "num_splits": len(self.splits)}
        self._form_notes = (*notes, *left_out_notes(left_out))

    @property
    def limits(self) -> WindowLimits:
        """The number of texts in a shard, and the maximum numbers of texts and characters in a window."""
        texts, characters = splits.WINDOW_TEXTS, splits.WINDOW_CHARACTERS
        if isinstance(self.model, PictureModel):
            texts = _WINDOW_PICTURES if self.model.parts is None else _WINDOW_PAGES
        if self.shard_format.by_token:
            characters = _CHARACTERS_OF_TOKENS
        elif self.plan.long.way == "window":
            characters = _CHARACTERS_OF_PASSAGES
        return WindowLimits(self._shard_size, texts, characters)

    def notes(self, num_truncated: int) -> Iterator[str]:
        """Return notes for the user about the vectors."""
        yield from self._form_notes
        yield from _notes(self.model, self.plan.task, num_truncated)

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
                closing(encode_windows(self.model, windows, self.plan, on_event, on_running)) as encoded,
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
                    shard = shard or StagedShard(self.folder, self.shard_format, name, self.description)
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

    def _windows(self, number: int) -> Iterator[TextWindow]:
        """Yield the windows of a split that are not encoded yet."""
        begun = self._begun.begun(number)
        self._num_texts[number] = sum(shard.num_texts for shard in begun)
        done = [shard.digest for shard in begun]
        split = self.splits[number]
        (first, *_) = split.sources
        # Texts without ids are named after their line numbers.
        before = self._counts.before(first, split.begin) if split.begin and first.suffix == ".txt" else 0
        reader = SourceReader(split.sources, split.begin, split.end, before)
        yield from SplitWindows(number, reader, self.limits, done, lambda reject: self._require_lenient(reject, number))

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
