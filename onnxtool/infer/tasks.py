"""What a model is for: what its metadata says, else what its outputs can only mean."""

from __future__ import annotations

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import TASK_KEY
from onnxtool.reports import TensorInfo

UNKNOWN_TASK = "unknown"

_EMBEDDINGS = frozenset({"sentence_embedding", "text_embeds"})  # the second one of a dual encoder
_HIDDEN_STATES = frozenset({"last_hidden_state", "token_embeddings"})


def stated_task(model: ModelFile) -> str:
    """Return the task in the model's metadata, or an empty string."""
    return model.metadata.get(TASK_KEY, "")


def deduce_task(model: ModelFile, folder: CheckpointFolder, vocabulary_size: int) -> str:
    """Deduce the task from names and shapes of the outputs and from the checkpoint's files.

    Conservative: what could be two things is UNKNOWN_TASK, and the model is answered with shapes.
    """
    outputs = {info.name: info for info in model.structure.outputs}
    if "sparse" in outputs or {"output_idx", "output_weights"} <= set(outputs):
        return "sparse-encoding"
    if _EMBEDDINGS & set(outputs):
        return "sentence-similarity"
    if _HIDDEN_STATES & set(outputs):
        return "sentence-similarity" if folder.sentence_modules.find("Pooling") is not None else "feature-extraction"
    if {"start_logits", "end_logits"} <= set(outputs):
        return "question-answering"
    if "logits" in outputs:
        return _task_of_logits(outputs["logits"], folder, vocabulary_size)
    return UNKNOWN_TASK


def _task_of_logits(logits: TensorInfo, folder: CheckpointFolder, vocabulary_size: int) -> str:
    names = folder.read("config.json").get("id2label")
    num_labels = len(names) if isinstance(names, dict) else None
    match logits.shape:
        case (_, int(width)) if width == num_labels:
            return "text-classification"
        case (_, _, int(width)) if width == num_labels:
            return "token-classification"
        case (_, _, int(width)) if width >= vocabulary_size:
            if folder.sentence_modules.find("SpladePooling") is not None:
                return "sparse-encoding"
            # A decoder gives logits of the same shape; only masked language models have a token to fill in.
            return "fill-mask" if _has_mask_token(folder) else "text-generation"
    return UNKNOWN_TASK


def _has_mask_token(folder: CheckpointFolder) -> bool:
    return any(folder.read(name).get("mask_token") for name in ("tokenizer_config.json", "special_tokens_map.json"))
