"""Anserini's SpladePlusPlusEncoder in its onnxruntime, from its source; batches run the second graph.

It encodes queries. It would cut a longer text than MAX_SEQ_LEN behind its tokens, and so lose the closing one; such a
text is cut here before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from exchange import Model, Row
from onnxruntime import InferenceSession
from tokenizers import BertWordPieceTokenizer

PACKAGE = "tokenizers"
MAX_SEQ_LEN = 512


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Open the folder; tokens are looked up in the vocabulary file."""
    if file:
        return None
    (vocabulary,) = Path(job["folder"]).glob("*-vocab.txt")
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    tokenizer.enable_truncation(MAX_SEQ_LEN)
    single, batched = (_session(job, kind) for kind in ("optimized", "batched"))

    def run(texts: Sequence[str], size: int, _role: str) -> list[Row]:
        rows: list[Row] = []
        ids = [tokenizer.encode(text).ids for text in texts]
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            mask = np.array([[place < len(row) for place in range(max(map(len, part)))] for row in part])
            padded = np.zeros(mask.shape, dtype=np.int64)
            padded[mask] = np.concatenate(part)
            types, attended = np.zeros_like(padded), mask.astype(np.int64)
            feeds = {"input_ids": padded, "token_type_ids": types, "attention_mask": attended}
            if size == 1:
                rows.append(_pairs(*single.run(["output_idx", "output_weights"], feeds)))
            else:
                texts_of, terms, weights = batched.run(["output_text", "output_idx", "output_weights"], feeds)
                rows += [_pairs(terms[texts_of == place], weights[texts_of == place]) for place in range(len(part))]
        return rows

    return run


def _session(job: dict[str, Any], kind: str) -> Any:
    (graph,) = Path(job["folder"]).glob(f"*-{kind}.onnx")
    return InferenceSession(str(graph), providers=["CPUExecutionProvider"])


def _pairs(terms: Any, weights: Any) -> dict[int, float]:
    assert terms.dtype == np.int64 and weights.dtype == np.float32  # noqa: S101, PT018  Java casts them so
    return dict(zip(map(int, terms), map(float, weights), strict=True))
