"""What OrtTrainer refuses, it refuses before it trains, with the way out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onnxtool.errors import TrainingError
from onnxtool.training import ModuleWithLoss, OrtTrainer
from onnxtool.training.trainer.ort_trainer import check_distribution, check_request
from tests.training.trainer.trainers import classified, classifier, trainer_of


def test_a_text_longer_than_the_positions_is_pytorchs_error() -> None:
    """Not that of its compiler, which stops first."""

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(6, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[: x.shape[1]]

    model = ModuleWithLoss(Positions(), compute_loss=lambda model, inputs, *_: model(inputs["x"]).sum())
    with pytest.raises(RuntimeError) as failure:
        model({"x": torch.randn(2, 9, 4)})
    assert type(failure.value) is RuntimeError


def test_torch_compile_cannot_be_asked_for_as_well(tmp_path: Path) -> None:
    """Two compilers of one step."""
    with pytest.raises(TrainingError, match="'inductor'") as failure:
        trainer_of(OrtTrainer, classifier(), classified(4), tmp_path, {"torch_compile": True})
    assert "leave torch_compile out" in failure.value.hint


@pytest.mark.parametrize(
    ("wrap", "way_out"), [(partial(torch.compile, backend="eager"), "_orig_mod"), (ModuleWithLoss, "model.module")]
)
def test_the_model_has_to_be_the_original(tmp_path: Path, wrap: Any, way_out: str) -> None:
    """What compiles it, or computes its loss, is put around it by the Trainer."""
    with pytest.raises(TrainingError) as failure:
        trainer_of(OrtTrainer, wrap(classifier()), classified(4), tmp_path)
    assert way_out in failure.value.hint


@pytest.mark.parametrize(("argument", "name"), [("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")])
def test_a_model_in_parts_is_refused(argument: str, name: str) -> None:
    """Neither library is asked anything."""
    nothing = {"torch_compile": False, "deepspeed": None, "fsdp": None}
    with pytest.raises(TrainingError, match=f"^{name} splits the model") as failure:
        check_request(SimpleNamespace(**{**nothing, argument: "full_shard"}), None)
    assert "torchrun" in failure.value.hint


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("is_fsdp_enabled", True, "accelerate is set to split"),
        ("is_deepspeed_enabled", True, "accelerate is set to split"),
        ("is_model_parallel", True, "several devices"),
        ("is_distributed_loading_by_transformers", True, "several devices"),
        ("args", SimpleNamespace(n_gpu=2), "on 2 devices"),
    ],
)
def test_ways_to_use_several_devices_but_one_are_refused(tmp_path: Path, name: str, value: Any, message: str) -> None:
    """That one is a process a device."""
    trainer = trainer_of(OrtTrainer, classifier(), classified(4), tmp_path)
    check_distribution(trainer)
    setattr(trainer, name, value)
    with pytest.raises(TrainingError, match=message) as failure:
        check_distribution(trainer)
    assert "torchrun" in failure.value.hint


def test_the_compiler_of_accelerate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is set by a configuration file or the environment."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    try:
        with pytest.raises(TrainingError, match="INDUCTOR"):
            trainer_of(OrtTrainer, classifier(), classified(4), tmp_path)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
