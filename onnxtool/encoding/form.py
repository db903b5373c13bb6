"""The form of a corpus's vectors: per text, token or term, their dimensions, and their storage type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.quantized_vectors import VectorType, few_vectors, measure_ranges
from onnxtool.checkpoint.text_files import TextInput, read_texts
from onnxtool.encoding.options import VectorOptions
from onnxtool.errors import InputError
from onnxtool.infer.heads.embeddings import Embeddings
from onnxtool.infer.loading import LoadedModel
from onnxtool.infer.pictures import PictureModel
from onnxtool.infer.text_model import VectorForm
from onnxtool.infer.vectors import TokenVectors
from onnxtool.reports import Json

_SAMPLE = "What a model gives for a text shows what its vectors are."
_TEXTS_AT_A_TIME = 1024


@dataclass(frozen=True)
class CorpusForm:
    """The form of vectors, and the post-processing of the model's output.

    Attributes:
        by_token: whether a text has one vector per token.
        dimensions: numbers per vector; for sparse vectors, the size of the vocabulary.
        description: their description in the manifest.
        notes: notes for the user.
    """

    form: VectorForm
    by_token: bool
    dimensions: int
    description: dict[str, Json]
    notes: tuple[str, ...] = ()


def choose_form(model: LoadedModel | PictureModel, options: VectorOptions) -> CorpusForm:
    """Determine the storage of vectors; ranges are read, or measured on the calibration texts.

    Raises:
        InputError: the model's vectors do not support this storage, or ranges or texts cannot be read.
    """
    measured = options.calibration is not None
    form = VectorForm.of(
        model.head,
        vectors_as="float32" if measured else options.vectors_as,
        ranges=options.ranges,
        dimensions=options.dimensions,
    )
    if isinstance(model, LoadedModel) and model.is_sparse:
        terms = model.tokenizer.vocabulary_size
        return CorpusForm(form, False, terms, {"of": "terms", **VectorType("float32").describe(terms)})
    notes: tuple[str, ...] = ()
    if isinstance(model, PictureModel) and options.calibration is not None:
        raise InputError("--calibration is a file of texts, but the corpus consists of images", "pass --ranges")
    if isinstance(model, LoadedModel) and options.calibration is not None and options.vectors_as is not None:
        ranges, count = measure_ranges(_vectors(model, read_texts(options.calibration), options))
        form = replace(form, stored=VectorType.of(options.vectors_as, ranges))
        notes = tuple(filter(None, [few_vectors(count)]))
    given_sample: Any = (
        model.run([model.blank()])
        if isinstance(model, PictureModel)
        else model.encode([_SAMPLE], prompt=options.prompt, task=model.task_of(options.text_task))
    )
    sample: Any = form.apply(given_sample)
    by_token = isinstance(sample, TokenVectors)
    array = sample.vectors if by_token else sample
    head = model.head
    given = head.stored if isinstance(head, Embeddings) else None
    stored = form.stored or given or VectorType(str(array.dtype))
    width = array.shape[1] * stored.numbers_of_a_column
    return CorpusForm(form, by_token, width, {"of": "tokens" if by_token else "texts", **stored.describe(width)}, notes)


def _vectors(model: LoadedModel, texts: tuple[TextInput, ...], options: VectorOptions) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        part = [text.contents for text in texts[start : start + _TEXTS_AT_A_TIME]]
        vectors: Any = model.encode(
            part, prompt=options.prompt, task=model.task_of(options.text_task), dimensions=options.dimensions
        )
        yield vectors.vectors if isinstance(vectors, TokenVectors) else vectors
