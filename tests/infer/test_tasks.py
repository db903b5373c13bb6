"""A model without metadata is taken for what its outputs can only mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.checkpoint.tokenizer import TextTokenizer
from onnxtool.infer.descriptions import deduce_task
from onnxtool.infer.heads import head_for
from onnxtool.model_file import ModelFile
from tests.infer.tiny_models import VOCABULARY, TinyModel, table, write_checkpoint

V = len(VOCABULARY)
POOLED: dict[str, Any] = {"modules": {"Transformer": {}, "Pooling": {}}}
SPLADE: dict[str, Any] = {"modules": {"MLMTransformer": {}, "SpladePooling": {}}}
LABELS: dict[str, Any] = {"config": {"id2label": {"0": "no", "1": "yes", "2": "maybe"}}}


@pytest.mark.parametrize(
    ("output", "width", "pooled", "files", "task"),
    [
        ("sparse", V, True, {}, "sparse-encoding"),
        ("sentence_embedding", 4, True, {}, "sentence-similarity"),
        ("text_embeds", 4, True, {}, "sentence-similarity"),
        ("last_hidden_state", 4, False, POOLED, "sentence-similarity"),
        ("last_hidden_state", 4, False, {}, "feature-extraction"),
        ("logits", V, False, {}, "fill-mask"),
        ("logits", V + 49, False, {}, "fill-mask"),
        ("logits", V, False, SPLADE, "sparse-encoding"),
        ("logits", V, False, {"tokenizer_config": {"mask_token": None}}, "text-generation"),
        ("logits", 3, True, LABELS, "text-classification"),
        ("logits", 3, False, LABELS, "token-classification"),
        ("logits", 4, True, LABELS, "unknown"),
        ("logits", 3, True, {}, "unknown"),
        ("logits", 3, False, {}, "unknown"),
        ("scores", V, False, {}, "unknown"),
    ],
)
def test_outputs_tell_the_task(
    tmp_path: Path, output: str, width: int, pooled: bool, files: dict[str, Any], task: str
) -> None:
    """By name, rank and width together with the checkpoint's files; else the task is unknown."""
    model = ModelFile.open(TinyModel(table(V, width), output, pooled=pooled).write(tmp_path / "model.onnx"))
    folder = CheckpointFolder(write_checkpoint(tmp_path / "model", **files))
    assert model.stated_task == ""
    assert deduce_task(model, folder, V) == task


@pytest.mark.parametrize(
    ("task", "files", "kind"),
    [
        ("feature-extraction", POOLED, "similarities"),
        ("feature-extraction", {}, "shapes"),
        ("question-answering", {}, "shapes"),
        ("text-generation", {}, "tokens"),
        ("other", {}, "shapes"),
    ],
)
def test_tasks_without_a_head_of_their_own_are_answered_with_shapes(
    tmp_path: Path, task: str, files: dict[str, Any], kind: str
) -> None:
    """But a feature extractor that says how to pool gives embeddings."""
    path = TinyModel(table(V, 4), "last_hidden_state", metadata={"onnxtool.task": task}).write(tmp_path / "model.onnx")
    model = ModelFile.open(path)
    assert model.stated_task == task
    folder = CheckpointFolder(write_checkpoint(tmp_path / "model", **files))
    assert head_for(task, model, folder, TextTokenizer(folder)).kind == kind
