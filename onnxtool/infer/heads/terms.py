"""Sparse encoders: a weight for each term of the vocabulary.

Shape letters: B batch, S sequence, V vocabulary, N texts, T terms of all texts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.limits import EncodedText
from onnxtool.checkpoint.module_forms import Floats, PoolingModule
from onnxtool.checkpoint.pooling_modules import read_pooling_modules
from onnxtool.checkpoint.pruning import Pruning
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.token_modules import TOKEN_WEIGHTS
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.heads.head import Batch, VectorHead, require_finite
from onnxtool.infer.vectors import SparseVectors

_ANSERINI = frozenset({"output_idx", "output_weights"})


class SparseHead(VectorHead[SparseVectors]):
    """Weights of terms."""

    kind = "terms"
    has_candidates = True

    @property
    def note(self) -> str:
        """Say that the graph leaves out terms."""
        return "" if self.pruning is None else f"the terms that the graph gives are {self.pruning.name}"

    def join(self, vectors: SparseVectors, windows: Sequence[Sequence[EncodedText]]) -> SparseVectors:
        """Take the largest weight of each term over the windows of a text."""
        texts = np.repeat(np.arange(len(windows)), [len(group) for group in windows])
        rows = np.repeat(texts, np.diff(vectors.indptr))
        return SparseVectors.of_entries(rows, vectors.indices, vectors.weights, len(windows), vectors.vocabulary)


@dataclass(frozen=True)
class Terms(SparseHead):
    """Weights from logits, or weights pooled by the graph.

    Attributes:
        pooling: the pooling of logits over tokens, here or in the graph.
        after: modules after pooling; empty if the graph contains them.
    """

    tokenizer: TextTokenizer
    pooling: SpladePooling
    after: tuple[PoolingModule, ...] = ()
    pruning: Pruning | None = None

    @classmethod
    def of(
        cls, folder: CheckpointFolder, tokenizer: TextTokenizer, *, in_graph: bool, pruning: Pruning | None = None
    ) -> Terms:
        """Read the pooling of logits from the checkpoint; the default is SPLADE v2.

        Raises:
            InputError: the graph does not contain it, and it is not supported here.
        """
        stored = folder.sentence_modules.first_of("SpladePooling")
        if stored is None:
            return cls(tokenizer, SpladePooling(), pruning=pruning)
        after = () if in_graph else read_pooling_modules(folder.sentence_modules, SpladePooling)[1:]
        return cls(tokenizer, SpladePooling.read(stored), after, pruning)

    def pool(self, batch: Batch) -> SparseVectors:
        """Return the weights of the terms of B texts.

        Raises:
            SessionError: a weight is not a finite number.
        """
        weights = self._weights(batch)
        require_finite(weights, "weight of a term")
        return SparseVectors.from_dense(weights, self.tokenizer.vocabulary_of(weights.shape[1]))

    def _weights(self, batch: Batch) -> Floats:
        """Return float32 [B, V]."""
        outputs = batch.outputs
        if set(outputs) >= _ANSERINI:  # the terms of one text, int64 [T]
            terms = outputs["output_idx"]
            weights = np.zeros((1, int(terms.max(initial=0)) + 1), np.float32)
            weights[0, terms] = outputs["output_weights"]
            return weights
        if any(array.ndim == 3 for array in outputs.values()) and "sparse" not in outputs:
            from onnxtool.runtime.computed_modules import compute

            return compute((self.pooling,), batch.output(3, "logits"), batch.pooled)
        return batch.output(2, "sparse").astype(np.float32)

    def require_windows(self) -> None:
        """Allow windows for the maximum over tokens, which is also the maximum over windows."""
        if self.pooling.strategy != "max":
            raise InputError(
                "this sparse encoder sums over the tokens, and what windows share would count twice",
                "cut long texts (--long truncate)",
            )

    def finish(self, vectors: SparseVectors) -> SparseVectors:
        """Apply the modules after pooling."""
        if not self.after:
            return vectors
        from onnxtool.runtime.computed_modules import compute

        return SparseVectors.from_dense(compute(self.after, vectors.to_dense()), vectors.vocabulary)


@dataclass(frozen=True)
class LexicalTerms(SparseHead):
    """Token weights from the graph, as in M3 embedders: a term weighs as much as its heaviest token.

    Attributes:
        left_out: tokens that are never terms: framing tokens and the unknown token, as in FlagEmbedding.
    """

    tokenizer: TextTokenizer
    left_out: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> LexicalTerms:
        """Read the tokens that are not terms from the tokenizer."""
        return cls(tokenizer, tuple(tokenizer.framing_ids | tokenizer.unknown_ids))

    def pool(self, batch: Batch) -> SparseVectors:
        """Return the weights of the terms of B texts.

        Raises:
            SessionError: a weight is not a finite number.
        """
        weights = batch.output(2, TOKEN_WEIGHTS).astype(np.float32)
        require_finite(weights, "weight of a token")
        rows, places = np.nonzero(batch.mask & (weights > 0) & ~np.isin(batch.ids, self.left_out))
        ids = batch.ids[rows, places].astype(np.int32)
        return SparseVectors.of_entries(rows, ids, weights[rows, places], len(batch.texts), self.tokenizer.vocabulary)

    def require_windows(self) -> None:
        """Allow windows: the maximum over windows is the maximum over their tokens."""
