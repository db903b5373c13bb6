"""Encode texts as a collection of Chroma does, in memory, with its ONNX embedding function for the exported model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chromadb
from chromadb.utils import embedding_functions as functions
from exchange import Answer


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return the vector that the collection stores of each text, of length 1."""

    @functions.register_embedding_function
    class Exported(functions.ONNXMiniLM_L6_V2):  # type: ignore[misc]  # it is of an environment of its own
        DOWNLOAD_PATH = folder
        EXTRACTED_FOLDER_NAME = ""

        @staticmethod
        def name() -> str:
            return folder.name

        @staticmethod
        def build_from_config(config: dict[str, Any]) -> Any:
            return Exported(**config)

    client = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False))
    client.create_collection("texts", embedding_function=Exported())
    collection = client.get_collection("texts")  # which makes the function from the name that it stored
    ids = [str(place) for place in range(len(texts))]
    collection.add(ids=ids, documents=texts)
    found = collection.get(ids=ids, include=["embeddings"])
    vectors = dict(zip(found["ids"], found["embeddings"], strict=True))
    return [vectors[place].tolist() for place in ids]
