"""What PyTorch says of texts, by sentence-transformers, text by text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

QUERY = 40  # so many characters of a text are a query to encoders that tell queries and documents apart
QUESTION = "what is the capital of France?"  # which rerankers rank texts by


@cache
def reference(checkpoint: Path, texts: tuple[str, ...]) -> list[list[float]]:
    """Return a vector for each text, in float32: of the vocabulary for a sparse encoder, a score for a reranker.

    Of encoders that tell queries and documents apart, behind the vector of the text there is that of its first words
    as a query: all vectors of tokens of a late-interaction encoder, and weights without those of [CLS] and its kin.
    """
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

    has_routes, architecture = (checkpoint / "router_config.json").is_file(), ""
    if not has_routes:
        architecture = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    name, queries = str(checkpoint), [text[:QUERY] for text in texts]
    if architecture.endswith(("ForSequenceClassification", "ForCausalLM")):
        activation = torch.nn.Identity() if architecture.endswith("ForSequenceClassification") else None
        reranker = CrossEncoder(name, device="cpu", activation_fn=activation)
        pairs = [(QUESTION, text) for text in texts]
        return [[float(score)] for score in reranker.predict(pairs, batch_size=1)]
    if architecture == "HF_ColBERT":
        late = MultiVectorEncoder(name, device="cpu")
        both = zip(late.encode_document([*texts]), late.encode_query(queries), strict=True)
        return [[*document.ravel().tolist(), *query.ravel().tolist()] for document, query in both]
    if has_routes or architecture.endswith("ForMaskedLM"):
        sparse = SparseEncoder(name, device="cpu")
        weights = sparse.encode_document([*texts], batch_size=1).to_dense()
        if has_routes:
            weights = torch.cat([weights, sparse.encode_query(queries).to_dense()], dim=1)
            size = weights.shape[1] // 2
            weights[:, [start + term for start in (0, size) for term in sparse.tokenizer.all_special_ids]] = 0
        found: list[list[float]] = weights.tolist()
        return found
    dense: list[list[float]] = SentenceTransformer(name, device="cpu").encode([*texts], batch_size=1).tolist()
    return dense
