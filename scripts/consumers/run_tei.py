"""Encode texts as text-embeddings-inference's onnxruntime backend does, eight at a time: its source, in Python.

The setting is what `--pooling` says, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from exchange import Answer, open_graph
from tokenizers import Tokenizer

MAX_BATCH_SIZE = 8


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector of length 1 for each text."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for keys in (
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
    ):
        assert any(isinstance(config.get(key), int) for key in keys), keys  # noqa: S101  it does not start without
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    left = tokenizer_config.get("padding_side") == "left"
    pooling = settings[0] if settings else _pooling(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_longest(folder, config))
    session = open_graph(folder / "model.onnx")
    names = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]
    answers: list[Answer] = []
    for start in range(0, len(texts), MAX_BATCH_SIZE):
        encodings = tokenizer.encode_batch(texts[start : start + MAX_BATCH_SIZE])
        length = max(len(encoding.ids) for encoding in encodings)
        offered = {
            "input_ids": _pad([e.ids for e in encodings], length, config.get("pad_token_id") or 0, left=left),
            "attention_mask": _pad([e.attention_mask for e in encodings], length, 0, left=left),
            "token_type_ids": _pad([e.type_ids for e in encodings], length, 0, left=left),
        }
        found = dict(zip(outputs, session.run(None, {name: offered[name] for name in names}), strict=True))
        vectors = found.get("sentence_embedding")
        if vectors is None:
            vectors = _pool(found["last_hidden_state"], offered["attention_mask"], pooling)
        answers += (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
    return answers


def _pooling(folder: Path) -> str:
    flags = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    for name, flag in (
        ("cls", "pooling_mode_cls_token"),
        ("mean", "pooling_mode_mean_tokens"),
        ("last", "pooling_mode_lasttoken"),
    ):
        if flags[flag]:
            return name
    raise ValueError(f"pooling config {flags} is not supported")


def _longest(folder: Path, config: dict[str, Any]) -> int:
    path = folder / "sentence_bert_config.json"
    if path.is_file():
        return int(json.loads(path.read_text(encoding="utf-8"))["max_seq_length"])
    return int(config.get("max_position_embeddings") or config["n_positions"])


def _pad(rows: list[list[int]], length: int, value: int, *, left: bool) -> Any:
    padding = [[value] * (length - len(row)) for row in rows]
    pairs = zip(padding, rows, strict=True) if left else zip(rows, padding, strict=True)
    return np.array([[*first, *second] for first, second in pairs], dtype=np.int64)


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    rows = np.arange(len(states))
    if pooling == "cls":
        return states[rows, mask.argmax(axis=1)]
    if pooling == "last":
        return states[rows, mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)]
    return (states * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
