"""Steps of a large model run where they are faster, with the same losses."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from onnxtool.torch_backend import OrtBackendOptions
from onnxtool.training.trainer import step_choice
from onnxtool.training.trainer.losses import CriterionLoss
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss
from onnxtool.training.trainer.step_choice import StepChoice
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here

WIDTH = 1024  # a million parameters


class Clock:
    """Time that passes in steps alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def network(width: int = WIDTH) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 3))


def train(model: Any, parameters: Any, loss_of: Any, steps: int = 20) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for step in range(steps):
        rows = 2 + step % 3
        batch = torch.randn(rows, WIDTH), torch.arange(rows) % 3
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("costs", "where"), [((3.0, 2.0), "PyTorch"), ((2.0, 3.0), "onnxruntime")])
def test_steps_run_where_they_are_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, costs: tuple[float, float], where: str
) -> None:
    """Each way costs so much an element; the losses are PyTorch's, turns and dropout included."""
    clock = Clock()
    monkeypatch.setattr(step_choice, "time", clock)
    model = ModuleWithLoss(network(), compute_loss=CriterionLoss(torch.nn.CrossEntropyLoss()), dynamic=True)

    def costing(run: Any, cost: float) -> Any:
        def call(*given: Any) -> Any:
            inputs = next(value for value in given if isinstance(value, tuple))
            clock.now += cost * len(inputs[0])
            return run(*given)

        return call

    def loss_of(module: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = module(batch)
        if "_run" not in vars(module):  # what is compiled by now stays as it is
            vars(module)["_run"] = costing(module._run, costs[0])
            vars(module)["_loss"] = costing(module._loss, costs[1])
        return loss

    with caplog.at_level(logging.INFO, logger=step_choice.__name__):
        losses = train(model, model.parameters(), loss_of)
    eager = network()
    expected = train(
        eager, eager.parameters(), lambda net, batch: torch.nn.functional.cross_entropy(net(batch[0]), batch[1])
    )
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    steps = model.explain().steps
    assert steps is not None
    assert steps.in_onnxruntime == (where == "onnxruntime")
    assert steps.pytorch_ms / steps.onnxruntime_ms == pytest.approx(costs[1] / costs[0])
    assert f"training steps run in {where}: " in str(model.explain())
    assert [record.levelname for record in caplog.records] == ["INFO" if where == "onnxruntime" else "WARNING"]
    num_runs = model.backend.execution_count
    train(model, model.parameters(), loss_of, steps=3)
    assert (model.backend.execution_count > num_runs) == (where == "onnxruntime")
    assert copy.deepcopy(model).explain().steps is None


@pytest.mark.parametrize(
    ("width", "given"),
    [
        (8, {}),
        (WIDTH, {"placement": "onnxruntime"}),
        (WIDTH, {"options": OrtBackendOptions(dropout="fast")}),
        (WIDTH, {"options": OrtBackendOptions(assert_close_to_baseline=True)}),
        (WIDTH, {"mini_batch_size": 2}),
    ],
)
def test_steps_that_are_small_or_not_the_same_stay_in_onnxruntime(width: int, given: dict[str, Any]) -> None:
    """PyTorch would draw other masks, compare nothing, or take more memory."""
    loss = CriterionLoss(torch.nn.CrossEntropyLoss())
    assert not ModuleWithLoss(network(width), compute_loss=loss, **given)._choice.is_on


def test_steps_that_must_be_reproducible_stay_in_onnxruntime() -> None:
    """Timings are not reproducible."""
    choice = StepChoice.of("measured", network())
    assert choice.begin({}, 0) is not None
    torch.use_deterministic_algorithms(True)
    try:
        assert choice.begin({}, 0) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert not choice.is_on


def test_a_loss_without_a_backward_pass_is_not_timed() -> None:
    """All parameters are frozen."""
    model = ModuleWithLoss(
        network().requires_grad_(False), compute_loss=CriterionLoss(torch.nn.CrossEntropyLoss()), dynamic=True
    )
    assert not model((torch.randn(2, WIDTH), torch.arange(2))).requires_grad
    assert model.explain().steps is None
