"""Run texts through a model in one call: what `onnxtool infer` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.checkpoint.text_files import TextInput, count_lines, iterate_texts
from onnxtool.errors import InputError, OptionError
from onnxtool.infer.answering import Asked, answer_queries, answer_texts, in_parts, stream_answers
from onnxtool.infer.chats import CUT, LongTexts
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.infer.generation.writing import OnText, Writer, load_writer
from onnxtool.infer.loading import LoadedModel, load
from onnxtool.infer.options import InferOptions
from onnxtool.infer.pictures import answer_pictures, takes_pictures
from onnxtool.infer.report import GenerationReport, InferReport
from onnxtool.infer.static_queries import QUERY, StaticQueries, load_queries
from onnxtool.infer.text_model import find_file
from onnxtool.infer.vectors import AnyVectors
from onnxtool.model_file import ModelFile
from onnxtool.options import checked


def given_texts(options: InferOptions) -> Iterator[TextInput]:
    """Yield the texts of the options, then the texts of the input file.

    Raises:
        InputError: the file cannot be read.
    """
    yield from map(TextInput, options.texts)
    if options.input_path is not None:
        yield from iterate_texts(options.input_path)


@checked
def run_texts(
    options: InferOptions,
    *,
    texts: Sequence[TextInput] | None = None,
) -> InferReport:
    """Load a model with its tokenizer, and answer each text, or each image for an image model, by the model's task.

    Queries of an inference-free sparse encoder (`task` or `prompt` is `query`) are looked up, and no model is loaded.

    Args:
        options: what to run.
        texts: the texts of the options, if already read.

    Raises:
        OnnxtoolError: as for `load` and `LoadedModel.answer`.
    """
    if takes_pictures(ModelFile.open(options.model_path)):
        return answer_pictures(options)
    _refuse_pictures(options)
    options = _for_task(options)
    texts = tuple(given_texts(options)) if texts is None else texts
    queries = _queries(options)
    if queries is not None:
        return answer_queries(queries, texts, options)
    return answer_texts(_load(options), texts, _asked(options))


def encode_texts(options: InferOptions, *, dense: bool = False) -> tuple[list[str], AnyVectors]:
    """Return the ids and the vectors of the texts of `options`; those without an id are numbered from 1.

    Args:
        options: what to run.
        dense: whether to refuse a model that gives terms, or a vector for each token.

    Raises:
        InputError: the model gives no vectors, or none that are dense, or a text is a pair.
        OnnxtoolError: as for `load` and `LoadedModel.encode`.
    """
    if takes_pictures(ModelFile.open(options.model_path)):
        raise InputError(f"{options.model_path} takes images", "pass --output NAME/ for the vectors of --input")
    _refuse_pictures(options)
    options, texts = _for_task(options), tuple(given_texts(options))
    if any(text.query is not None for text in texts):
        raise InputError("a pair of a query and a text has no vector", "leave query out of the lines of --input")
    model, long = _load(options), _asked(options).long or CUT
    if dense and (model.is_sparse or model.is_late_interaction):
        raise InputError(f"{options.model_path} gives no dense vectors", "write them to a .npz or .parquet file")
    ids = [text.id or str(number) for number, text in enumerate(texts, start=1)]
    contents = [text.contents for text in texts]
    return ids, model.encode(contents, prompt=options.prompt, task=options.text_task, long=long)


def stream_texts(
    options: InferOptions,
    *,
    texts: Iterator[TextInput] | None = None,
    generation: GenerateOptions | None = None,
) -> Iterator[InferReport | GenerationReport]:
    """Answer any number of texts in bounded memory, like `run_texts` or, with `generation`, like `write_texts`.

    Args:
        options: what to run.
        texts: the texts of the options, if some are already read.
        generation: the generation options; None for a model that does not generate.

    Yields:
        A report for a few hundred texts at a time, in order. The answers are the same as in a single report, without
        similarities and rankings. Images come in one report.

    Raises:
        OnnxtoolError: as for these, when the text is reached.
    """
    if takes_pictures(ModelFile.open(options.model_path)):
        yield replace(answer_pictures(options), similarities=(), rankings=())
        return
    _refuse_pictures(options)
    options = _for_task(options)
    texts = given_texts(options) if texts is None else texts
    if generation is not None:
        yield from _stream_written(options, generation, texts)
        return
    queries = _queries(options)
    if queries is not None:
        for part in in_parts(texts):
            yield answer_queries(queries, part, options)
        return
    total = 0 if options.input_path is None else len(options.texts) + count_lines(options.input_path)
    yield from stream_answers(_load(options), texts, _asked(options), total)


def _stream_written(
    options: InferOptions, generation: GenerateOptions, texts: Iterator[TextInput]
) -> Iterator[GenerationReport]:
    writer, long = _load_writer(options, generation)
    first = 0
    for part in in_parts(texts):
        report = writer.write(part, prompt=options.prompt, long=long, first=first)
        first += len(part)
        yield replace(report, notes=())  # each answer states whether it, or its text, was truncated


def _refuse_pictures(options: InferOptions) -> None:
    if options.images or options.text_model is not None:
        raise InputError(
            f"{options.model_path} takes no images, and --image or --text_model was passed",
            f"pass the side of a dual encoder for images, exported with --task {TASK_OF_PICTURES}",
        )


def _queries(options: InferOptions) -> StaticQueries | None:
    """Return the lookup table if the texts are queries of an inference-free sparse encoder."""
    if QUERY not in (options.text_task, options.prompt) or options.description.given:
        return None
    return load_queries(options.model_path, model_name=options.model_name)


def _for_task(options: InferOptions) -> InferOptions:
    """Return the options with the file for these texts, if queries and documents have separate files."""
    path, model_name = find_file(options.model_path, options.model_name, options.text_task)
    return replace(options, model_path=path, model_name=model_name)


def _asked(options: InferOptions) -> Asked:
    long = None if options.long is None else LongTexts(options.long, options.overlap)
    return Asked(options.query, options.prompt, options.text_task, long, options.top_k)


def _load(options: InferOptions) -> LoadedModel:
    return load(
        options.model_path,
        model_name=options.model_name,
        description=options.description,
        provider=options.provider,
        threads=options.threads,
        representation=options.representation,
    )


def write_texts(
    options: InferOptions,
    generation: GenerateOptions,
    *,
    texts: Sequence[TextInput] | None = None,
    on_text: OnText | None = None,
) -> GenerationReport:
    """Load a generative model, and generate after each text; `texts` as in `run_texts`.

    Raises:
        OnnxtoolError: as for `load_writer` and `Writer.write`.
    """
    writer, long = _load_writer(options, generation)
    texts = tuple(given_texts(options)) if texts is None else texts
    return writer.write(texts, prompt=options.prompt, long=long, on_text=on_text)


def _load_writer(options: InferOptions, generation: GenerateOptions) -> tuple[Writer, LongTexts]:
    of_texts = {"--task": options.text_task, "--representation": options.representation}
    given = [f"{name} {value}" for name, value in of_texts.items() if value is not None]
    if given := [*options.description.given.values(), *given]:
        raise OptionError(
            f"{options.model_path} is a text-generation model; {' and '.join(given)} does not apply", "leave it out"
        )
    if options.query is not None:
        raise InputError(
            f"{options.model_path} is a text-generation model; --query does not apply",
            "write both into one --text, as the model was trained on them",
        )
    writer = load_writer(
        options.model_path,
        options=generation,
        model_name=options.model_name,
        provider=options.provider,
        threads=options.threads,
    )
    return writer, CUT if options.long is None else LongTexts(options.long, options.overlap)
