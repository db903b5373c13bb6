"""Sparse encoders: a weight for each term of the vocabulary.

Letters of shapes: B batch, S sequence, V vocabulary, N texts, T terms of all texts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxtool.checkpoint.cutting import EncodedText
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.errors import InputError
from onnxtool.infer.batches import Batch
from onnxtool.infer.heads.head import VectorHead, require_finite
from onnxtool.infer.pooling import Floats, splade_weights
from onnxtool.infer.vectors import SparseVectors

_ANSERINI = frozenset({"output_idx", "output_weights"})


@dataclass(frozen=True)
class Terms(VectorHead[SparseVectors]):
    """Weights from logits, or those that the graph has pooled.

    Attributes:
        strategy: how a term is pooled over the tokens, `max` or `sum`.
        activation: `relu` or `log1p_relu`.
    """

    kind = "terms"

    tokenizer: TextTokenizer
    strategy: str = "max"
    activation: str = "relu"

    def pool(self, batch: Batch) -> SparseVectors:
        """Return the weights of the terms of B texts.

        Raises:
            SessionError: a weight is not a finite number.
        """
        weights = self._weights(batch)
        require_finite(weights, "weight of a term")
        vocabulary = self.tokenizer.vocabulary
        # A model may have more rows than its tokenizer has tokens: vocabularies are padded to multiples of 64.
        unknown = tuple(self.tokenizer.token(token_id) for token_id in range(len(vocabulary), weights.shape[1]))
        return SparseVectors.from_dense(weights, vocabulary + unknown if unknown else vocabulary)

    def _weights(self, batch: Batch) -> Floats:
        """Return float32 [B, V]."""
        outputs = batch.outputs
        if set(outputs) >= _ANSERINI:  # the terms of one text, int64 [T]
            terms = outputs["output_idx"]
            weights = np.zeros((1, int(terms.max(initial=0)) + 1), np.float32)
            weights[0, terms] = outputs["output_weights"]
            return weights
        if any(array.ndim == 3 for array in outputs.values()) and "sparse" not in outputs:
            logits = batch.output(3, "logits")
            return splade_weights(logits, batch.pooled, strategy=self.strategy, activation=self.activation)
        return batch.output(2, "sparse").astype(np.float32)

    def require_windows(self) -> None:
        """Allow them for the largest weight over the tokens, which is the largest over windows of them as well."""
        if self.strategy != "max":
            raise InputError(
                "this sparse encoder sums over the tokens, and what windows share would count twice",
                "cut long texts (--long truncate)",
            )

    def join(self, vectors: SparseVectors, windows: Sequence[Sequence[EncodedText]]) -> SparseVectors:
        """Take the largest weight of each term over the windows of a text."""
        texts = np.repeat(np.arange(len(windows)), [len(group) for group in windows])
        rows = np.repeat(texts, np.diff(vectors.indptr))
        order = np.lexsort((vectors.indices, rows))
        rows, indices, weights = rows[order], vectors.indices[order], vectors.weights[order]
        starts = np.flatnonzero(np.diff(rows, prepend=-1) | np.diff(indices, prepend=-1))
        largest = np.maximum.reduceat(weights, starts) if len(starts) else weights
        indptr = np.searchsorted(rows[starts], np.arange(len(windows) + 1)).astype(np.int64)
        return SparseVectors(indptr, indices[starts], largest, vectors.vocabulary)
