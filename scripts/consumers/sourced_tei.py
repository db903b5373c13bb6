"""text-embeddings-inference's onnxruntime backend: its source, in Python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from exchange import Model, Row
from onnxruntime import InferenceSession
from tokenizers import Tokenizer

PACKAGE = "tokenizers"


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Open the folder, as `--pooling` says where a graph pools and no file does."""
    if file:
        return None
    folder = Path(job["folder"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for keys in (
        ("hidden_size", "n_embd"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
    ):
        assert any(isinstance(config.get(key), int) for key in keys), keys  # noqa: S101  it does not start without
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    left = tokenizer_config.get("padding_side") == "left"
    pooling = job["pooling"] if job["pooling"] == "none" else _pooling(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_longest(folder, config))
    session = InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    inputs, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))
    padding = {"input_ids": config.get("pad_token_id") or 0, "attention_mask": 0, "token_type_ids": 0}

    def batch(texts: Sequence[str]) -> list[Row]:
        encodings = tokenizer.encode_batch(texts)
        rows = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        feeds = {
            name: _pad([getattr(encoding, rows[name]) for encoding in encodings], padding[name], left=left)
            for name in inputs
        }
        tensors = dict(zip(outputs, session.run(None, feeds), strict=True))
        vectors = tensors.get("sentence_embedding")
        if vectors is None:
            vectors = _pool(tensors["last_hidden_state"], feeds["attention_mask"], pooling)
        scaled: list[Row] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).tolist()
        return scaled

    return lambda texts, size, _role: [
        row for start in range(0, len(texts), size) for row in batch(texts[start : start + size])
    ]


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


def _pad(rows: list[list[int]], value: int, *, left: bool) -> Any:
    padding = [[value] * (max(map(len, rows)) - len(row)) for row in rows]
    pairs = zip(padding, rows, strict=True) if left else zip(rows, padding, strict=True)
    return np.array([[*first, *second] for first, second in pairs], dtype=np.int64)


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    rows = np.arange(len(states))
    if pooling == "cls":
        return states[rows, mask.argmax(axis=1)]
    if pooling == "last":
        return states[rows, mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)]
    return (states * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
