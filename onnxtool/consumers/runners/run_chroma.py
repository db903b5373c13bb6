"""A collection of Chroma in memory, with its ONNX embedding function for the exported model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chromadb
from chromadb.utils import embedding_functions as functions
from exchange import Model, Row

PACKAGE = "chromadb"


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Make a collection that embeds with the folder."""
    if file:
        return None

    @functions.register_embedding_function
    class Exported(functions.ONNXMiniLM_L6_V2):  # type: ignore[misc]  # it is of an environment of its own
        DOWNLOAD_PATH = job["folder"]
        EXTRACTED_FOLDER_NAME = ""

        @staticmethod
        def name() -> str:
            return "exported"

        @staticmethod
        def build_from_config(config: dict[str, Any]) -> Any:
            return Exported(**config)

    client = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False))
    client.create_collection("texts", embedding_function=Exported())
    collection = client.get_collection("texts")  # which makes the function from the name that it stored

    def run(texts: Sequence[str], size: int, _role: str) -> list[Row]:
        rows: list[Row] = []
        for start in range(0, len(texts), size):
            ids = [str(place) for place in range(start, min(start + size, len(texts)))]
            collection.upsert(ids=ids, documents=list(texts[start : start + size]))
            stored = collection.get(ids=ids, include=["embeddings"])
            vectors = dict(zip(stored["ids"], stored["embeddings"], strict=True))
            rows += [vectors[key].tolist() for key in ids]
        return rows

    return run
