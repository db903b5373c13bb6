"""Queries of inference-free sparse encoders: a table gives the weight of each query token, without a model.

Geng et al., 2024, arXiv:2411.04403; SparseStaticEmbedding of sentence-transformers 6.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.files import MODULE_WEIGHTS, CheckpointFiles
from onnxtool.checkpoint.module_forms import require_known_keys
from onnxtool.checkpoint.sentence_modules import StoredModule, is_number, positive, stays_inside
from onnxtool.checkpoint.tokenizer_guard import require_harmless, tokenizer_errors
from onnxtool.errors import OnnxtoolError

_KEYS = frozenset(("frozen", "path"))
_MAX_TOKENS = 2**24  # far above any vocabulary: a hostile tokenizer may give a token the id 4 billion
IDF_NAME = "idf.json"  # weights by token, which other consumers read
# Keys of tokenizer.json that affect tokens; the rest are about truncation and padding.
_TOKENIZATION = ("added_tokens", "normalizer", "pre_tokenizer", "model")
TOKENIZER_NAME, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True, eq=False)
class SparseStaticEmbedding:
    """The table.

    Attributes:
        weights: float32 [V], by token id.
        max_tokens: number of leading query tokens that count; None for all.
    """

    weights: NDArray[np.float32]
    max_tokens: int | None = None

    @classmethod
    def read(cls, stored: StoredModule) -> SparseStaticEmbedding:
        """Read the table.

        Raises:
            OnnxtoolError: it is missing, or the module has unknown settings.
        """
        files = stored.files
        require_known_keys(stored, _KEYS)
        by_token = table_files(stored)
        weights = _weights_by_token(stored) if by_token else files.read_tensors(stored.folder).get("weight")
        if weights is None or weights.ndim != 1 or not np.isfinite(weights).all():
            problem = "missing" if weights is None else f"of shape {list(weights.shape)}, or not finite"
            raise files.refuse(
                f"weight in {stored.folder} of {files.label} is {problem}; it must have one number for each token"
            )
        return cls(weights, positive(files.read_object(stored.file(TOKENIZER_CONFIG)).get("model_max_length")))

    def apply(self, ids: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the terms of a query with nonzero weight, ascending, and their weights, from its token ids."""
        terms = np.unique(np.asarray(ids[: self.max_tokens], np.int32))
        weights = self.weights[terms]
        return terms[weights != 0], weights[weights != 0]

    def named_weights(self, stored: StoredModule) -> Mapping[str, float]:
        """Return the nonzero weights by token, as the shortest decimals that round-trip to the same float32."""
        tokens = _vocabulary(stored)
        return {
            token: float(str(self.weights[index]))
            for token, index in sorted(tokens.items(), key=lambda item: item[1])
            if index < len(self.weights) and self.weights[index]
        }


def table_files(stored: StoredModule) -> tuple[str, ...]:
    """Return the module's file with weights by token, relative to the checkpoint; empty if it names none.

    Raises:
        OnnxtoolError: it lies outside the checkpoint.
    """
    stated = stored.settings.get("path")
    if not isinstance(stated, str) or not stated.endswith(".json"):
        return ()
    if not stays_inside(stated):
        raise stored.files.malformed(stored.file("config.json"), f"its path leaves the folder: {stated}")
    module_file = stored.file(stated)
    return (module_file if stored.files.locate(module_file) is not None else stated,)


def _weights_by_token(stored: StoredModule) -> NDArray[np.float32]:
    (name,) = table_files(stored)
    stated, tokens = stored.files.read_object(name), _vocabulary(stored)
    unknown = [token for token in stated if token not in tokens]
    numbers = list(stated.values())
    if not stated or unknown or not all(map(is_number, numbers)):
        reason = (
            f"the tokenizer has no {', '.join(map(repr, unknown[:3]))}" if unknown else "it is not one number per token"
        )
        raise stored.files.malformed(name, reason if stated else "it is empty or missing")
    size = max(tokens.values()) + 1
    if size > _MAX_TOKENS:
        raise stored.files.malformed(name, f"the tokenizer has the token {size - 1}, and the table a row for each")
    weights = np.zeros(size, np.float32)
    weights[[tokens[token] for token in stated]] = np.asarray(numbers, np.float32)
    return weights


def _vocabulary(stored: StoredModule) -> dict[str, int]:
    """Return the token ids of a module, from its own tokenizer.json or the checkpoint's."""
    from tokenizers import Tokenizer

    for name in (stored.file(TOKENIZER_NAME), TOKENIZER_NAME):
        text = stored.files.read_text(name)
        if text is not None:
            make = partial(_no_tokenizer, stored, name)
            require_harmless(text, make)
            with tokenizer_errors(make):
                return dict(Tokenizer.from_str(text).get_vocab())
    raise stored.files.refuse(f"{stored.folder} of {stored.files.label} has no {TOKENIZER_NAME}")


def _no_tokenizer(stored: StoredModule, name: str, reason: str) -> OnnxtoolError:
    return stored.files.malformed(name, f"no tokenizer: {reason}")


def read_vectors(stored: StoredModule) -> NDArray[np.float32]:
    """Return the vectors of a StaticEmbedding, float32 [V, W], one row per token.

    model2vec writes fewer rows, plus each token's row index and weight: these are folded into one table.

    Raises:
        OnnxtoolError: they are missing, have wrong shapes, or are not finite.
    """
    files = stored.files
    tensors, integers = files.read_tensors(stored.folder), files.read_integers(stored.folder)
    vectors, rows, weights = tensors.get("embedding.weight"), None, None
    if vectors is None:
        vectors, rows, weights = tensors.get("embeddings"), integers.get("mapping"), tensors.get("weights")
    place = f"{stored.file(MODULE_WEIGHTS)} of {files.label}"
    if vectors is None or vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
        problem = "missing" if vectors is None else f"of shape {list(vectors.shape)}, or not finite"
        raise files.refuse(f"embedding.weight in {place} is {problem}; it must have one vector for each token")
    if rows is not None:
        if rows.ndim != 1 or not rows.size or rows.min() < 0 or rows.max() >= len(vectors):
            raise files.refuse(f"mapping in {place} is of shape {list(rows.shape)}, or names rows that do not exist")
        vectors = vectors[rows]
    if weights is not None:
        if weights.shape != (len(vectors),) or not np.isfinite(weights).all():
            raise files.refuse(f"weights in {place} is of shape {list(weights.shape)}, or not finite")
        vectors = vectors * weights[:, None]
    return np.ascontiguousarray(vectors)


def require_same_tokens(stored: StoredModule, files: CheckpointFiles) -> None:
    """Refuse a query module whose tokenizer differs from the documents' tokenizer.

    Raises:
        OnnxtoolError: it does, or it has no tokenizer.json.
    """
    query, document = files.read_object(stored.file(TOKENIZER_NAME)), files.read_object(TOKENIZER_NAME)
    if not query or any(query.get(key) != document.get(key) for key in _TOKENIZATION):
        raise files.refuse(
            f"queries and documents of {files.label} have tokenizers that differ ({stored.file(TOKENIZER_NAME)}), "
            "and onnxtool reads both with one"
        )
