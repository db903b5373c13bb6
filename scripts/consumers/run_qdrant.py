"""Encode and store texts with qdrant-client in memory, by fastembed; settings are pooling and normalization."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exchange import Answer, register
from qdrant_client import QdrantClient, models


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return the vector that the collection stores of each text."""
    client = QdrantClient(":memory:")
    name = register(settings, dim=384)
    parameters = models.VectorParams(size=384, distance=models.Distance.DOT)
    client.create_collection("texts", vectors_config=parameters)
    options = {"specific_model_path": str(folder)}
    points = [
        models.PointStruct(id=place, vector=models.Document(text=text, model=name, options=options))
        for place, text in enumerate(texts)
    ]
    client.upsert("texts", points)
    found = client.retrieve("texts", ids=list(range(len(texts))), with_vectors=True)
    stored = {point.id: point.vector for point in found}
    return [list(map(float, stored[place])) for place in range(len(texts))]
