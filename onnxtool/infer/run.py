"""The jobs of `onnxtool infer`: one is chosen from an open file and the options, and runs all texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.checkpoint.text_files import TextInput, count_lines, iterate_texts
from onnxtool.errors import InputError, OptionError
from onnxtool.infer.answering import AnswerOptions, answer_queries, answer_texts, in_parts, stream_answers
from onnxtool.infer.chats import CUT, LongTexts
from onnxtool.infer.generation.graphs import ENCODER_MASK
from onnxtool.infer.generation.writing import OnText, Writer, load_writer
from onnxtool.infer.loading import LoadedModel, load_as
from onnxtool.infer.options import GenerateOptions, InferOptions
from onnxtool.infer.pictures import answer_pictures
from onnxtool.infer.report import GenerationReport, InferReport
from onnxtool.infer.static_queries import QUERY, StaticQueries, load_queries
from onnxtool.infer.text_model import find_file
from onnxtool.infer.vectors import AnyVectors
from onnxtool.model_file import ModelFile
from onnxtool.options import checked
from onnxtool.runtime.decoding import cache_of


def given_texts(options: InferOptions) -> Iterator[TextInput]:
    """Yield the texts of the options, then the texts of the input file.

    Raises:
        InputError: the file cannot be read.
    """
    yield from map(TextInput, options.texts)
    if options.input_path is not None:
        yield from iterate_texts(options.input_path)


Report = InferReport | GenerationReport


@dataclass(frozen=True)
class PictureJob:
    """Images through an image model, which takes no texts."""

    model: ModelFile
    options: InferOptions

    def answer(self, texts: Iterable[TextInput]) -> InferReport:
        """Return the answers for the images of the options."""
        del texts
        return answer_pictures(self.model, self.options)

    def stream(self, texts: Iterable[TextInput]) -> Iterator[Report]:
        """Yield one report of all images, without similarities and rankings."""
        yield replace(self.answer(texts), similarities=(), rankings=())


@dataclass(frozen=True)
class LookupJob:
    """Queries of an inference-free sparse encoder, for which no graph is loaded."""

    queries: StaticQueries
    options: InferOptions

    def answer(self, texts: Iterable[TextInput]) -> InferReport:
        """Return the terms of each text."""
        return answer_queries(self.queries, tuple(texts), self.options)

    def stream(self, texts: Iterable[TextInput]) -> Iterator[Report]:
        """Yield reports of a few hundred texts each."""
        return map(self.answer, in_parts(texts))

    def encode(self, contents: Sequence[str], *, dense: bool) -> AnyVectors:
        """Return the vectors of N queries, which are never dense."""
        if dense:
            raise _not_dense(self.options)
        return self.queries.encode(contents, prompt=self.options.prompt, prune=self.options.prune)


@dataclass(frozen=True)
class TextJob:
    """Texts through a model, which is loaded after they are read."""

    model: ModelFile
    options: InferOptions

    def load(self) -> LoadedModel:
        """Load the model with its tokenizer."""
        return load_as(self.options, self.model, self.options.model_name, self.options.threads)

    @property
    def request(self) -> AnswerOptions:
        """The options that apply to each text."""
        options = self.options
        long = None if options.long is None else LongTexts(options.long, options.overlap)
        return AnswerOptions(options.query, options.prompt, options.text_task, long, options.top_k, options.prune)

    def answer(self, texts: Iterable[TextInput]) -> InferReport:
        """Return the answer for each text."""
        texts = tuple(texts)
        return answer_texts(self.load(), texts, self.request)

    def stream(self, texts: Iterable[TextInput]) -> Iterator[Report]:
        """Yield reports of a few hundred texts each, without similarities and rankings, in bounded memory."""
        options = self.options
        total = 0 if options.input_path is None else len(options.texts) + count_lines(options.input_path)
        yield from stream_answers(self.load(), texts, self.request, total)

    def encode(self, contents: Sequence[str], *, dense: bool) -> AnyVectors:
        """Return the vectors of N texts."""
        options, model = self.options, self.load()
        if dense and (model.is_sparse or model.is_late_interaction):
            raise _not_dense(options)
        request = self.request
        long = request.long or CUT
        return model.encode(contents, prompt=request.prompt, task=request.task, long=long, prune=request.prune)


@dataclass(frozen=True)
class WriteJob:
    """Texts that a generative model continues."""

    model: ModelFile
    options: InferOptions
    generation: GenerateOptions

    def load(self) -> Writer:
        """Load the model.

        Raises:
            OptionError: an option does not apply to text generation.
            InputError: a query was passed.
        """
        options = self.options
        of_texts = {
            "--task": options.text_task,
            "--representation": options.representation,
            "--prune": options.prune,
        }
        names = [f"{name} {value}" for name, value in of_texts.items() if value is not None]
        if names := [*options.description.given.values(), *names]:
            raise OptionError(
                f"{options.model_path} is a text-generation model; {' and '.join(names)} does not apply", "leave it out"
            )
        if options.query is not None:
            raise InputError(
                f"{options.model_path} is a text-generation model; --query does not apply",
                "write both into one --text, as the model was trained on them",
            )
        return load_writer(
            self.model,
            options=replace(self.generation, top_k=options.top_k),
            model_name=options.model_name,
            provider=options.provider,
            threads=options.threads,
        )

    @property
    def _long(self) -> LongTexts:
        return CUT if self.options.long is None else LongTexts(self.options.long, self.options.overlap)

    def answer(self, texts: Iterable[TextInput], *, on_text: OnText | None = None) -> GenerationReport:
        """Return the text generated after each text."""
        writer, long = self.load(), self._long
        return writer.write(tuple(texts), prompt=self.options.prompt, long=long, on_text=on_text)

    def stream(self, texts: Iterable[TextInput]) -> Iterator[Report]:
        """Yield reports of a few hundred texts each, in bounded memory."""
        writer, long, first = self.load(), self._long, 0
        for part in in_parts(texts):
            report = writer.write(part, prompt=self.options.prompt, long=long, first=first)
            first += len(part)
            yield replace(report, notes=())  # each answer states whether it, or its text, was truncated


AnswerJob = PictureJob | LookupJob | TextJob
Job = AnswerJob | WriteJob


def open_job(options: InferOptions, generation: GenerateOptions | None = None, *, must_write: bool = False) -> Job:
    """Open the model's file, and decide what is to be done with it; nothing else of it is loaded.

    Args:
        options: what to run.
        generation: the generation options, which ask for text; None if there are none.
        must_write: whether to generate text in any case.

    Raises:
        InputError: an option does not apply to the model, or a file of the checkpoint is missing.
        ModelFileError: the file cannot be used.
    """
    model = _open(options)
    if generation is not None and generation.asks_for_text:
        cache_of(model)
        must_write = True
    if must_write or ENCODER_MASK in model.input_names:
        return WriteJob(model, options, generation or GenerateOptions())
    return _answer_job(model, options)


def _open(options: InferOptions) -> ModelFile:
    return ModelFile.open(options.model_path).with_adapter(options.adapter)


def _answer_job(model: ModelFile, options: InferOptions) -> AnswerJob:
    """Decide what answers the texts or images of the options."""
    if model.takes_pictures:
        return PictureJob(model, options)
    if options.images or options.text_model is not None:
        raise InputError(
            f"{options.model_path} takes no images, and --image or --text_model was passed",
            f"pass the side of a dual encoder for images, exported with --task {TASK_OF_PICTURES}",
        )
    model, model_name = find_file(model, options.model_name, options.text_task)
    options = replace(options, model_path=model.path, model_name=model_name)
    if QUERY in (options.text_task, options.prompt) and not options.description.given:
        queries = load_queries(model, model_name=model_name)
        if queries is not None:
            return LookupJob(queries, options)
    return TextJob(model, options)


@checked
def run_texts(options: InferOptions) -> InferReport:
    """Load a model with its tokenizer, and answer each text, or each image for an image model, by the model's task.

    Queries of an inference-free sparse encoder (`task` or `prompt` is `query`) are looked up, and no model is loaded.

    Args:
        options: what to run.

    Raises:
        OnnxtoolError: as for `load` and `LoadedModel.answer`.
    """
    return _answer_job(_open(options), options).answer(given_texts(options))


def encode_texts(options: InferOptions, *, dense: bool = False) -> tuple[list[str], AnyVectors]:
    """Return the ids and the vectors of the texts of `options`; those without an id are numbered from 1.

    Args:
        options: what to run.
        dense: whether to refuse a model that gives terms, or a vector for each token.

    Raises:
        InputError: the model gives no vectors, or none that are dense, or a text is a pair.
        OnnxtoolError: as for `load` and `LoadedModel.encode`.
    """
    job = _answer_job(_open(options), options)
    if isinstance(job, PictureJob):
        raise InputError(f"{options.model_path} takes images", "pass --output NAME/ for the vectors of --input")
    texts = tuple(given_texts(options))
    if any(text.query is not None for text in texts):
        raise InputError("a pair of a query and a text has no vector", "leave query out of the lines of --input")
    ids = [text.id or str(number) for number, text in enumerate(texts, start=1)]
    return ids, job.encode([text.contents for text in texts], dense=dense)


def _not_dense(options: InferOptions) -> InputError:
    return InputError(f"{options.model_path} gives no dense vectors", "write them to a .npz or .parquet file")
