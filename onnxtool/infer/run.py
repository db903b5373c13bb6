"""Run texts through a model in one call: what `onnxtool infer` does."""

from __future__ import annotations

from collections.abc import Callable

from onnxtool.checkpoint.tasks import TASK_OF_PICTURES
from onnxtool.checkpoint.text_files import TextInput, read_texts
from onnxtool.errors import InputError
from onnxtool.infer.answering import answer_queries
from onnxtool.infer.generation.loading import load_writer
from onnxtool.infer.generation.options import GenerateOptions
from onnxtool.infer.generation.report import GenerationReport
from onnxtool.infer.generation.writing import OnText
from onnxtool.infer.loading import load
from onnxtool.infer.long_texts import CUT, LongTexts
from onnxtool.infer.options import InferOptions
from onnxtool.infer.pictures.answering import answer_pictures
from onnxtool.infer.pictures.model import takes_pictures
from onnxtool.infer.report import InferReport
from onnxtool.infer.static_queries import QUERY, load_queries
from onnxtool.model_file import ModelFile


def given_texts(options: InferOptions) -> list[TextInput]:
    """Return the texts of the options, then those of their file.

    Raises:
        InputError: the file cannot be read.
    """
    texts = [TextInput(text) for text in options.texts]
    return texts if options.input_path is None else [*texts, *read_texts(options.input_path)]


def run_texts(options: InferOptions, on_progress: Callable[[str], None] = lambda _stage: None) -> InferReport:
    """Load a model with its tokenizer, and answer each text by what the model is for; pictures, for a model of them.

    Queries of an inference-free sparse encoder (`task` or `prompt` is `query`) are looked up, and no model is loaded.

    Raises:
        OnnxtoolError: of `load`, or of `LoadedModel.answer`.
    """
    if takes_pictures(ModelFile.open(options.model_path)):
        return answer_pictures(options, on_progress)
    if options.images or options.text_model is not None:
        raise InputError(
            f"{options.model_path} takes no pictures, and --image or --text_model was passed",
            f"pass the side of a dual encoder for pictures, exported with --task {TASK_OF_PICTURES}",
        )
    texts = given_texts(options)
    if QUERY in (options.task, options.prompt):
        queries = load_queries(options.model_path, model_name=options.model_name)
        if queries is not None:
            return answer_queries(queries, texts, options)
    model = load(
        options.model_path,
        model_name=options.model_name,
        provider=options.provider,
        threads=options.threads,
        representation=options.representation,
        on_progress=on_progress,
    )
    return model.answer(
        texts,
        query=options.query,
        prompt=options.prompt,
        task=options.task,
        long=None if options.long is None else LongTexts(options.long, options.overlap),
        top_k=options.top_k,
        on_progress=on_progress,
    )


def write_texts(
    options: InferOptions,
    generation: GenerateOptions,
    *,
    on_text: OnText | None = None,
    on_progress: Callable[[str], None] = lambda _stage: None,
) -> GenerationReport:
    """Load a model that writes, and let it write after each text.

    Raises:
        OnnxtoolError: of `load_writer`, or of `Writer.write`.
    """
    if options.query is not None:
        raise InputError(
            f"{options.model_path} writes after texts, and --query was passed",
            "write both into one --text, as the model was trained on them",
        )
    texts = given_texts(options)
    writer = load_writer(
        options.model_path,
        options=generation,
        model_name=options.model_name,
        provider=options.provider,
        threads=options.threads,
        on_progress=on_progress,
    )
    long = CUT if options.long is None else LongTexts(options.long, options.overlap)
    return writer.write(texts, prompt=options.prompt, long=long, on_text=on_text, on_progress=on_progress)
