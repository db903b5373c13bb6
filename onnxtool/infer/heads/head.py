"""What a head has to do: read the outputs of a batch, put windows of a long text together, and answer.

Letters of shapes: B batch, N texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.pooling_module import Floats
from onnxtool.errors import InputError, SessionError
from onnxtool.infer.batches import Batch
from onnxtool.infer.report import Scored, Span

Reading = TypeVar("Reading")
Vectors = TypeVar("Vectors")


@dataclass(frozen=True)
class AnswerContext:
    """What an answer is for.

    Attributes:
        text: the text itself; of a pair the second one.
        windows: what the model read of it, one where it was not split.
        top_k: how many candidates are wanted at most; None for as many as the head gives by itself.
    """

    text: str
    windows: Sequence[EncodedText]
    top_k: int | None


@dataclass(frozen=True)
class Answer:
    """What a model says about one text.

    Attributes:
        note: what a user should know about this answer, or an empty string.
        token_vectors: float32 [T, W], of the tokens of the text; empty where an answer is none of these.
    """

    candidates: tuple[Scored, ...] = ()
    spans: tuple[Span, ...] = ()
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    note: str = ""
    token_vectors: Sequence[NDArray[np.float32]] | NDArray[np.float32] = ()


class Head(ABC):
    """How the outputs of a model are read.

    Attributes:
        kind: what the answers are, as in InferReport.
        needs_offsets: whether answers need to know where in the text the tokens stand.
        takes_pairs: whether the model was made for two texts at once.
        needs_pairs: whether one text by itself is not enough.
        splits_long_texts: whether long texts are split into windows where nothing else is asked for.
        cut_side: on which side a long text is cut; None for what the tokenizer says.
    """

    kind: ClassVar[str]
    needs_offsets: ClassVar[bool] = False
    takes_pairs: ClassVar[bool] = False
    needs_pairs: ClassVar[bool] = False
    splits_long_texts: ClassVar[bool] = False
    cut_side: ClassVar[str | None] = None

    @property
    def includes_prompt(self) -> bool:
        """Whether the tokens of a prompt are pooled as those of the text are."""
        return True

    @property
    def pools_in_graph(self) -> bool:
        """Whether the graph pools over the tokens."""
        return False

    def require_windows(self) -> None:
        """Refuse to split a text into windows where what is read of them cannot be put together.

        Raises:
            InputError: it cannot.
        """
        raise InputError(
            f"what the model says of the windows of a text does not make {self.kind} of the whole",
            "cut the text (--long truncate), or split it yourself into texts that make sense alone",
        )


class VectorHead(Head, Generic[Vectors]):
    """A head that gives one vector for each text."""

    @abstractmethod
    def pool(self, batch: Batch) -> Vectors:
        """Return what is pooled over the tokens of B texts, or of windows of texts."""

    @abstractmethod
    def join(self, vectors: Vectors, windows: Sequence[Sequence[EncodedText]]) -> Vectors:
        """Combine the windows of N texts; `vectors` holds those of one text after those of the other."""

    def prepare(self, text: EncodedText, task: str | None) -> EncodedText:
        """Return a text as it is run for a task, `query` or `document`; None for neither."""
        return text

    def finish(self, vectors: Vectors) -> Vectors:
        """Compute what follows the pooling."""
        return vectors

    @property
    def note(self) -> str:
        """What a user should know of these vectors; empty where there is nothing."""
        return ""


class AnswerHead(Head, Generic[Reading]):
    """A head that answers for each text by itself."""

    @abstractmethod
    def read(self, batch: Batch) -> list[Reading]:
        """Return what the outputs say of each of B texts, or windows of texts."""

    def join(self, readings: Sequence[Reading], windows: Sequence[EncodedText]) -> Reading:
        """Put what was read of the windows of one text together, at least two."""
        self.require_windows()
        raise NotImplementedError

    @abstractmethod
    def answer(self, reading: Reading, context: AnswerContext) -> Answer:
        """Answer for a text of which `reading` was read."""


def span_of(label: str, score: float, text: str, start: int, end: int) -> Span:
    """Make a span of `text` without the spaces at its ends, which are part of some tokenizers' tokens."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return Span(label, score, part.strip(), start, start + len(part.strip()))


def softmax(logits: Floats) -> NDArray[np.float64]:
    """Turn logits into probabilities over the last axis, in float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True).astype(np.float64))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def probabilities_of(logits: Floats, function: Callable[[Floats], Floats]) -> NDArray[np.float64]:
    """Apply softmax, sigmoid, or what else a checkpoint turns its logits into scores by.

    Raises:
        SessionError: the model gave what is not a number.
    """
    probabilities = np.asarray(function(logits), np.float64)
    require_finite(probabilities, "probability")
    return probabilities


def require_finite(values: NDArray[Any], what: str) -> None:
    """Fail rather than sort NaN among scores, where it would look like an answer.

    Raises:
        SessionError: a value is not a finite number.
    """
    if not np.isfinite(values).all():
        raise SessionError(
            f"the model gives a {what} that is not a finite number",
            "a model in fp16 may overflow; try it in fp32, or on another provider",
        )


def largest(scores: Floats, count: int) -> list[int]:
    """Return the positions of the `count` largest scores, best first; of equals the first comes first."""
    if count < len(scores):
        # Sorting only what is kept; a vocabulary has a hundred thousand entries.
        threshold = np.partition(scores, -count)[-count]
        positions = np.flatnonzero(scores >= threshold)
    else:
        positions = np.arange(len(scores))
    order = np.argsort(-scores[positions], kind="stable")[:count]
    return [int(position) for position in positions[order]]
