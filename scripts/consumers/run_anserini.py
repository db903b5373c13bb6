"""Encode texts as Anserini's SpladePlusPlusEncoder does, in its onnxruntime; with `batched`, those of the second graph.

The tokens are looked up in the vocabulary file, and the graph is called with one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from exchange import Answer, open_graph
from tokenizers import BertWordPieceTokenizer

MAX_SEQ_LEN = 512


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return term and weight for each text, in float32."""
    (vocabulary,) = folder.glob("*-vocab.txt")
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    ids = [tokenizer.encode(text).ids[:MAX_SEQ_LEN] for text in texts]
    if "batched" in settings:
        return _batched(folder, ids)
    (graph,) = folder.glob("*-optimized.onnx")
    session = open_graph(graph)
    answers: list[Answer] = []
    for tokens in ids:
        array = np.array([tokens], dtype=np.int64)
        feeds = {
            "input_ids": array,
            "token_type_ids": np.zeros_like(array),
            "attention_mask": np.ones_like(array),
        }
        terms, weights = session.run(["output_idx", "output_weights"], feeds)
        answers.append(_pairs(terms, weights))
    return answers


def _batched(folder: Path, ids: list[list[int]], size: int = 16) -> list[Answer]:
    (graph,) = folder.glob("*-batched.onnx")
    session = open_graph(graph)
    answers: list[Answer] = []
    for start in range(0, len(ids), size):
        rows = ids[start : start + size]
        mask = np.array([[i < len(row) for i in range(max(map(len, rows)))] for row in rows])
        padded = np.zeros(mask.shape, dtype=np.int64)
        padded[mask] = np.concatenate(rows)
        feeds = {
            "input_ids": padded,
            "token_type_ids": np.zeros_like(padded),
            "attention_mask": mask.astype(np.int64),
        }
        texts, terms, weights = session.run(["output_text", "output_idx", "output_weights"], feeds)
        answers += [_pairs(terms[texts == place], weights[texts == place]) for place in range(len(rows))]
    return answers


def _pairs(terms: Any, weights: Any) -> dict[int, float]:
    assert terms.dtype == np.int64 and weights.dtype == np.float32  # noqa: S101, PT018  Java casts them so
    return dict(zip(map(int, terms), map(float, weights), strict=True))
