"""Whole runs of OrtTrainer against those of Trainer, as scripts/check_trainer.py makes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import Trainer

from onnxtool.training import OrtTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import check_trainer
from check_trainer import CASES, TOLERANCE

STEPS = 14  # more than two epochs of six, with a smaller last batch each; the stop is inside of the second


# The other cases of the script differ in what tests/training/trainer/test_ort_trainer.py trains for a few steps.
(CASE,) = (case for case in CASES if case.name == "bert, masked tokens")


@pytest.fixture(autouse=True)
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script trains two; a second one only takes longer to compile."""
    monkeypatch.setitem(check_trainer.SIZES, "num_hidden_layers", 1)


@pytest.mark.slow
def test_steps_have_the_same_losses_with_a_stop_and_without(tmp_path: Path) -> None:
    """With dropout, smoothing, accumulation and pruned rows; the stop is in the middle, and a new Trainer goes on."""
    plain = check_trainer.train(Trainer, CASE, tmp_path / "plain", STEPS)
    ours = check_trainer.train(OrtTrainer, CASE, tmp_path / "ours", STEPS)
    assert len(ours.losses) == STEPS
    assert check_trainer.loss_difference(ours, plain) <= TOLERANCE
    checkpoint = tmp_path / "ours" / f"checkpoint-{STEPS // 2}"
    resumed = check_trainer.train(OrtTrainer, CASE, tmp_path / "resumed", STEPS, resumed_from=checkpoint)
    assert check_trainer.loss_difference(resumed, ours, STEPS // 2) <= TOLERANCE
    assert check_trainer.parameter_difference(resumed, ours) <= TOLERANCE


@pytest.mark.slow
def test_two_processes_have_the_losses_of_trainer_and_equal_parameters() -> None:
    """Gradients are averaged by DistributedDataParallel, the last batches are smaller; the processes check the rest."""
    assert check_trainer.two_processes(CASE, 6) <= TOLERANCE
