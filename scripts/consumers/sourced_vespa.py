"""Vespa's SpladeEmbedder and HuggingFaceEmbedder, one text at a time: their source, in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from exchange import Model, Row, nonzero
from onnxruntime import InferenceSession
from tokenizers import Tokenizer

PACKAGE = "tokenizers"
MAX_TOKENS = 512
POOLING = {"mean": lambda s: s[0].mean(axis=0), "cls": lambda s: s[0, 0], "none": lambda s: s[0]}


def open_model(job: dict[str, Any], file: str) -> Model:
    """Open the graph that services.xml names."""
    folder = Path(job["folder"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    if tokenizer.truncation is None:
        tokenizer.enable_truncation(MAX_TOKENS)
    session = InferenceSession(str(folder / (file or job["graph"])), providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]
    is_sparse = job["kind"] == "sparse encoders"

    def answer(text: str) -> Row:
        encoding = tokenizer.encode(text)
        offered = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        # SpladeEmbedder feeds all three; HuggingFaceEmbedder as many as the graph has.
        used = offered if is_sparse else list(offered)[: len(inputs)]
        (output,) = session.run(None, {name: np.array([offered[name]], dtype=np.int64) for name in used})
        if is_sparse:
            return nonzero(np.log(1.0 + np.maximum(output[0].astype(np.float64).max(axis=0), 0.0)))
        vector = POOLING[job["pooling"]](output)
        row: list[float] = (vector / np.linalg.norm(vector) if job["normalize"] else vector).tolist()
        return row

    return lambda texts, _size, _role: [answer(text) for text in texts]
