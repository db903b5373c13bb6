"""Spans of a text: words with labels, entities marked by B- and I- labels, and answers to a question.

Shape letters: B batch, S sequence, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText
from onnxtool.infer.heads.head import (
    Answer,
    AnswerContext,
    AnswerHead,
    Batch,
    probabilities_of,
    require_finite,
    softmax,
    span_of,
)
from onnxtool.infer.heads.labels import LabelNames
from onnxtool.infer.report import Span

# Label prefixes that begin an entity, and prefixes that continue it, in the schemes BIO, BIOES and BILOU.
_BEGINNINGS, _CONTINUATIONS = frozenset("BSU"), frozenset("IEL")
_OUTSIDE = "O"


@dataclass(frozen=True)
class TaggedToken:
    """A token of a text.

    Attributes:
        word: the index of its word.
        span: its start and end (exclusive), in characters.
        label: the most probable label.
    """

    word: int
    span: tuple[int, int]
    label: int
    score: float


@dataclass(frozen=True)
class Entities(AnswerHead[list[TaggedToken]]):
    """Labelled spans of a text.

    A word takes the label of its first token, like transformers' aggregation strategy `first`. Neighbouring words of
    one entity are merged if labels mark its beginning; their score is the mean over words.
    """

    kind = "spans"
    needs_offsets = True

    names: LabelNames

    @property
    def _marks_entities(self) -> bool:
        return any(_prefix(name) or name == _OUTSIDE for name in self.names.names.values())

    def read_outputs(self, batch: Batch) -> list[list[TaggedToken]]:
        """Return the label of each token, without tokens added by the tokenizer."""
        readings = []
        for row, valid, text in zip(batch.output(3, "logits"), batch.mask, batch.texts, strict=True):
            probabilities = probabilities_of(row[valid], softmax)
            readings.append(list(_tagged(probabilities, text)))
        return readings

    def require_windows(self) -> None:
        """Allow windows: each token takes its label from the window in which it is farthest from the ends."""

    def join(self, readings: Sequence[list[TaggedToken]], windows: Sequence[EncodedText]) -> list[TaggedToken]:
        """Take each token from the window in which the shorter side of its context is longest."""
        best: dict[int, tuple[int, TaggedToken]] = {}
        for reading, window in zip(readings, windows, strict=True):
            first = window.offsets.first if window.offsets else 0
            for position, token in enumerate(reading):
                context = min(position, len(reading) - 1 - position)
                if first + position not in best or context > best[first + position][0]:
                    best[first + position] = (context, token)
        return [best[position][1] for position in sorted(best)]

    def answer(self, reading: list[TaggedToken], context: AnswerContext) -> Answer:
        """Answer with entities, or with all words if labels mark none, in text order."""
        words = _words(reading)
        if not self._marks_entities:
            return Answer(spans=tuple(self._span([word], context.text) for word in words))
        groups: list[list[list[TaggedToken]]] = []
        for word in words:
            name = self.names[word[0].label]
            if name == _OUTSIDE:
                groups.append([])
            elif groups and groups[-1] and self._goes_on(name, self.names[groups[-1][-1][0].label]):
                groups[-1].append(word)
            else:
                groups.append([word])
        return Answer(spans=tuple(self._span(group, context.text) for group in groups if group))

    @staticmethod
    def _goes_on(name: str, before: str) -> bool:
        return _prefix(name) not in _BEGINNINGS and _entity(name) == _entity(before)

    def _span(self, words: Sequence[Sequence[TaggedToken]], text: str) -> Span:
        start, end = words[0][0].span[0], words[-1][-1].span[1]
        score = float(np.mean([word[0].score for word in words]))
        name = self.names[words[0][0].label]
        return span_of(_entity(name), score, text, start, end)


def _tagged(probabilities: NDArray[np.float64], text: EncodedText) -> Iterator[TaggedToken]:
    offsets = text.offsets
    if offsets is None:
        return
    best, scores = probabilities.argmax(axis=1), probabilities.max(axis=1)
    for position, part in enumerate(offsets.parts):
        if part >= 0:
            yield TaggedToken(
                offsets.words[position], offsets.spans[position], int(best[position]), float(scores[position])
            )


def _words(tokens: Sequence[TaggedToken]) -> list[list[TaggedToken]]:
    words: list[list[TaggedToken]] = []
    for token in tokens:
        if words and words[-1][-1].word == token.word >= 0:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _prefix(name: str) -> str:
    """Return the letter of a label such as `B-PER`, or an empty string."""
    letter, dash, _ = name.partition("-")
    return letter if dash and letter in _BEGINNINGS | _CONTINUATIONS else ""


def _entity(name: str) -> str:
    return name.partition("-")[2] if _prefix(name) else name


START, END = "start_logits", "end_logits"
_TOP_K = 3
_KEPT = 64  # spans of a window: more than anybody asks for
_MAX_TOKENS = 15  # of an answer, as in transformers' pipeline


@dataclass(frozen=True)
class FoundSpan:
    """A span of characters, and its score."""

    start: int
    end: int
    score: float


@dataclass(frozen=True)
class AnswerSpans(AnswerHead[list[FoundSpan]]):
    """The best answer spans of a text, by the rules of transformers' question-answering pipeline.

    Start and end are each a softmax over the tokens of the text and the first token, which stands for no answer. A span
    of at most 15 tokens scores the product of both. Spans are widened to whole words, and identical spans are summed.
    """

    kind = "spans"
    has_candidates = True
    needs_offsets = True
    takes_pairs = True
    needs_pairs = True
    splits_long_texts = True

    def read_outputs(self, batch: Batch) -> list[list[FoundSpan]]:
        """Return the best spans of each text, best first; none if it has no tokens."""
        starts, ends = batch.output(2, START), batch.outputs[END]
        return [
            _found(start[valid], end[valid], text)
            for start, end, valid, text in zip(starts, ends, batch.mask, batch.texts, strict=True)
        ]

    def require_windows(self) -> None:
        """Allow windows: an answer lies in one of them."""

    def join(self, readings: Sequence[list[FoundSpan]], windows: Sequence[EncodedText]) -> list[FoundSpan]:
        """Merge the spans of all windows, keeping the higher score of a span found in two."""
        best: dict[tuple[int, int], FoundSpan] = {}
        for span in (span for reading in readings for span in reading):
            position = (span.start, span.end)
            if position not in best or span.score > best[position].score:
                best[position] = span
        return sorted(best.values(), key=lambda span: -span.score)

    def answer(self, reading: list[FoundSpan], context: AnswerContext) -> Answer:
        """Answer with the best spans."""
        spans = self.join([reading], context.windows)[: context.top_k or _TOP_K]
        return Answer(spans=tuple(span_of("answer", span.score, context.text, span.start, span.end) for span in spans))


def _found(start: NDArray[np.float32], end: NDArray[np.float32], text: EncodedText) -> list[FoundSpan]:
    offsets = text.offsets
    if offsets is None:
        return []
    of_text = np.array([part == 1 for part in offsets.parts])
    candidates = of_text.copy()
    if text.is_special[0]:
        candidates[0] = True  # takes its share of the probability, but is not an answer
    if not of_text.any():
        return []
    begins, stops = (np.where(of_text, _probabilities(logits, candidates), 0.0) for logits in (start, end))
    scores = np.tril(np.triu(np.outer(begins, stops)), _MAX_TOKENS - 1)
    numbers = np.array(offsets.words)
    words = np.unique(numbers[of_text])
    belongs = (numbers[:, None] == words) & of_text[:, None]
    by_words = belongs.T @ scores @ belongs  # [words, words]: spans from one word to another
    first, last = belongs.argmax(axis=0), len(numbers) - 1 - belongs[::-1].argmax(axis=0)
    kept = np.argsort(-by_words, axis=None, kind="stable")[:_KEPT]
    return [
        FoundSpan(offsets.spans[first[row]][0], offsets.spans[last[column]][1], float(by_words[row, column]))
        for row, column in zip(*np.unravel_index(kept, by_words.shape), strict=True)
        if by_words[row, column] > 0
    ]


def _probabilities(logits: NDArray[np.float32], candidates: NDArray[np.bool_]) -> NDArray[np.float64]:
    require_finite(logits, "logit of a start or end")
    return softmax(np.where(candidates, logits, -np.inf))
