"""The checkpoints that check_consumers.py exports: a trained one, and tiny ones with each way of pooling."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from make_models import ROOT, TOKENIZER_FILES, make_model, trained_model

_WIDTH = 32
_SHAPE: dict[str, Any] = {"max_position_embeddings": 512, "initializer_range": 0.3}
_BERT = {"hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **_SHAPE}
_DISTIL = {"dim": _WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **_SHAPE}
_MODERN = {**_BERT, "vocab_size": 30522, "pad_token_id": 0}
_MODERN |= {"bos_token_id": 101, "eos_token_id": 102, "cls_token_id": 101, "sep_token_id": 102}
_DEBERTA = {**_BERT, "vocab_size": 30522, "relative_attention": True, "position_biased_input": False}
_DEBERTA |= {"pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
# Which share of a vocabulary a text of a trained SPLADE has, about.
_SHARE_OF_TERMS = 0.005
# Checkpoints of tests/retrieval: a late-interaction encoder in the layout of Stanford's ColBERT, with its usual
# settings; a sparse encoder whose queries are looked up; a classifier of pairs; and a decoder that says yes or no.
_SAVED = {
    "colbert": "Stanford without metadata",
    "inference-free": "inference-free SPLADE",
    "reranker": "one label",
    "decoder-reranker": "chat template of Qwen3-Reranker, prompts, long texts",
}
# Architecture, configuration, and what follows the transformer.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "splade": ("BertForMaskedLM", _BERT, ("SpladePooling",)),
    "splade-distil": ("DistilBertForMaskedLM", _DISTIL, ("SpladePooling",)),
    "cls": ("BertModel", _BERT, ("cls",)),
    "lasttoken": ("BertModel", _BERT, ("lasttoken", "Normalize")),
    "distil": ("DistilBertModel", _DISTIL, ("mean", "Normalize")),
    "modernbert": ("ModernBertModel", _MODERN, ("mean", "Normalize")),
    "deberta": ("DebertaV2Model", _DEBERTA, ("mean", "Normalize")),
    "mean-dense": ("BertModel", _BERT, ("mean", "Dense", "Normalize")),
}


def build_model(name: str, folder: Path) -> Path:
    """Build the model called `name` into `folder`, unless it exists, and return its path."""
    if name == "minilm":
        return trained_model()
    if name == "tagger":
        return make_model("tiny-tagger", folder)
    target, partial, base = (folder / f"{name}{part}" for part in ("", "-partial", "-base"))
    if target.is_dir():
        return target
    for path in (partial, base):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    (_save_case if name in _SAVED else _save_encoder)(name, partial, base)
    return partial.rename(target)


def _save_case(name: str, target: Path, base: Path) -> None:
    """Save a checkpoint of tests/retrieval; a sparse one with the double logarithm, which fastembed has for it."""
    sys.path.insert(0, str(ROOT))
    from tests.retrieval.checkpoints import CASES

    next(case for case in CASES if case.name == _SAVED[name]).make(target, base)
    for path in target.glob("*_SpladePooling/config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**settings, "activation_function": "log1p_relu"}), encoding="utf-8")


def _save_encoder(name: str, target: Path, base: Path) -> None:
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer, SparseEncoder
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    architecture, settings, names = MODELS[name]
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).eval()
    is_sparse = "SpladePooling" in names
    if is_sparse:
        _make_sparse(model)
    model.save_pretrained(base)
    for file in TOKENIZER_FILES:
        shutil.copyfile(trained_model() / file, base / file)
    task = "fill-mask" if is_sparse else "feature-extraction"
    modules: list[Any] = [Transformer(str(base), max_seq_length=512, transformer_task=task)]
    for module in names:
        if module == "SpladePooling":
            modules.append(SpladePooling("max"))
        elif module == "Dense":
            modules.append(Dense(_WIDTH, 16, activation_function=torch.nn.Tanh()))
        else:
            modules.append(Normalize() if module == "Normalize" else Pooling(_WIDTH, module))
    encoder = (SparseEncoder if is_sparse else SentenceTransformer)(modules=modules, device="cpu")
    encoder.save_pretrained(str(target), create_model_card=False)


def _make_sparse(model: Any) -> None:
    """Shift the bias of the vocabulary so that texts have as many terms as those of a trained model."""
    import torch

    ids = torch.randint(1000, model.config.vocab_size, (8, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        largest = model(input_ids=ids).logits.max(dim=1).values
        shift = torch.quantile(largest, 1 - _SHARE_OF_TERMS, dim=1).mean()
    with torch.no_grad():
        model.get_output_embeddings().bias -= shift
