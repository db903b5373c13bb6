"""Batching of texts, and the interface of heads: combine windows, pool, and answer.

Shape letters: B batch, N texts, S sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText, batch_shapes, fixed_shape
from onnxtool.checkpoint.module_forms import Floats, behind_prompts
from onnxtool.checkpoint.pooling_modules import normalize
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.quantized_vectors import RangesLike, VectorType, given_ranges
from onnxtool.errors import InputError, SessionError
from onnxtool.infer.report import Scored, Span
from onnxtool.infer.vectors import DenseVectors, SparseVectors, TokenVectors
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import NO_PADDING, PADDING_KEY
from onnxtool.reports import short_repr
from onnxtool.runtime.signature import is_mask

_MAX_BATCH_SIZE = 32
# Bounds the memory of logits: 256 MB of float32, which is 2200 tokens of BERT's vocabulary.
_MAX_OUTPUT_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Batch:
    """A batch of inputs with its outputs.

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
        """True for pooled tokens, bool [B, S]: false for padding and for excluded prompts."""
        return behind_prompts(self.mask, [text.num_prompt for text in self.texts])

    def output(self, rank: int, *names: str) -> NDArray[Any]:
        """Return the output of rank `rank` with one of `names`, else the first of that rank.

        Raises:
            InputError: there is none.
        """
        of_rank = {name: array for name, array in self.outputs.items() if array.ndim == rank}
        for name in (*names, *of_rank):
            if name in of_rank:
                return of_rank[name]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.outputs.items())
        raise InputError(
            f"the model has no output {' or '.join(names)} of {rank} axes; it has {shapes}",
            "its metadata onnxtool.task, or --task, does not fit its graph; pass another one, or export it again",
        )


