"""Encode texts with pymilvus.model, and store them in Milvus Lite; model.onnx is taken from the folder, not the hub."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from exchange import Answer
from pymilvus import MilvusClient


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return the vector that the collection stores of each text, of length 1."""
    huggingface_hub.hf_hub_download = lambda repo_id, filename: str(Path(repo_id) / filename)
    from pymilvus.model.dense.onnx import OnnxEmbeddingFunction  # which takes this function when it is imported

    function = OnnxEmbeddingFunction(model_name=str(folder), tokenizer_name=str(folder))
    vectors = function.encode_documents(texts)
    with tempfile.TemporaryDirectory() as name:
        client = MilvusClient(str(Path(name) / "texts.db"))
        client.create_collection("texts", dimension=function.dim)
        client.insert("texts", [{"id": place, "vector": vector} for place, vector in enumerate(vectors)])
        found = client.get("texts", ids=list(range(len(texts))), output_fields=["vector"])
        stored = {row["id"]: row["vector"] for row in found}
        client.close()
    return [[float(value) for value in stored[place]] for place in range(len(texts))]
