"""Encode texts with sentence-transformers: settings are `dense` or `sparse`, and what runs the model.

That is `onnxtool`, by the class that the folder names, or the backend `onnx` or `torch` of sentence-transformers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from exchange import Answer, answer, nonzero


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector, or terms and weights, for each text."""
    kind, backend = settings
    if backend == "onnxtool":
        importlib.import_module("onnxtool.sentence_transformers")
        backend = "torch"
    package = importlib.import_module("sentence_transformers")
    encoder = package.SparseEncoder if kind == "sparse" else package.SentenceTransformer
    options = {"provider": "CPUExecutionProvider", "export": False} if backend == "onnx" else {}
    model = encoder(str(folder), backend=backend, device="cpu", model_kwargs=options, local_files_only=True)
    if kind == "sparse":
        return [nonzero(row) for row in model.encode(texts, convert_to_tensor=True).to_dense().numpy()]
    return [row.tolist() for row in model.encode(texts)]


if __name__ == "__main__":
    answer(run)
