"""Logits become scores by the function of the checkpoint's own library: CrossEncoder, or transformers' pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder

from onnxtool import EvaluateOptions
from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.errors import CheckpointError, InputError
from onnxtool.evaluation.options import RERANKER
from onnxtool.evaluation.pytorch import open_checkpoint
from onnxtool.export.target_specification import other_scores
from onnxtool.export.targets import TARGETS
from onnxtool.infer.heads.labels import Labels, Scores
from tests.infer.tiny_models import VOCABULARY, write_checkpoint
from tests.module_files import write_modules

SINGLE = "single_label_classification"  # which transformers refuses for one label
PROBLEMS = (None, "regression", "multi_label_classification", SINGLE)
NEW, OLD = "sentence_transformers", "sbert_ce_default_activation_function"
SIGMOID, TANH = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.activation.Tanh"
ACTIVATIONS: tuple[dict[str, Any], ...] = (
    *({NEW: {"activation_fn": f"torch.nn.modules.{name}"}} for name in ("linear.Identity", "activation.Softmax")),
    {NEW: {"activation_fn": TANH}, OLD: SIGMOID},
    {NEW: {"activation_fn": "evil.Function"}, OLD: SIGMOID},
    {NEW: {"activation_fn": None}, OLD: SIGMOID},
    {NEW: {"version": "5.0.0"}, OLD: SIGMOID},
    {OLD: TANH, "problem_type": "multi_label_classification"},
    {OLD: "evil.Function", "problem_type": "regression"},
    {"activation_fn": SIGMOID, NEW: {"activation_fn": TANH}},  # the first one in config_sentence_transformers.json
    {"activation_fn": "evil.Function", "problem_type": "regression"},
)
LOGITS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32) * 2


def checkpoint(folder: Path, num_labels: int, content: dict[str, Any] | None = None) -> Path:
    """Save a classifier of one layer; `activation_fn` is what CrossEncoder of today writes beside its modules."""
    settings: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": num_labels}
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    write_checkpoint(folder)
    config = transformers.BertConfig(**settings, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    path, content = folder / "config.json", dict(content or {})
    if "activation_fn" in content:
        encoder = {"model_type": "CrossEncoder", "activation_fn": content.pop("activation_fn")}
        task = {"transformer_task": "sequence-classification"}
        write_modules(folder, config_sentence_transformers=encoder, sentence_bert_config=task)
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    return folder


def scores(folder: Path, logits: Any) -> Any:
    """Return what onnxtool makes of logits."""
    files = CheckpointFolder(folder)
    return Scores.of(files).activation(logits) if logits.shape[1] == 1 else Labels.of(files).function(logits)


@pytest.mark.parametrize(
    ("num_labels", "problem"), [(n, problem) for n in (1, 3) for problem in PROBLEMS if n > 1 or problem != SINGLE]
)
def test_a_classifier_is_scored_as_by_the_pipeline(tmp_path: Path, num_labels: int, problem: str | None) -> None:
    """By the number of labels and `problem_type`, where no CrossEncoder saved the checkpoint."""
    folder, logits = checkpoint(tmp_path, num_labels, {"problem_type": problem}), LOGITS[:, :num_labels]
    pipeline: Any = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    found = scores(folder, logits)
    for own, row in zip(found, logits, strict=True):
        wanted = pipeline.postprocess({"logits": torch.from_numpy(row[None])}, top_k=None, _legacy=False)
        assert sorted(own, reverse=True) == pytest.approx([label["score"] for label in wanted], abs=1e-6)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
@pytest.mark.parametrize("config", ACTIVATIONS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_cross_encoder_is_scored_as_by_its_library(tmp_path: Path, num_labels: int, config: dict[str, Any]) -> None:
    """By the activation that it reads first, or by its default where it trusts none, whatever `problem_type` says."""
    folder, logits = checkpoint(tmp_path, num_labels, config), LOGITS[:, :num_labels]
    wanted: Any = CrossEncoder(str(folder), device="cpu", local_files_only=True).activation_fn
    np.testing.assert_allclose(scores(folder, logits), wanted(torch.from_numpy(logits)).numpy(), atol=1e-6)


def test_a_random_activation_is_refused(tmp_path: Path) -> None:
    """A CrossEncoder applies RReLU as in training."""
    write_checkpoint(tmp_path, config={NEW: {"activation_fn": "torch.nn.modules.activation.RReLU"}})
    with pytest.raises(InputError, match="by RReLU, which is not computed here"):
        scores(tmp_path, LOGITS)


@pytest.mark.parametrize(
    ("target", "labels", "problem", "theirs"),
    [
        ("transformers.js", 1, None, "Softmax, and the checkpoint by Sigmoid"),
        ("transformers.js", 3, "regression", "Softmax, and the checkpoint by Identity"),
        ("transformers.js", 3, "multi_label_classification", ""),
        ("tei", 3, "multi_label_classification", "Softmax, and the checkpoint by Sigmoid"),
        ("tei", 1, None, ""),
        ("tei", 1, "multi_label_classification", ""),
        ("infinity", 3, "regression", ""),
    ],
)
def test_a_consumer_that_scores_otherwise_is_named(
    tmp_path: Path, target: str, labels: int, problem: str | None, theirs: str
) -> None:
    """Transformers.js and text-embeddings-inference know fewer functions, as their sources say."""
    files = CheckpointFolder(write_checkpoint(tmp_path, config={"problem_type": problem}))
    said = other_scores(TARGETS[target], files, is_single=labels == 1)
    assert theirs in said
    assert bool(said) == bool(theirs)


def test_a_base_of_several_labels_is_no_reranker(tmp_path: Path) -> None:
    """It is refused before anything is scored."""
    with pytest.raises(CheckpointError, match="has 3 labels, and a reranker has one"):
        open_checkpoint(str(checkpoint(tmp_path, 3)), RERANKER, EvaluateOptions())
