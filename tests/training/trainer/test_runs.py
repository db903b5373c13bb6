"""Whole runs of OrtTrainer against those of Trainer; single steps are in test_ort_trainer.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Trainer

from onnxtool.training import OrtTrainer
from tests.training.trainer.runs import train, two_processes

TOLERANCE = 1e-5
STEPS = 10  # two and a half epochs of four; the stop is inside of the second


@pytest.mark.slow
def test_steps_have_the_same_losses_with_a_stop_and_without(tmp_path: Path) -> None:
    """With dropout, smoothing, accumulation and pruned rows; the stop is in the middle, and a new Trainer goes on."""
    plain = train(Trainer, tmp_path / "plain", STEPS)
    ours = train(OrtTrainer, tmp_path / "ours", STEPS)
    assert len(ours.losses) == STEPS
    assert ours.loss_difference(plain) <= TOLERANCE
    checkpoint = tmp_path / "ours" / f"checkpoint-{STEPS // 2}"
    resumed = train(OrtTrainer, tmp_path / "resumed", STEPS, resumed_from=checkpoint)
    assert resumed.loss_difference(ours, STEPS // 2) <= TOLERANCE
    assert resumed.parameter_difference(ours) <= TOLERANCE


@pytest.mark.slow
def test_two_processes_have_the_losses_of_trainer_and_equal_parameters() -> None:
    """Gradients are averaged by DistributedDataParallel; the processes check the rest."""
    assert two_processes(3) <= TOLERANCE
