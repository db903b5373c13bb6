"""Encode texts with fastembed: settings are `sparse`, `looked-up`, `late`, or `dense`, pooling and `normalize`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastembed
from exchange import QUERY, Answer, register


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector, or terms and weights, for each text."""
    if settings[0] == "sparse":
        model = fastembed.SparseTextEmbedding("prithivida/Splade_PP_en_v1", specific_model_path=str(folder))
        found = model.embed(texts, batch_size=16)
        return [_terms(embedding) for embedding in found]
    if settings[0] == "looked-up":
        name = "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte"
        model = fastembed.SparseTextEmbedding(name, specific_model_path=str(folder))
        size = model.model.tokenizer.get_vocab_size()
        documents, queries = model.embed(texts, batch_size=16), model.query_embed([text[:QUERY] for text in texts])
        both = zip(documents, queries, strict=True)
        return [
            _terms(document) | {size + term: weight for term, weight in _terms(query).items()}
            for document, query in both
        ]
    if settings[0] == "late":
        model = fastembed.LateInteractionTextEmbedding("colbert-ir/colbertv2.0", specific_model_path=str(folder))
        documents, queries = model.embed(texts, batch_size=16), model.query_embed([text[:QUERY] for text in texts])
        return [[*map(float, d.ravel()), *map(float, q.ravel())] for d, q in zip(documents, queries, strict=True)]
    model = fastembed.TextEmbedding(register(settings[1:]), specific_model_path=str(folder))
    return [vector.tolist() for vector in model.embed(texts, batch_size=16)]


def _terms(embedding: Any) -> dict[int, float]:
    return dict(zip(map(int, embedding.indices), map(float, embedding.values), strict=True))
