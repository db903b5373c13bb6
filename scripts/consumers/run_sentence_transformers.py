"""Encode texts with sentence-transformers: settings are `dense`, `sparse` or `reranker`, and what runs the model.

That is `onnxtool`, by the class that the folder names, or the backend `onnx` or `torch` of sentence-transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from exchange import QUESTION, Answer, nonzero


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector, or terms and weights, or a score, for each text."""
    kind, backend = settings
    if backend == "onnxtool":
        importlib.import_module("onnxtool.sentence_transformers")
        backend = "torch"
    package = importlib.import_module("sentence_transformers")
    encoders = {"sparse": "SparseEncoder", "reranker": "CrossEncoder", "dense": "SentenceTransformer"}
    encoder = getattr(package, encoders[kind])
    options = {"provider": "CPUExecutionProvider", "export": False} if backend == "onnx" else {}
    model = encoder(str(folder), backend=backend, device="cpu", model_kwargs=options, local_files_only=True)
    if kind == "reranker":
        return [[float(score)] for score in model.predict([(QUESTION, text) for text in texts])]
    if kind == "sparse":
        return [nonzero(row) for row in model.encode(texts, convert_to_tensor=True).to_dense().numpy()]
    return [row.tolist() for row in model.encode(texts)]