@short_repr
@dataclass(frozen=True)
class BatchRules:
    """Batching rules of a graph.

    Attributes:
        batch_size: the graph's fixed number of texts; None if dynamic.
        sequence_length: the graph's fixed number of tokens; None if dynamic.
        max_texts: the maximum number of texts per batch.
        max_tokens: the maximum number of tokens per batch, including padding; bounds the memory of the outputs.
        has_mask: whether the graph has a mask input, and padding under it does not change the outputs for a text.
        shapes: the texts and tokens of each possible batch; empty for any.
    """

    batch_size: int | None
    sequence_length: int | None
    max_texts: int
    max_tokens: int
    has_mask: bool
    shapes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, model: ModelFile) -> BatchRules:
        """Read the rules from the graph of `model`, and its files of fixed sizes."""
        batch_size, sequence_length = fixed_shape(model)
        names = {info.name for info in model.structure.outputs}
        # Anserini's outputs have no batch axis.
        max_texts = batch_size or (1 if "output_idx" in names else _MAX_BATCH_SIZE)
        widths = [info.shape[2] for info in model.structure.outputs if len(info.shape) == 3]
        widest = max((width for width in widths if isinstance(width, int)), default=1)
        has_mask = model.text_input is not None or any(is_mask(info) for info in model.structure.inputs)
        has_mask &= model.metadata.get(PADDING_KEY) != NO_PADDING
        max_tokens = max(1, _MAX_OUTPUT_ELEMENTS // max(1, widest))
        shapes = batch_shapes(model)
        max_texts = max((texts for texts, _ in shapes), default=max_texts)
        return cls(batch_size, sequence_length, max_texts, max_tokens, has_mask, shapes)

    @property
    def may_pad(self) -> bool:
        """Whether texts of different lengths may run together: padding is masked, or the same for all."""
        return self.has_mask or self.sequence_length is not None

    def padded(self, texts: int, tokens: int) -> tuple[int, int | None]:
        """Return the shape to which a batch of so many texts is filled up; None for the tokens of its longest text."""
        large = [shape for shape in self.shapes if shape[0] >= texts and shape[1] >= tokens]
        if large:
            return min(large, key=prod)
        return self.batch_size or texts, self.sequence_length

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of texts for each batch, shortest first; of equal length unless padding is allowed.

        Args:
            lengths: the number of tokens of each text.
        """
        if self.shapes:
            from onnxtool.runtime.sizes import best_batches

            yield from best_batches(lengths, self.shapes)
            return
        batch: list[int] = []
        for position in sorted(range(len(lengths)), key=lambda position: lengths[position]):
            # The next text is the longest so far, and the others will be padded to it.
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
    """The input of an answer.

    Attributes:
        text: the text; the second text of a pair.
        windows: the windows read by the model; one if the text was not split.
        top_k: the maximum number of candidates; None for the head's default.
    """

    text: str
    windows: Sequence[EncodedText]
    top_k: int | None


@dataclass(frozen=True)
class Answer:
    """A model's answer for one text.

    Attributes:
        note: a note for the user about this answer, or an empty string.
        token_vectors: float32 [T, W], vectors of the text's tokens; empty for other kinds of answers.
    """

    candidates: tuple[Scored, ...] = ()
    spans: tuple[Span, ...] = ()
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    note: str = ""
    token_vectors: Sequence[NDArray[np.float32]] | NDArray[np.float32] = ()


class Head(ABC):
    """Interpretation of a model's outputs.

    Attributes:
        kind: the kind of answers, as in InferReport.
        needs_offsets: whether answers need token positions in the text.
        takes_pairs: whether the model accepts pairs of texts.
        needs_pairs: whether a single text is not enough.
        splits_long_texts: whether long texts are split into windows by default.
        has_candidates: whether an answer lists the best of several candidates, as many as `top_k` says.
        cut_side: the truncation side; None for the tokenizer's setting.
        normalizes: whether vectors have length one.
    """

    kind: ClassVar[str]
    normalizes: bool = False
    needs_offsets: ClassVar[bool] = False
    takes_pairs: ClassVar[bool] = False
    needs_pairs: ClassVar[bool] = False
    splits_long_texts: ClassVar[bool] = False
    has_candidates: ClassVar[bool] = False
    cut_side: ClassVar[str | None] = None

    @property
    def includes_prompt(self) -> bool:
        """Whether prompt tokens are pooled like the text's tokens."""
        return True

    @property
    def pools_in_graph(self) -> bool:
        """Whether the graph contains the pooling."""
        return False

    def require_windows(self) -> None:
        """Refuse to split a text into windows whose results cannot be combined.

        Raises:
            InputError: they cannot be combined.
        """
        raise InputError(
            f"what the model says of the windows of a text does not make {self.kind} of the whole",
            "cut the text (--long truncate), or split it yourself into texts that make sense alone",
        )


@dataclass(frozen=True)
class VectorForm:
    """Post-processing of vectors.

    Attributes:
        dimensions: number of leading dimensions to keep; None for all.
        normalizes: whether the truncated vectors are scaled to length 1 again.
        stored: the storage type; None for no change.
        pruning: the rule that makes sparse vectors or those of tokens smaller; None for none.
    """

    dimensions: int | None = None
    normalizes: bool = False
    stored: VectorType | None = None
    pruning: str | None = None

    @classmethod
    def of(
        cls,
        head: Head,
        *,
        vectors_as: str | None,
        ranges: RangesLike | None,
        dimensions: int | None,
        pruning: str | None = None,
    ) -> VectorForm:
        """Check the requested post-processing against a model's vectors.

        Args:
            head: the model's head.
            vectors_as: one of VECTOR_TYPES; None for the model's own type.
            ranges: ranges of int8 and uint8: float32 [2, W], or a file for `read_ranges`.
            dimensions: number of dimensions to keep; None for all.
            pruning: as in `pruning_for`.

        Raises:
            InputError: the model returns no such vectors, or ranges are missing, superfluous or malformed.
        """
        if ranges is not None and vectors_as is None:
            raise InputError("ranges were passed, and vectors stay as they are", "pass vectors_as int8 or uint8")
        if vectors_as is None and dimensions is None:
            return cls(pruning=pruning)
        if head.kind == "terms":
            raise InputError(
                "the model gives term weights, but --vectors_as and --dimensions are for embeddings",
                "leave them out; --weights int stores the weights of a corpus as whole numbers",
            )
        stored = None
        if vectors_as is not None:
            stored = VectorType.of(vectors_as, None if ranges is None else given_ranges(ranges))
        return cls(dimensions, head.normalizes, stored, pruning)

    def apply(self, vectors: Any) -> Any:
        """Prune, truncate and quantize vectors of texts or tokens.

        Raises:
            InputError: they have fewer dimensions than requested, or do not fit the ranges or whole bytes.
        """
        if self.pruning is not None:
            vectors = vectors.pruned(self.pruning)
        if self.dimensions is None and self.stored is None:
            return vectors
        if isinstance(vectors, TokenVectors):
            if self.dimensions is not None:
                raise InputError(
                    "--dimensions keeps a part of an embedding, and texts have one for each token", "leave it out"
                )
            return replace(vectors, vectors=self._apply(vectors.vectors))
        assert not isinstance(vectors, SparseVectors)  # noqa: S101  refused by `of`
        return self._apply(vectors)

    def _apply(self, vectors: DenseVectors) -> NDArray[Any]:
        if self.dimensions is not None:
            if vectors.shape[1] <= self.dimensions:
                raise InputError(
                    f"--dimensions {self.dimensions} was passed, but the vectors of this model have {vectors.shape[1]}",
                    "pass a smaller number, or leave --dimensions out",
                )
            vectors = vectors[:, : self.dimensions]
            if self.normalizes:
                vectors = np.asarray(normalize(vectors), np.float32)
        return vectors if self.stored is None else self.stored.apply(vectors)


class VectorHead(Head, Generic[Vectors]):
    """A head that returns one vector per text.

    Attributes:
        pruning: the rule by which the graph itself leaves out terms; None if it gives all.
    """

    pruning: Pruning | None = None

    def pruning_for(self, rule: str | None, task: str | None) -> str | None:
        """Check the rule, `RULE:NUMBER`, that makes vectors of texts of a task smaller; None for none.

        Raises:
            InputError: it is malformed, for another kind of vectors or texts, or the graph itself leaves out terms.
        """
        if rule is None:
            return None
        Pruning.of_kind(rule, self.kind, task)
        if self.pruning is not None:
            raise InputError(
                f"--prune {rule} was passed, and the graph itself is {self.pruning.name}",
                "leave it out, or use the file that was made without --prune",
            )
        return rule

    @abstractmethod
    def pool(self, batch: Batch) -> Vectors:
        """Return the pooled vectors of B texts, or of windows of texts."""

    @abstractmethod
    def join(self, vectors: Vectors, windows: Sequence[Sequence[EncodedText]]) -> Vectors:
        """Combine the windows of N texts; `vectors` is grouped by text."""

    def prepare(self, text: EncodedText, task: str | None) -> EncodedText:
        """Return a text as it is run for a task, `query` or `document`; None for neither."""
        return text

    def finish(self, vectors: Vectors) -> Vectors:
        """Apply the modules after pooling."""
        return vectors

    @property
    def note(self) -> str:
        """A note for the user about these vectors; may be empty."""
        return ""


class AnswerHead(Head, Generic[Reading]):
    """A head that answers each text independently."""

    @abstractmethod
    def read_outputs(self, batch: Batch) -> list[Reading]:
        """Extract a reading for each of B texts, or windows of texts, from the outputs."""

    def join(self, readings: Sequence[Reading], windows: Sequence[EncodedText]) -> Reading:
        """Combine the readings of one text's windows, at least two."""
        self.require_windows()
        raise NotImplementedError

    @abstractmethod
    def answer(self, reading: Reading, context: AnswerContext) -> Answer:
        """Answer a text from its `reading`."""


def span_of(label: str, score: float, text: str, start: int, end: int) -> Span:
    """Make a span of `text` without leading and trailing spaces, which some tokenizers include in tokens."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return Span(label, score, part.strip(), start, start + len(part.strip()))


def softmax(logits: Floats) -> NDArray[np.float64]:
    """Turn logits into probabilities over the last axis, in float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True).astype(np.float64))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def probabilities_of(logits: Floats, function: Callable[[Floats], Floats]) -> NDArray[np.float64]:
    """Apply softmax, sigmoid, or the checkpoint's own activation to logits.

    Raises:
        SessionError: the model returned NaN.
    """
    probabilities = np.asarray(function(logits), np.float64)
    require_finite(probabilities, "probability")
    return probabilities


def require_finite(values: NDArray[Any], label: str) -> None:
    """Fail rather than sort NaN among the scores, where it would look like an answer.

    Raises:
        SessionError: a value is not a finite number.
    """
    if not np.isfinite(values).all():
        raise SessionError(
            f"the model gives a {label} that is not a finite number",
            "a model in fp16 may overflow; try it in fp32, or on another provider",
        )


def largest(scores: Floats, count: int) -> list[int]:
    """Return the positions of the `count` largest scores, best first; ties keep their order."""
    if count < len(scores):
        # Sort only the kept scores; a vocabulary has a hundred thousand entries.
        threshold = np.partition(scores, -count)[-count]
        positions = np.flatnonzero(scores >= threshold)
    else:
        positions = np.arange(len(scores))
    order = np.argsort(-scores[positions], kind="stable")[:count]
    return [int(position) for position in positions[order]]
