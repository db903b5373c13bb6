"""Masked language models: candidates for each mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import Answer, AnswerContext, AnswerHead, Batch, largest, probabilities_of, softmax
from onnxtool.infer.report import Scored

_TOP_K = 10
EXPORT_SPLADE = "export the checkpoint again with --head splade if it is a SPLADE"


@dataclass(frozen=True)
class Masks(AnswerHead[NDArray[np.float64]]):
    """The most probable tokens for every mask in a text; a reading is float64 [masks, V].

    Attributes:
        mask_id: the mask token.
        may_be_splade: whether no file states the model's task.
    """

    kind = "tokens"
    has_candidates = True

    tokenizer: TextTokenizer
    mask_id: int
    may_be_splade: bool = False

    @classmethod
    def of(cls, folder: CheckpointFolder, tokenizer: TextTokenizer) -> Masks:
        """Find the mask of `tokenizer`.

        Raises:
            InputError: it has none.
        """
        mask_id = None if tokenizer.mask_token is None else tokenizer.id_of(tokenizer.mask_token)
        if mask_id is None:
            raise InputError("this model fills in masks, and its tokenizer has no mask token", "pass --model_name")
        return cls(tokenizer, mask_id, not folder.sentence_modules.modules)

    def read_outputs(self, batch: Batch) -> list[NDArray[np.float64]]:
        """Return the probabilities at every mask, in text order."""
        logits = batch.output(3, "logits")
        return [
            probabilities_of(row[(ids == self.mask_id) & valid], softmax)
            for row, ids, valid in zip(logits, batch.ids, batch.mask, strict=True)
        ]

    def answer(self, reading: NDArray[np.float64], context: AnswerContext) -> Answer:
        """Answer with the candidates of all masks in one list."""
        if not len(reading):
            token = self.tokenizer.mask_token
            note = f"a text without {token} has nothing to fill in; write {token} for a word"
            return Answer(note=f"{note}, or {EXPORT_SPLADE}" if self.may_be_splade else note)
        candidates: list[Scored] = []
        for number, probabilities in enumerate(reading, start=1):
            # Several masks share one list; the number identifies a candidate's mask.
            prefix = f"{number}: " if len(reading) > 1 else ""
            candidates += [
                Scored(f"{prefix}{self.tokenizer.word(position)}", float(probabilities[position]))
                for position in largest(probabilities, context.top_k or _TOP_K)
            ]
        return Answer(tuple(candidates))


@dataclass(frozen=True)
class NextTokens(AnswerHead[NDArray[np.float64]]):
    """The most probable next tokens of a causal language model; a reading is float64 [V]."""

    kind = "tokens"
    has_candidates = True
    cut_side = "left"  # what follows depends on the end

    tokenizer: TextTokenizer

    def read_outputs(self, batch: Batch) -> list[NDArray[np.float64]]:
        """Return the probabilities at the last token of each text."""
        logits = batch.output(3, "logits")
        last = batch.mask.shape[1] - 1 - batch.mask[:, ::-1].argmax(axis=1)
        return list(probabilities_of(logits[np.arange(len(logits)), last], softmax))

    def answer(self, reading: NDArray[np.float64], context: AnswerContext) -> Answer:
        """Answer with the candidates for one token."""
        best = largest(reading, context.top_k or _TOP_K)
        note = "these are candidates for the next token; no text is generated"
        return Answer(
            tuple(Scored(self.tokenizer.word(position), float(reading[position])) for position in best), note=note
        )
