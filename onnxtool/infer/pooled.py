"""One vector for each text of a batch: sparse weights of terms, or an embedding.

Letters of shapes: B batch, S sequence, H hidden size, V vocabulary, N terms of one text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError, SessionError
from onnxtool.infer.batches import Batch
from onnxtool.infer.pooling import Floats, normalize, pool, pooling_modes, splade_weights
from onnxtool.infer.vectors import DenseVectors, SparseVectors
from onnxtool.texts.checkpoint_folder import CheckpointFolder
from onnxtool.texts.tokenizer import TextTokenizer

# Modules of a sentence-transformers checkpoint that are computed here when the graph ends before them.
_COMPUTED_MODULES = ("Transformer", "Pooling", "Normalize", "Dropout")


def sparse_vectors(batch: Batch, folder: CheckpointFolder, tokenizer: TextTokenizer) -> SparseVectors:
    """Return the weights of the terms of B texts, from logits or from weights that the graph has pooled.

    Raises:
        SessionError: a weight is not a finite number.
    """
    weights = _term_weights(batch, folder)
    require_finite(weights, "weight of a term")
    vocabulary = tokenizer.vocabulary
    # A model may have more rows than its tokenizer has tokens: vocabularies are padded to multiples of 64.
    unknown = tuple(tokenizer.token(token_id) for token_id in range(len(vocabulary), weights.shape[1]))
    return SparseVectors.from_dense(weights, vocabulary + unknown if unknown else vocabulary)


def _term_weights(batch: Batch, folder: CheckpointFolder) -> Floats:
    """Return float32 [B, V]."""
    outputs = batch.outputs
    if {"output_idx", "output_weights"} <= set(outputs):  # Anserini's contract: the terms of one text, int64 [N]
        terms = outputs["output_idx"]
        weights = np.zeros((1, int(terms.max(initial=0)) + 1), np.float32)
        weights[0, terms] = outputs["output_weights"]
        return weights
    if any(array.ndim == 3 for array in outputs.values()) and "sparse" not in outputs:
        config = folder.module_config("SpladePooling") or {}
        return splade_weights(
            batch.output(3, "logits"),
            batch.mask,
            strategy=str(config.get("pooling_strategy", "max")),
            activation=str(config.get("activation_function", "relu")),
        )
    return batch.output(2, "sparse").astype(np.float32)


def dense_vectors(batch: Batch, folder: CheckpointFolder) -> tuple[DenseVectors, str]:
    """Return float32 [B, H], and what a user should know of them: the graph's own vectors, or states pooled here.

    Raises:
        InputError: the checkpoint computes embeddings with what is not computed here.
        SessionError: a value is not a finite number.
    """
    note = ""
    if "sentence_embedding" in batch.outputs:
        vectors = batch.output(2, "sentence_embedding").astype(np.float32)
    else:
        _require_computable(folder)
        config = folder.module_config("Pooling")
        if config is None:
            note = "the checkpoint does not say how to pool; these are means over the tokens"
        states = batch.output(3, "last_hidden_state", "token_embeddings")
        vectors = pool(states, batch.mask, pooling_modes(config or {}))
        if any(kind == "Normalize" for kind, _ in folder.modules):
            vectors = normalize(vectors)
    require_finite(vectors, "embedding")
    return np.asarray(vectors, np.float32), note


def require_finite(values: NDArray[Any], what: str) -> None:
    """Fail rather than sort NaN among scores, where it would look like an answer."""
    if not np.isfinite(values).all():
        raise SessionError(
            f"the model gives a {what} that is not a finite number",
            "a model in fp16 may overflow; try it in fp32, or on another provider",
        )


def _require_computable(folder: CheckpointFolder) -> None:
    missing = sorted({kind for kind, _ in folder.modules} - set(_COMPUTED_MODULES))
    if missing:
        raise InputError(
            f"the checkpoint computes embeddings with {', '.join(missing)}, which this graph does not",
            f"use sentence-transformers for this checkpoint; onnxtool computes {', '.join(_COMPUTED_MODULES)} so far",
        )
