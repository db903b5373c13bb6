"""pymilvus.model's ONNX embedding function; the graph is taken from the folder, not from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
from exchange import Model

PACKAGE = "pymilvus.model"


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Open the folder; it encodes one text at a time, whatever the batch."""
    if file:
        return None
    huggingface_hub.hf_hub_download = lambda repo_id, filename: str(Path(repo_id) / filename)
    from pymilvus.model.dense.onnx import OnnxEmbeddingFunction  # which takes this function when it is imported

    function = OnnxEmbeddingFunction(model_name=job["folder"], tokenizer_name=job["folder"])
    return lambda texts, _size, _role: [[float(value) for value in row] for row in function.encode_documents(texts)]
