"""fastembed, as the note of the export says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fastembed
from exchange import Model, Row
from fastembed.common.model_description import ModelSource, PoolingType
from fastembed.rerank.cross_encoder import TextCrossEncoder

PACKAGE = "fastembed"
# Models of its own list, each in the class that computes as this kind needs; they open model.onnx, and nothing else.
_LISTED = {
    "sparse encoders": ("SparseTextEmbedding", "prithivida/Splade_PP_en_v1"),
    "inference-free sparse encoders": (
        "SparseTextEmbedding",
        "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte",
    ),
    "late-interaction encoders": ("LateInteractionTextEmbedding", "colbert-ir/colbertv2.0"),
}


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Open the folder; a model of one's own names its file when it is registered."""
    options, graph = {"specific_model_path": job["folder"]}, file or job["graph"]
    name = f"local/{graph}/{not file}"
    if job["kind"] == "text classifiers":
        TextCrossEncoder.add_custom_model(model=name, sources=ModelSource(hf=name), model_file=graph)
        ranker = TextCrossEncoder(name, **options)
        return lambda texts, size, _: [[score] for score in ranker.rerank(job["question"], texts, batch_size=size)]
    if job["kind"] == "text encoders":
        fastembed.TextEmbedding.add_custom_model(
            model=name,
            pooling=PoolingType[job["pooling"]],
            normalization=job["normalize"],
            sources=ModelSource(hf=name),
            dim=1,  # which it uses nowhere
            model_file=graph,
        )
        encoder = fastembed.TextEmbedding(name, **options)
        return lambda texts, size, _: [row.tolist() for row in encoder.embed(texts, batch_size=size)]
    if file and file != job["graph"]:
        return None
    name_of_class, listed = _LISTED[job["kind"]]
    model = getattr(fastembed, name_of_class)(listed, **options)

    def run(texts: Sequence[str], size: int, role: str) -> list[Row]:
        vectors = model.query_embed(texts) if role == "query" else model.embed(texts, batch_size=size)
        return [_terms(vector) if "sparse" in job["kind"] else vector.tolist() for vector in vectors]

    return run


def _terms(embedding: Any) -> dict[int, float]:
    return dict(zip(map(int, embedding.indices), map(float, embedding.values), strict=True))
