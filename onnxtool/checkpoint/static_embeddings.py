"""Queries of inference-free sparse encoders: each token that a query has weighs what a table says, without a model.

Geng et al., 2024, arXiv:2411.04403; SparseStaticEmbedding of sentence-transformers 6.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.sentence_modules import StoredModule

_KEYS = frozenset(("frozen",))
# What makes tokens of a text in a tokenizer.json; the rest is how long texts are and how batches are padded.
_TOKENIZATION = ("added_tokens", "normalizer", "pre_tokenizer", "model")
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True, eq=False)
class SparseStaticEmbedding:
    """The table.

    Attributes:
        weights: float32 [V], by the id of the token.
        max_tokens: so many tokens of a query count, its first; None for all.
    """

    weights: NDArray[np.float32]
    max_tokens: int | None = None

    @classmethod
    def read(cls, stored: StoredModule) -> SparseStaticEmbedding:
        """Read the table.

        Raises:
            OnnxtoolError: it is missing, or the module has settings that are not known here.
        """
        files = stored.files
        unknown = sorted(set(stored.settings) - _KEYS)
        if unknown:
            raise files.refuse(
                f"{stored.file('config.json')} of {files.label} has the settings {', '.join(unknown)}, "
                "which onnxtool does not know"
            )
        weights = files.read_tensors(stored.folder).get("weight")
        if weights is None or weights.ndim != 1 or not np.isfinite(weights).all():
            found = "missing" if weights is None else f"of shape {list(weights.shape)}, or not finite"
            raise files.refuse(f"weight in {stored.folder} of {files.label} is {found}; it is a number for each token")
        limit = files.read(stored.file(TOKENIZER_CONFIG)).get("model_max_length")
        return cls(weights, limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None)

    def apply(self, ids: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the terms of a query that weigh anything, ascending, and their weights, from its tokens' ids."""
        terms = np.unique(np.asarray(ids[: self.max_tokens], np.int32))
        weights = self.weights[terms]
        return terms[weights != 0], weights[weights != 0]


def require_same_tokens(stored: StoredModule, files: CheckpointFiles) -> None:
    """Refuse a query module whose tokenizer makes other tokens than that of the documents.

    Raises:
        OnnxtoolError: it does, or it has no tokenizer.json.
    """
    query, document = files.read(stored.file("tokenizer.json")), files.read("tokenizer.json")
    if not query or any(query.get(key) != document.get(key) for key in _TOKENIZATION):
        raise files.refuse(
            f"queries and documents of {files.label} have tokenizers that differ ({stored.file('tokenizer.json')}), "
            "and onnxtool reads both with one"
        )
