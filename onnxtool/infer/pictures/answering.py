"""Say how similar pictures are, or rank them for a text: what `onnxtool infer --image` does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxtool.checkpoint.picture_files import PictureInput, find_pictures
from onnxtool.errors import InputError
from onnxtool.infer.answering import MAX_SIMILARITIES, numbers_of
from onnxtool.infer.options import InferOptions
from onnxtool.infer.pictures.model import PictureModel, load_pictures
from onnxtool.infer.pictures.queries import encode_query
from onnxtool.infer.report import InferReport, Ranking, Scored, TextAnswer
from onnxtool.infer.vectors import DenseVectors, TokenVectors, cosine_similarities
from onnxtool.progress import tell


def answer_pictures(options: InferOptions) -> InferReport:
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
    )
    pictures = [PictureInput(path) for path in options.images]
    if options.input_path is not None:
        pictures += find_pictures(options.input_path)
    if not pictures:
        raise InputError("no pictures to run", "pass at least one --image, or --input with a folder or list of them")
    query = None if options.query is None else encode_query(model, options.query, options)
    tell(f"running {len(pictures)} pictures")
    vectors = model.encode([picture.path for picture in pictures])
    return _report(model, options.query, pictures, vectors, query)


def _report(
    model: PictureModel,
    query: str | None,
    pictures: Sequence[PictureInput],
    vectors: DenseVectors | TokenVectors,
    query_vectors: DenseVectors | TokenVectors | None,
) -> InferReport:
    similarities: tuple[tuple[float, ...], ...] = ()
    scores: list[float] = []
    notes: tuple[str, ...] = ()
    if query_vectors is not None:
        scores = _scores(query_vectors, vectors)
    elif isinstance(vectors, np.ndarray) and 1 < len(pictures) <= MAX_SIMILARITIES:
        similarities = tuple(tuple(float(value) for value in row) for row in cosine_similarities(vectors))
    elif isinstance(vectors, np.ndarray) and len(pictures) > MAX_SIMILARITIES:
        notes = (f"no similarities: {len(pictures)} pictures, and pairs are compared up to {MAX_SIMILARITIES}",)
    label = "maxsim" if model.by_token else "similarity"
    answers = tuple(
        TextAnswer(
            text=str(picture.path),
            num_tokens=0,
            truncated=False,
            candidates=(Scored(label, scores[place]),) if scores else (),
            outputs={model.vector: own.shape},
            id=picture.id,
            query=query,
            vector=() if model.by_token else numbers_of(own),
            token_vectors=tuple(map(numbers_of, own)) if model.by_token and not scores else (),
        )
        for place, picture in enumerate(pictures)
        for own in [vectors.row(place) if isinstance(vectors, TokenVectors) else vectors[place]]
    )
    order = tuple(sorted(range(len(scores)), key=lambda place: -scores[place]))
    return InferReport(
        model=str(model.session.model.path),
        provider=model.session.provider,
        task=model.task,
        kind="scores" if scores else "token_vectors" if model.by_token else "similarities",
        answers=answers,
        similarities=similarities,
        rankings=(Ranking(query, order),) if scores else (),
        notes=notes,
    )


def _scores(query: DenseVectors | TokenVectors, pictures: DenseVectors | TokenVectors) -> list[float]:
    """Return the cosine of each picture with the query, or its MaxSim where tokens have vectors."""
    if isinstance(query, TokenVectors) and isinstance(pictures, TokenVectors):
        return [float(score) for score in query.max_similarities(pictures)[0]]
    return [float(score) for score in cosine_similarities(np.concatenate([query, pictures]))[0, 1:]]


def _refuse_unused(options: InferOptions) -> None:
    """Refuse what is for texts alone.

    Raises:
        InputError: it was passed.
    """
    alone = {
        "--text": options.texts,
        "--task": options.text_task,
        **options.description.given,
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
