"""What a model's outputs say about each text, by what the model is for.

Letters of shapes: B batch, S sequence, H hidden size, V vocabulary, L labels, N terms of one text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.infer.batches import Batch
from onnxtool.infer.pooled import dense_vectors, require_finite, sparse_vectors
from onnxtool.infer.pooling import Floats, sigmoid, softmax
from onnxtool.reports import Scored
from onnxtool.texts.checkpoint_folder import CheckpointFolder
from onnxtool.texts.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Interpreter:
    """What it takes to understand outputs.

    Attributes:
        top_k: how many candidates are wanted at most.
    """

    tokenizer: TextTokenizer
    folder: CheckpointFolder
    top_k: int

    @cached_property
    def labels(self) -> dict[int, str]:
        """The names of a classifier's labels, from config.json."""
        names = self.folder.read("config.json").get("id2label")
        pairs = names.items() if isinstance(names, dict) else ()
        return {int(index): str(name) for index, name in pairs if index.isdecimal()}

    def label(self, index: int) -> str:
        """Return the name of a label; transformers' own placeholder where it has none."""
        return self.labels.get(index, f"LABEL_{index}")


@dataclass(frozen=True)
class Answer:
    """What a batch says about one of its texts.

    Attributes:
        vector: float [H], for embeddings.
        note: what a user should know about this answer, or an empty string.
    """

    candidates: tuple[Scored, ...] = ()
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    vector: Floats | None = None
    note: str = ""


def weigh_terms(batch: Batch, interpreter: Interpreter) -> list[Answer]:
    """Answer with the terms of highest weight, from logits or from weights that the graph has pooled."""
    vectors = sparse_vectors(batch, interpreter.folder, interpreter.tokenizer)
    vectors = vectors.without(interpreter.tokenizer.framing_ids)
    return [
        Answer(tuple(Scored(term, weight) for term, weight in terms.items() if weight > 0))
        for terms in vectors.terms(interpreter.top_k)
    ]


def embed(batch: Batch, interpreter: Interpreter) -> list[Answer]:
    """Answer with one vector for each text: the graph's own, or its hidden states pooled as the checkpoint says."""
    vectors, note = dense_vectors(batch, interpreter.folder)
    return [Answer(outputs={"sentence_embedding": vector.shape}, vector=vector, note=note) for vector in vectors]


def fill_masks(batch: Batch, interpreter: Interpreter) -> list[Answer]:
    """Answer with the most probable tokens for every mask in each text."""
    token = interpreter.tokenizer.mask_token
    mask_id = None if token is None else interpreter.tokenizer.id_of(token)
    if mask_id is None:
        raise InputError("this model fills in masks, and its tokenizer has no mask token", "pass --model_name")
    logits = batch.output(3, "logits")
    answers = []
    for row, ids, valid in zip(logits, batch.ids, batch.mask, strict=True):
        positions = np.flatnonzero((ids == mask_id) & valid)
        if not len(positions):
            answers.append(Answer(note=f"a text without {token} has nothing to fill in; write {token} for a word"))
            continue
        candidates: list[Scored] = []
        for number, probabilities in enumerate(_probabilities(row[positions], softmax), start=1):
            # Several masks share one list; the number says which one a candidate is for.
            prefix = f"{number}: " if len(positions) > 1 else ""
            best = _largest(probabilities, interpreter.top_k)
            words = ((f"{prefix}{interpreter.tokenizer.word(i)}", float(probabilities[i])) for i in best)
            candidates += [Scored(word, score) for word, score in words]
        answers.append(Answer(tuple(candidates)))
    return answers


def classify_texts(batch: Batch, interpreter: Interpreter) -> list[Answer]:
    """Answer with the labels of each text, most probable first."""
    logits = batch.output(2, "logits")
    config = interpreter.folder.read("config.json")
    if logits.shape[1] == 1:
        scores = logits.astype(np.float64)  # a regression, or the score of a reranker: no probability
        require_finite(scores, "score")
    else:
        multiple = config.get("problem_type") == "multi_label_classification"
        scores = _probabilities(logits, sigmoid if multiple else softmax)
    return [
        Answer(tuple(Scored(interpreter.label(i), float(row[i])) for i in _largest(row, interpreter.top_k)))
        for row in scores
    ]


def classify_tokens(batch: Batch, interpreter: Interpreter) -> list[Answer]:
    """Answer with the most probable label of each token, in the order of the text, special tokens left out."""
    answers = []
    for row, valid, text in zip(batch.output(3, "logits"), batch.mask, batch.texts, strict=True):
        probabilities = _probabilities(row[valid], softmax)
        best = probabilities.argmax(axis=1)
        answers.append(
            Answer(
                tuple(
                    Scored(f"{interpreter.tokenizer.token(token_id)} -> {interpreter.label(int(label))}", float(score))
                    for token_id, special, label, score in zip(
                        text.ids, text.is_special, best, probabilities.max(axis=1), strict=True
                    )
                    if not special
                )
            )
        )
    return answers


def describe_outputs(batch: Batch, interpreter: Interpreter) -> list[Answer]:
    """Answer with the shapes that the model gives for each text by itself, without padding."""
    size = batch.mask.shape
    answers = []
    for text in batch.texts:
        shapes = {}
        for name, array in batch.outputs.items():
            if array.shape[:2] == size:
                shapes[name] = (1, len(text), *array.shape[2:])
            else:
                shapes[name] = (1, *array.shape[1:]) if array.shape[:1] == size[:1] else array.shape
        answers.append(Answer(outputs=shapes))
    return answers


@dataclass(frozen=True)
class AnswerRule:
    """How the outputs of a model are read.

    Attributes:
        kind: what the candidates are, as in InferReport.
    """

    kind: str
    answer: Callable[[Batch, Interpreter], list[Answer]]


# By the values of the metadata onnxtool.task. Tasks that are not here are answered with shapes.
RULES: dict[str, AnswerRule] = {
    "sparse-encoding": AnswerRule("terms", weigh_terms),
    "sentence-similarity": AnswerRule("similarities", embed),
    "fill-mask": AnswerRule("tokens", fill_masks),
    "text-classification": AnswerRule("labels", classify_texts),
    "token-classification": AnswerRule("labels", classify_tokens),
}
SHAPES = AnswerRule("shapes", describe_outputs)


def _probabilities(logits: Floats, function: Callable[[Floats], NDArray[np.float64]]) -> NDArray[np.float64]:
    probabilities = function(logits)
    require_finite(probabilities, "probability")
    return probabilities


def _largest(scores: Floats, count: int) -> list[int]:
    """Return the places of the `count` largest scores, best first; of equals the first comes first."""
    if count < len(scores):
        # Sorting only what is kept; a vocabulary has a hundred thousand entries.
        threshold = np.partition(scores, -count)[-count]
        places = np.flatnonzero(scores >= threshold)
    else:
        places = np.arange(len(scores))
    order = np.argsort(-scores[places], kind="stable")[:count]
    return [int(place) for place in places[order]]
