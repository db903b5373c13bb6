"""What PyTorch says of texts, computed from the published formulas and from the checkpoint's files, text by text."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

QUERY = 40  # so many characters of a text are a query to encoders that tell queries and documents apart
QUESTION = "what is the capital of France?"  # which rerankers rank texts by


def reference(checkpoint: Path, texts: list[str]) -> list[list[float]]:
    """Return a vector for each text, in float32: of the vocabulary for a sparse encoder, a logit for a reranker."""
    return _reference(checkpoint, tuple(texts))


@cache
def _reference(checkpoint: Path, texts: tuple[str, ...]) -> list[list[float]]:
    import torch
    import transformers

    if (checkpoint / "router_config.json").is_file():
        return _inference_free(checkpoint, texts)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if "HF_ColBERT" in config["architectures"]:
        return _late_interaction(checkpoint, texts)
    if config["architectures"][0].endswith("ForCausalLM"):
        return _verdicts(checkpoint, texts)
    if config["architectures"][0].endswith("ForSequenceClassification"):
        return _scores(checkpoint, texts)
    settings = json.loads((checkpoint / "sentence_bert_config.json").read_text(encoding="utf-8"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = getattr(transformers, config["architectures"][0]).from_pretrained(checkpoint).eval()
    vectors = []
    for text in texts:
        tokens = tokenizer(text, truncation=True, max_length=settings["max_seq_length"], return_tensors="pt")
        with torch.inference_mode():
            outputs = model(**tokens)
            if "logits" in outputs:
                vector = torch.log1p(torch.relu(outputs.logits[0])).amax(dim=0)  # SPLADE v2, arXiv:2109.10086
            else:
                vector = _embed(outputs.last_hidden_state[0], checkpoint)
        vectors.append(vector.tolist())
    return vectors


def _verdicts(checkpoint: Path, texts: tuple[str, ...]) -> list[list[float]]:
    """Return what a decoder says of each text behind one question, in its chat template."""
    from sentence_transformers import CrossEncoder

    encoder = CrossEncoder(str(checkpoint), device="cpu")
    return [[float(score)] for score in encoder.predict([(QUESTION, text) for text in texts])]


def _scores(checkpoint: Path, texts: tuple[str, ...]) -> list[list[float]]:
    """Return the logit of each text behind one question."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            pair = tokenizer(QUESTION, text, truncation=True, return_tensors="pt")
            found.append(model(**pair).logits[0].tolist())
    return found


def _late_interaction(checkpoint: Path, texts: tuple[str, ...]) -> list[list[float]]:
    """Return the vectors of each text's tokens, and behind them those of its first words as a query."""
    from sentence_transformers import MultiVectorEncoder

    encoder = MultiVectorEncoder(str(checkpoint), device="cpu")
    documents, queries = encoder.encode_document([*texts]), encoder.encode_query([text[:QUERY] for text in texts])
    return [
        [*document.ravel().tolist(), *query.ravel().tolist()]
        for document, query in zip(documents, queries, strict=True)
    ]


def _inference_free(checkpoint: Path, texts: tuple[str, ...]) -> list[list[float]]:
    """Return the weights of each text's terms, and behind them those of its first words as a query; none of [CLS]."""
    import torch
    from sentence_transformers import SparseEncoder

    encoder = SparseEncoder(str(checkpoint), device="cpu")
    documents = encoder.encode_document([*texts]).to_dense()
    queries = encoder.encode_query([text[:QUERY] for text in texts]).to_dense()
    for weights in (documents, queries):
        weights[:, encoder.tokenizer.all_special_ids] = 0
    found: list[list[float]] = torch.cat([documents, queries], dim=1).tolist()
    return found


def _embed(states: Any, checkpoint: Path) -> Any:
    """Apply the modules of the checkpoint to the states of one text without padding: float32 [S, H] to [W]."""
    import torch
    from safetensors.torch import load_file

    vector = states
    for module in json.loads((checkpoint / "modules.json").read_text(encoding="utf-8"))[1:]:
        kind, folder = module["type"].rsplit(".", 1)[-1], checkpoint / module["path"]
        if kind == "Pooling":
            flags = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if flags.get("pooling_mode_cls_token"):
                vector = states[0]
            elif flags.get("pooling_mode_lasttoken"):
                vector = states[-1]
            else:
                vector = states.mean(dim=0)
        elif kind == "Dense":
            weights = load_file(folder / "model.safetensors")
            vector = torch.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
        elif kind == "Normalize":
            vector = vector / vector.norm()
    return vector
