"""Encode texts with fastembed: settings are `sparse`, or `dense`, the pooling and whether to normalize."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from exchange import Answer, answer

NAME = "local/exported"


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector, or terms and weights, for each text."""
    fastembed = importlib.import_module("fastembed")
    if settings[0] == "sparse":
        model = fastembed.SparseTextEmbedding("prithivida/Splade_PP_en_v1", specific_model_path=str(folder))
        found = model.embed(texts, batch_size=16)
        return [dict(zip(map(int, e.indices), map(float, e.values), strict=True)) for e in found]
    _, pooling, normalize = settings
    descriptions = importlib.import_module("fastembed.common.model_description")
    fastembed.TextEmbedding.add_custom_model(
        model=NAME,
        pooling=descriptions.PoolingType[pooling],
        normalization=normalize == "normalize",
        sources=descriptions.ModelSource(hf=NAME),
        dim=1,  # stated in its list of models, and used nowhere else
        model_file="model.onnx",
    )
    model = fastembed.TextEmbedding(NAME, specific_model_path=str(folder))
    return [vector.tolist() for vector in model.embed(texts, batch_size=16)]


if __name__ == "__main__":
    answer(run)
