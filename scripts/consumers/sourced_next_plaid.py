"""next-plaid-onnx, 32 texts at a time: its source, src/lib.rs, in Python.

Shape letters: T tokens that count, W width of a vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from exchange import Model

PACKAGE = "tokenizers"
BATCH = 32
DEFAULTS: dict[str, Any] = {
    "query_length": 48, "document_length": 300, "do_query_expansion": True, "uses_token_type_ids": True,
    "mask_token_id": 103, "pad_token_id": 0, "skiplist_words": [], "query_prefix": "[Q] ", "document_prefix": "[D] ",
    "query_prefix_id": None, "document_prefix_id": None, "embedding_dim": 128, "do_lower_case": False,
}  # fmt: skip
# Ids that it replaces by those of the first of these tokens that the tokenizer has.
REPLACED = {"mask_token_id": (103, "[MASK]", "<mask>"), "pad_token_id": (0, "[PAD]", "<pad>")}


def open_model(job: dict[str, Any], file: str) -> Model:
    """Open the folder."""
    folder, name = Path(job["folder"]), file or "model.onnx"
    return lambda texts, _size, role: [row.tolist() for row in encode(folder, texts, role, name)]


def encode(folder: Path, texts: Sequence[str], role: str, name: str = "model.onnx") -> list[NDArray[np.float32]]:
    """Return a float32 [T, W] of each text."""
    config = {**DEFAULTS, **json.loads((folder / "onnx_config.json").read_text(encoding="utf-8"))}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for key, (usual, *tokens) in REPLACED.items():
        known = [number for token in tokens if (number := tokenizer.token_to_id(token)) is not None]
        config[key] = known[0] if config[key] == usual and known else config[key]
    session = onnxruntime.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])
    vectors: list[NDArray[np.float32]] = []
    for start in range(0, len(texts), BATCH):
        vectors += _encode_batch(session, tokenizer, config, texts[start : start + BATCH], role)
    return vectors


def _encode_batch(
    session: Any, tokenizer: Tokenizer, config: dict[str, Any], texts: Sequence[str], role: str
) -> list[NDArray[np.float32]]:
    length, expands = config[f"{role}_length"], role == "query" and config["do_query_expansion"]
    marker = config[f"{role}_prefix_id"]
    marker = tokenizer.token_to_id(config[f"{role}_prefix"]) if marker is None else marker
    rows = []
    for encoding in tokenizer.encode_batch([_trim(text, config["do_lower_case"]) for text in texts]):
        ids = encoding.ids[: max(1, sum(encoding.attention_mask))]
        kept = [*ids[: length - 2], ids[-1]] if len(ids) > length - 1 else ids
        rows.append([kept[0], marker, *kept[1:]])
    width = length if expands else max(map(len, rows))
    fill, seen = (config["mask_token_id"], 1) if expands else (config["pad_token_id"], 0)
    feeds = {
        "input_ids": np.array([row + [fill] * (width - len(row)) for row in rows]),
        "attention_mask": np.array([[1] * len(row) + [seen] * (width - len(row)) for row in rows]),
    }
    if config["uses_token_type_ids"]:
        feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
    (output,) = session.run(["output"], feeds)
    if expands:
        return list(output)
    skipped = {tokenizer.token_to_id(word) for word in config["skiplist_words"]} if role == "document" else set()
    return [
        vectors[[place for place, token in enumerate(row) if token not in skipped]]
        for vectors, row in zip(output, rows, strict=True)
    ]


def _trim(text: str, lower_cases: bool) -> str:
    return text.strip().lower() if lower_cases else text.strip()
