"""The checkpoints that check_consumers.py exports: a trained one, and tiny ones with each way of pooling."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from make_models import ROOT, TOKENIZER_FILES, trained_model

_WIDTH = 32
_SHAPE: dict[str, Any] = {"max_position_embeddings": 512, "initializer_range": 0.3}
_BERT = {"hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, **_SHAPE}
_DISTIL = {"dim": _WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **_SHAPE}
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

# Architecture, configuration, and the modules after the transformer with their settings.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[tuple[str, dict[str, Any]], ...]]] = {
    "minilm": ("", {}, ()),
    "splade": ("BertForMaskedLM", _BERT, (("SpladePooling", {"pooling_strategy": "max"}),)),
    "splade-distil": ("DistilBertForMaskedLM", _DISTIL, (("SpladePooling", {"pooling_strategy": "max"}),)),
    "cls": ("BertModel", _BERT, (("Pooling", {"pooling_mode_cls_token": True}),)),
    "lasttoken": ("BertModel", _BERT, (("Pooling", {"pooling_mode_lasttoken": True}), ("Normalize", {}))),
    "distil": ("DistilBertModel", _DISTIL, (("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {}))),
    "mean-dense": (
        "BertModel",
        _BERT,
        (
            ("Pooling", {"pooling_mode_mean_tokens": True}),
            ("Dense", {"in_features": _WIDTH, "out_features": 16, "bias": True}),
            ("Normalize", {}),
        ),
    ),
}


def build_model(name: str, folder: Path) -> Path:
    """Build the model called `name` into `folder`, unless it is there, and return where."""
    import torch
    import transformers

    target = folder / name
    if name in _SAVED:
        return _build_saved(name, target)
    architecture, settings, modules = MODELS[name]
    if not architecture:
        return trained_model()
    if (target / "modules.json").is_file():
        return target
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**settings, architectures=[architecture])
    torch.manual_seed(0)
    model = model_class(config).eval()
    if architecture.endswith("ForMaskedLM"):
        _make_sparse(model)
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target)
    for file in TOKENIZER_FILES:
        shutil.copyfile(trained_model() / file, target / file)
    _write_modules(target, modules, sparse=architecture.endswith("ForMaskedLM"))
    return target


def _build_saved(name: str, target: Path) -> Path:
    """Build a checkpoint of tests/retrieval; a sparse one with the double logarithm, which fastembed has for it."""
    sys.path.insert(0, str(ROOT))
    from tests.retrieval.checkpoints import CASES

    if target.is_dir():
        return target
    case = next(case for case in CASES if case.name == _SAVED[name])
    base = target.with_name(f"{name}-base")
    shutil.rmtree(base, ignore_errors=True)
    for path in (target, base):
        path.mkdir(parents=True)
    case.make(target, base)
    for path in target.glob("*_SpladePooling/config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, {**settings, "activation_function": "log1p_relu"})
    return target


def _make_sparse(model: Any) -> None:
    """Shift the bias of the vocabulary so that texts have as many terms as those of a trained model."""
    import torch

    ids = torch.randint(1000, model.config.vocab_size, (8, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        largest = model(input_ids=ids).logits.max(dim=1).values
        shift = torch.quantile(largest, 1 - _SHARE_OF_TERMS, dim=1).mean()
    with torch.no_grad():
        model.get_output_embeddings().bias -= shift


def _write_modules(folder: Path, modules: tuple[tuple[str, dict[str, Any]], ...], *, sparse: bool) -> None:
    """Write what sentence-transformers saves: modules.json, and a folder for each module with settings or weights."""
    import torch
    from safetensors.torch import save_file

    package = "sentence_transformers.models"
    first = "sentence_transformers.sparse_encoder.models.MLMTransformer" if sparse else f"{package}.Transformer"
    listed = [{"idx": 0, "name": "0", "path": "", "type": first}]
    for place, (kind, settings) in enumerate(modules, start=1):
        path = folder / f"{place}_{kind}"
        path.mkdir()
        if kind == "Pooling":
            settings = {"word_embedding_dimension": _WIDTH, "pooling_mode_mean_tokens": False, **settings}
        if kind == "Dense":
            settings = {**settings, "activation_function": "torch.nn.modules.activation.Tanh"}
            linear = torch.nn.Linear(settings["in_features"], settings["out_features"])
            save_file(
                {f"linear.{name}": tensor.data for name, tensor in linear.named_parameters()},
                path / "model.safetensors",
            )
        _write_json(path / "config.json", settings)
        where = "sentence_transformers.sparse_encoder.models" if kind == "SpladePooling" else package
        listed.append({"idx": place, "name": str(place), "path": path.name, "type": f"{where}.{kind}"})
    _write_json(folder / "modules.json", listed)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    _write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SparseEncoder" if sparse else "SentenceTransformer",
            "prompts": {},
            "default_prompt_name": None,
        },
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
