"""What texts run together, and what a head does with the outputs: put windows together, pool, and answer.

Letters of shapes: B batch, N texts, S sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText, fixed_shape
from onnxtool.checkpoint.pooling_module import Floats, behind_prompts
from onnxtool.errors import InputError, SessionError
from onnxtool.infer.report import Scored, Span
from onnxtool.model_file import ModelFile
from onnxtool.runtime.feeds import is_mask

_MAX_BATCH_SIZE = 32
# Bounds the memory of logits: 256 MB of float32, which is 2200 tokens of BERT's vocabulary.
_MAX_OUTPUT_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Batch:
    """What a model was given at once, and what it gave.

    Attributes:
        texts: B texts.
        ids: int64 [B, S].
        mask: bool [B, S], false on padding.
        outputs: name to array.
    """

    texts: Sequence[EncodedText]
    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    outputs: Mapping[str, NDArray[Any]]

    @property
    def pooled(self) -> NDArray[np.bool_]:
        """True for tokens that are pooled over, bool [B, S]: not for padding, nor for a prompt that is left out."""
        return behind_prompts(self.mask, [text.num_prompt for text in self.texts])

    def output(self, rank: int, *names: str) -> NDArray[Any]:
        """Return the output of `rank` axes with one of `names`, else the first of that rank.

        Raises:
            InputError: there is none.
        """
        found = {name: array for name, array in self.outputs.items() if array.ndim == rank}
        for name in (*names, *found):
            if name in found:
                return found[name]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.outputs.items())
        raise InputError(
            f"the model has no output {' or '.join(names)} of {rank} axes; it has {shapes}",
            "its metadata onnxtool.task, or --task, does not fit its graph; pass another one, or export it again",
        )


@dataclass(frozen=True)
class BatchRules:
    """What a graph takes at once.

    Attributes:
        batch_size: the number of texts that the graph is fixed to; None where it takes any.
        sequence_length: the number of tokens that the graph is fixed to; None where it takes any.
        max_texts: how many texts may run at once.
        max_tokens: how many tokens may run at once, padding included; bounds the memory of the outputs.
        has_mask: whether the graph is told which tokens are padding.
    """

    batch_size: int | None
    sequence_length: int | None
    max_texts: int
    max_tokens: int
    has_mask: bool

    @classmethod
    def of(cls, model: ModelFile) -> BatchRules:
        """Read them from the graph of `model`."""
        batch_size, sequence_length = fixed_shape(model)
        names = {info.name for info in model.structure.outputs}
        # Anserini's outputs have no batch axis.
        max_texts = batch_size or (1 if "output_idx" in names else _MAX_BATCH_SIZE)
        widths = [info.shape[2] for info in model.structure.outputs if len(info.shape) == 3]
        widest = max((width for width in widths if isinstance(width, int)), default=1)
        has_mask = any(is_mask(info) for info in model.structure.inputs)
        max_tokens = max(1, _MAX_OUTPUT_ELEMENTS // max(1, widest))
        return cls(batch_size, sequence_length, max_texts, max_tokens, has_mask)

    @property
    def may_pad(self) -> bool:
        """Whether texts of different lengths may run together: padding is masked, or the same for all."""
        return self.has_mask or self.sequence_length is not None

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of texts that run together, the shortest first; of equal length unless padding is allowed.

        Args:
            lengths: how many tokens each text has.
        """
        batch: list[int] = []
        for position in sorted(range(len(lengths)), key=lambda position: lengths[position]):
            # The text about to be added is the longest so far, and the others will be padded to it.
            is_full = len(batch) == self.max_texts or (len(batch) + 1) * lengths[position] > self.max_tokens
            if batch and (is_full or (not self.may_pad and lengths[position] != lengths[batch[0]])):
                yield batch
                batch = []
            batch.append(position)
        if batch:
            yield batch


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
