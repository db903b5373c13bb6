"""Encode texts with infinity's engine `optimum`; the setting is how it pools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from exchange import Answer
from infinity_emb.args import EngineArgs
from infinity_emb.transformer.embedder.optimum import OptimumEmbedder

BATCH_SIZE = 16


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector of length 1 for each text."""
    os.chdir(folder)
    embedder = OptimumEmbedder(
        engine_args=EngineArgs(
            model_name_or_path=".",  # it gives optimum the path of the graph from here, which looks in the folder
            engine="optimum",
            device="cpu",
            pooling_method=settings[0],
            onnx_disable_optimize=True,
        )
    )
    answers: list[Answer] = []
    for start in range(0, len(texts), BATCH_SIZE):
        features = embedder.encode_pre(texts[start : start + BATCH_SIZE])
        answers += [row.tolist() for row in embedder.encode_post(embedder.encode_core(features))]
    return answers
