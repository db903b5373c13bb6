"""infinity's engine `optimum`, which chooses the file itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from exchange import Model, Row, pairs
from infinity_emb.args import EngineArgs
from infinity_emb.transformer.crossencoder.optimum import OptimumCrossEncoder
from infinity_emb.transformer.embedder.optimum import OptimumEmbedder

PACKAGE = "infinity-emb"


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Open the folder, which has to be the current one."""
    if file:
        return None
    os.chdir(job["folder"])
    settings = EngineArgs(
        model_name_or_path=".",  # it gives optimum the path of the graph from here, which looks in the folder
        engine="optimum",
        device="cpu",
        pooling_method=job["pooling"] if job["pooling"] in ("mean", "cls") else "auto",
        onnx_disable_optimize=True,
    )
    ranks = job["kind"] == "text classifiers"
    model = OptimumCrossEncoder(engine_args=settings) if ranks else OptimumEmbedder(engine_args=settings)

    def run(texts: Sequence[str], size: int, _role: str) -> list[Row]:
        rows: list[Row] = []
        inputs: Sequence[Any] = pairs(job, texts) if ranks else texts
        for start in range(0, len(texts), size):
            features = model.encode_pre(list(inputs[start : start + size]))
            outputs = model.encode_post(model.encode_core(features))
            rows += [[float(row)] if ranks else row.tolist() for row in outputs]
        return rows

    return run
