"""text-embeddings-inference, whose router runs graphs with onnxruntime (backends/ort/src/lib.rs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxtool.checkpoint.pooling_module import POOLING_MODES
from onnxtool.checkpoint.pooling_modules import Pooling
from onnxtool.checkpoint.sentence_modules import TRANSFORMER_NAMES, positive
from onnxtool.errors import TargetError
from onnxtool.export.target import (
    CLASSIFIERS,
    DENSE,
    POOLED_BY_CONSUMER,
    POOLED_IN_GRAPH,
    SPARSE,
    TOKENIZER_FILES,
    Delivery,
    Target,
    TargetModel,
    read_object,
    write_json,
)

# Settings that it reads from config.json, and the names it knows for each.
_CONFIG_KEYS = {
    "architectures": ("architectures",),
    "model_type": ("model_type",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
}
_MODES = ("cls", "mean", "lasttoken")


class TextEmbeddingsInference(Target):
    """Reads the model size from config.json, and legacy flags from 1_Pooling/config.json."""

    name = "tei"
    title = "text-embeddings-inference"
    uses = (POOLED_BY_CONSUMER, POOLED_IN_GRAPH, CLASSIFIERS)
    graph = "model.onnx"
    files = ("config.json", *TOKENIZER_FILES)
    max_ir = 10
    max_opset = 21
    functions = ("Sigmoid", "Softmax") * 2  # unless `raw_scores` is set (core/src/infer.rs)
    refused = ((SPARSE, "its onnxruntime backend has no SPLADE pooling; serve the safetensors with --pooling splade"),)

    def write_files(self, to: Delivery) -> None:
        """Add settings that it reads under names the checkpoint does not use."""
        _complete_config(to.folder / "config.json", to.config)
        for name in TRANSFORMER_NAMES:
            if (to.folder / name).is_file():
                _state_length(to.folder / name, to.max_length or to.config.max_position_embeddings)
        modes = next((module.modes for module in to.model.modules if isinstance(module, Pooling)), ())
        if to.model.head is None and len(modes) == 1:
            _write_flags(to.folder / "1_Pooling" / "config.json", modes[0])

    def instruction(self, model: TargetModel) -> str:
        """Name the router option to use if the files do not say how to pool."""
        if model.use.kind != DENSE or model.pooling_mode in _MODES:
            return ""
        in_graph = model.head is not None
        why = "it asks for one, but the graph has already pooled" if in_graph else "the checkpoint names no pooling"
        return f"start text-embeddings-router with --pooling mean: {why}"


def _complete_config(path: Path, config: Any) -> None:
    content = read_object(path)
    missing = [key for key, names in _CONFIG_KEYS.items() if not any(name in content for name in names)]
    changes = {key: getattr(config, key, None) for key in missing}
    unknown = [key for key, value in changes.items() if value is None]
    if unknown:
        raise TargetError(
            f"text-embeddings-inference needs {', '.join(unknown)} in config.json, which this model does not have",
            "serve it from Python, or pass --target plain",
        )
    if changes:
        write_json(path, {**content, **changes})


def _state_length(path: Path, longest: int) -> None:
    """Write the longest text, which sentence-transformers 6 leaves to the tokenizer; the router demands it here."""
    content = read_object(path)
    if positive(content.get("max_seq_length")) is None:
        write_json(path, {**content, "max_seq_length": longest})


def _write_flags(path: Path, mode: str) -> None:
    """Write the legacy flags for a pooling mode, which are all that text-embeddings-inference reads."""
    content = read_object(path) if path.is_file() else {}
    flags = {row.flag: name == mode for name, row in POOLING_MODES.items()}
    if any(content.get(flag) is not value for flag, value in flags.items()):
        path.parent.mkdir(exist_ok=True)
        write_json(path, {**content, **flags})


TARGET = TextEmbeddingsInference()
