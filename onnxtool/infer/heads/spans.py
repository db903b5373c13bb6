"""Extractive question answering: locate the answer to a question in a text.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText
from onnxtool.infer.heads.head import Answer, AnswerContext, AnswerHead, Batch, require_finite, softmax, span_of

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
    needs_offsets = True
    takes_pairs = True
    needs_pairs = True
    splits_long_texts = True

    def read(self, batch: Batch) -> list[list[FoundSpan]]:
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
