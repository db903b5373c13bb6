"""ml-commons 3.6 with the Deep Java Library, one text at a time: their sources, in Python."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from exchange import Model, Row, nonzero
from onnxruntime import InferenceSession
from tokenizers import Tokenizer

PACKAGE = "tokenizers"
MODEL_MAX_LENGTH = 512  # of HuggingFaceTokenizer, where no option says another
_MODEL, _QUERIES = "ml-commons_model_config.json", "ml-commons_tokenizer_config.json"


def open_model(job: dict[str, Any], file: str) -> Model | None:
    """Open the archive that the request registers; where queries are looked up, there is another for them."""
    if file:
        return None
    folder = Path(job["folder"])
    with tempfile.TemporaryDirectory() as name:
        request = _deploy(folder, _MODEL, Path(name))
        (graph,) = Path(name).glob("*.onnx")  # DLModel: "found multiple models"
        tokenizer = _tokenizer(Path(name))
        session = InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    weights: dict[str, float] = {}
    if (folder / _QUERIES).is_file():
        with tempfile.TemporaryDirectory() as name:
            assert _deploy(folder, _QUERIES, Path(name))["function_name"] == "SPARSE_TOKENIZE"  # noqa: S101
            weights = json.loads((Path(name) / "idf.json").read_text(encoding="utf-8"))
            queries = _tokenizer(Path(name))
    function, config = request["function_name"], request.get("model_config", {})
    translators: dict[str, Callable[..., Row]] = {
        "TEXT_EMBEDDING": _vector,
        "SPARSE_ENCODING": _terms,
        "TEXT_SIMILARITY": _score,
    }

    def answer(text: str, role: str) -> Row:
        if role == "query":
            return dict(_looked_up(queries, weights, text))
        pair = (job["question"], text) if job["question"] else (text,)
        return translators[function](session, tokenizer.encode(*pair), config)

    return lambda texts, _size, role: [answer(text, role) for text in texts]


def _deploy(folder: Path, name: str, place: Path) -> Any:
    """Check an archive against the request that registers it, as ml-commons does, and unpack it."""
    request = json.loads((folder / name).read_text(encoding="utf-8"))
    archive = folder / f"{request['name']}.zip"
    content = archive.read_bytes()
    assert hashlib.sha256(content).hexdigest() == request["model_content_hash_value"]  # noqa: S101  it refuses others
    assert len(content) == request["model_content_size_in_bytes"]  # noqa: S101
    assert request["model_format"] == "ONNX"  # noqa: S101
    with zipfile.ZipFile(archive) as files:
        files.extractall(place)
    return request


def _tokenizer(place: Path) -> Any:
    tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
    limit = tokenizer.truncation["max_length"] if tokenizer.truncation else MODEL_MAX_LENGTH
    tokenizer.enable_truncation(min(limit, MODEL_MAX_LENGTH))
    return tokenizer


def _looked_up(tokenizer: Any, weights: dict[str, float], query: str) -> dict[int, float]:
    """Do as SparseTokenizerModel: each token once, by its text, with 1 for one that has no weight."""
    texts = {term: tokenizer.decode([term]) for term in tokenizer.encode(query).ids}
    return {term: weights.get(text, 1.0) for term, text in texts.items() if text}


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


def _score(session: Any, encoding: Any, _config: dict[str, Any]) -> list[float]:
    """Do as TextSimilarityTranslator."""
    feeds = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}
    return [float(_forward(session, feeds)[0][0])]


def _terms(session: Any, encoding: Any, _config: dict[str, Any]) -> Row:
    """Do as SentenceTransformerTranslator and SparseEncodingTranslator, with the ids of terms."""
    feeds = {"input1.input_ids": encoding.ids, "input1.attention_mask": encoding.attention_mask}
    return nonzero(_forward(session, feeds)[0])
