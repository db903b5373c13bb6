"""Encode texts one at a time as ml-commons 3.6 does by the Deep Java Library: their sources, in Python."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from exchange import Answer, answer, nonzero
from tokenizers import Tokenizer

MODEL_MAX_LENGTH = 512  # of HuggingFaceTokenizer, where no option says another


def run(folder: Path, texts: list[str], settings: Sequence[str]) -> list[Answer]:
    """Return a vector, or terms and weights, for each text."""
    request = json.loads((folder / "ml-commons_model_config.json").read_text(encoding="utf-8"))
    (archive,) = (path for path in folder.glob("*.zip") if not path.stem.endswith("-tokenizer"))
    content = archive.read_bytes()
    assert hashlib.sha256(content).hexdigest() == request["model_content_hash_value"]  # noqa: S101  it refuses others
    assert len(content) == request["model_content_size_in_bytes"]  # noqa: S101
    assert request["model_format"] == "ONNX"  # noqa: S101
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(archive) as files:
        files.extractall(name)
        (graph,) = Path(name).glob("*.onnx")  # DLModel: "found multiple models"
        tokenizer = Tokenizer.from_file(str(Path(name) / "tokenizer.json"))
        session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    limit = tokenizer.truncation["max_length"] if tokenizer.truncation else MODEL_MAX_LENGTH
    tokenizer.enable_truncation(min(limit, MODEL_MAX_LENGTH))
    translators: dict[str, Callable[..., Answer]] = {"TEXT_EMBEDDING": _vector, "SPARSE_ENCODING": _terms}
    translate = translators[request["function_name"]]
    return [translate(session, tokenizer.encode(text), request.get("model_config", {})) for text in texts]


def _forward(session: Any, feeds: dict[str, list[int]]) -> Any:
    """Do as OrtSymbolBlock: inputs are counted, and then found by their names."""
    names = [value.name for value in session.get_inputs()]
    assert len(feeds) == len(names), f"Input mismatch, looking for: {names}"  # noqa: S101
    assert set(feeds) <= set(names), f"Invalid input tensor name: {feeds.keys()}"  # noqa: S101
    assert list(feeds) == names  # noqa: S101  older versions go by the order alone
    return session.run(None, {name: np.array([row], dtype=np.int64) for name, row in feeds.items()})[0]


def _vector(session: Any, encoding: Any, config: dict[str, Any]) -> list[float]:
    """Do as ONNXSentenceTransformerTextEmbeddingTranslator."""
    feeds = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask}
    if config["model_type"].lower() in ("bert", "albert"):
        feeds["token_type_ids"] = encoding.type_ids
    states = _forward(session, feeds)
    assert config["pooling_mode"] == "CLS"  # noqa: S101
    vector = states[0][0]
    vector = vector / np.linalg.norm(vector) if config["normalize_result"] else vector
    assert len(vector) == config["embedding_dimension"]  # noqa: S101
    return [float(value) for value in vector]


def _terms(session: Any, encoding: Any, _config: dict[str, Any]) -> dict[int, float]:
    """Do as SentenceTransformerTranslator and SparseEncodingTranslator, with the ids of terms."""
    feeds = {"input1.input_ids": encoding.ids, "input1.attention_mask": encoding.attention_mask}
    return nonzero(_forward(session, feeds)[0])


if __name__ == "__main__":
    answer(run)
