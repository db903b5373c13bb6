"""Say how similar pictures are, or rank them for a text: what `onnxtool infer --image` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from onnxtool.checkpoint.picture_files import PictureInput, find_pictures
from onnxtool.errors import InputError
from onnxtool.infer.answering import MAX_SIMILARITIES, numbers_of
from onnxtool.infer.loading import LoadedModel, load
from onnxtool.infer.options import InferOptions
from onnxtool.infer.pictures.model import PictureModel, load_pictures
from onnxtool.infer.report import InferReport, Ranking, Scored, TextAnswer
from onnxtool.infer.vectors import DenseVectors, cosine_similarities

_WEIGHTS = "onnxtool.weights_sha256"


def answer_pictures(options: InferOptions, on_progress: Callable[[str], None] = lambda _stage: None) -> InferReport:
    """Run the pictures of `options` through a model, and rank them by cosine where there is a query.

    Raises:
        InputError: an option is not for pictures, there are none, or one cannot be read.
        OnnxtoolError: of `load_pictures`, or of `load` for the model of the query.
    """
    _refuse_unused(options)
    model = load_pictures(
        options.model_path,
        model_name=options.model_name,
        provider=options.provider,
        threads=options.threads,
        on_progress=on_progress,
    )
    pictures = [PictureInput(Path(path)) for path in options.images]
    if options.input_path is not None:
        pictures += find_pictures(options.input_path)
    if not pictures:
        raise InputError("no pictures to run", "pass at least one --image, or --input with a folder or list of them")
    query = None if options.query is None else _query_vector(model, options, on_progress)
    on_progress(f"running {len(pictures)} pictures")
    vectors = model.encode([picture.path for picture in pictures])
    return _report(model, options.query, pictures, vectors, query)


def _report(
    model: PictureModel,
    query: str | None,
    pictures: Sequence[PictureInput],
    vectors: DenseVectors,
    query_vector: DenseVectors | None,
) -> InferReport:
    similarities: tuple[tuple[float, ...], ...] = ()
    scores: list[float] = []
    notes: tuple[str, ...] = ()
    if query_vector is not None:
        scores = [float(score) for score in cosine_similarities(np.concatenate([query_vector, vectors]))[0, 1:]]
    elif 1 < len(pictures) <= MAX_SIMILARITIES:
        similarities = tuple(tuple(float(value) for value in row) for row in cosine_similarities(vectors))
    elif len(pictures) > MAX_SIMILARITIES:
        notes = (f"no similarities: {len(pictures)} pictures, and pairs are compared up to {MAX_SIMILARITIES}",)
    answers = tuple(
        TextAnswer(
            text=str(picture.path),
            num_tokens=0,
            truncated=False,
            candidates=(Scored("similarity", scores[place]),) if scores else (),
            outputs={model.vector: vector.shape},
            id=picture.id,
            query=query,
            vector=numbers_of(vector),
        )
        for place, (picture, vector) in enumerate(zip(pictures, vectors, strict=True))
    )
    order = tuple(sorted(range(len(scores)), key=lambda place: -scores[place]))
    return InferReport(
        model=str(model.session.model.path),
        provider=model.session.provider,
        task=model.task,
        kind="scores" if scores else "similarities",
        answers=answers,
        similarities=similarities,
        rankings=(Ranking(query, order),) if scores else (),
        notes=notes,
    )


def _query_vector(model: PictureModel, options: InferOptions, on_progress: Callable[[str], None]) -> DenseVectors:
    """Encode the query with the model of the other side: float32 [1, D].

    Raises:
        InputError: that is not named, gives no vectors, or is the side of another checkpoint.
    """
    if options.text_model is None:
        raise InputError(
            "--query ranks pictures for a text, and the model of texts is not named",
            "export it with --task sentence-similarity, and pass it with --text_model",
        )
    texts = load(options.text_model, provider=options.provider, threads=options.threads, on_progress=on_progress)
    _require_same_checkpoint(model, texts)
    vectors = texts.encode([options.query or ""], prompt=options.prompt, task="query")
    width = next(info.shape[-1] for info in model.session.model.structure.outputs if info.name == model.vector)
    is_alike = isinstance(vectors, np.ndarray) and vectors.dtype == np.float32 and vectors.shape[1:] == (width,)
    if not is_alike:
        raise InputError(
            f"{options.text_model} gives other vectors than {options.model_path}, of {width} numbers of float32",
            "take both sides from one checkpoint",
        )
    return np.asarray(vectors)


def _require_same_checkpoint(model: PictureModel, texts: LoadedModel) -> None:
    one, other = (loaded.session.model.metadata.get(_WEIGHTS) for loaded in (model, texts))
    if one != other:
        raise InputError(
            f"{texts.session.model.path} and {model.session.model.path} come from different weights, and their vectors "
            "are of no common space",
            "export both sides from one checkpoint",
        )


def _refuse_unused(options: InferOptions) -> None:
    """Refuse what is for texts alone.

    Raises:
        InputError: it was passed.
    """
    alone = {
        "--text": options.texts,
        "--task": options.task,
        "--long": options.long,
        "--overlap": options.overlap,
        "--top_k": options.top_k,
    }
    given = [name for name, value in alone.items() if value not in ((), None)]
    if options.query is None:
        given += [name for name, value in (("--prompt", options.prompt), ("--text_model", options.text_model)) if value]
    if given:
        raise InputError(
            f"{options.model_path} takes pictures, and {' and '.join(given)} was passed, which is for texts",
            "pass --image, and --query with --text_model to rank pictures for a text",
        )
