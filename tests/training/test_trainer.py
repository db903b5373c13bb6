"""OrtTrainer gives the losses and parameters of transformers' Trainer, in whatever way that is asked to train."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.training import ModuleWithLoss, OrtTrainer, create_model_with_loss
from tests.training.trainers import (
    Example,
    classified,
    classifier,
    continued,
    decoder,
    losses_of,
    require_same_training,
    trainer_of,
)


def padded(examples: list[Example]) -> Example:
    """Pad to the longest text of the batch."""
    texts = [example["input_ids"] for example in examples]
    masks = [example["attention_mask"] for example in examples]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


def both(tmp_path: Path, make: Any, examples: list[Example], arguments: Any = None, **of_trainer: Any) -> OrtTrainer:
    """Train by both, insist on the same, and return the OrtTrainer."""
    plain = trainer_of(Trainer, make(), examples, tmp_path / "plain", arguments, **of_trainer)
    plain.train()
    ours = trainer_of(OrtTrainer, make(), examples, tmp_path / "ours", arguments, **of_trainer)
    ours.train()
    require_same_training(plain, ours)
    assert isinstance(ours, OrtTrainer)
    return ours


def test_smoothed_labels_and_clipped_gradients(tmp_path: Path) -> None:
    """With dropout, whose masks are those of the same seed."""
    trainer = both(
        tmp_path,
        classifier,
        classified(12),
        {"label_smoothing_factor": 0.1, "max_grad_norm": 0.1, "optim": "adamw_torch"},
    )
    assert [graph.kind for graph in trainer.explain().graphs] == ["forward", "backward"]


def test_the_last_accumulation_is_smaller_and_counts_its_labels(tmp_path: Path) -> None:
    """11 texts are batches of 4, 4 and 3, two a step; each has its own number of labels that count."""
    trainer = both(
        tmp_path, decoder, continued(11), {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}
    )
    assert len(losses_of(trainer)) == 4
    assert len(trainer.explain().graphs) <= 4  # one more pair for the size that changes
