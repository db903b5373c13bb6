"""Steps of the optimizers follow PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onnxtool.errors import ArtifactError
from onnxtool.training import onnxblock
from onnxtool.training.api import LinearLRScheduler
from onnxtool.training.onnxblock import optim
from tests.training.small_models import batch, load, make, parameters_of, perceptron, run_block

# The project's bar for losses over 100 steps.
RTOL = 1e-4
STEPS, WARMUP, RATE = 100, 10, 0.02


class Twin:
    """The same network in PyTorch."""

    def __init__(self, frozen: tuple[str, ...] = ()) -> None:
        arrays = parameters_of(perceptron())
        self.weights = {name: torch.tensor(array) for name, array in arrays.items()}
        self.trained = [weight.requires_grad_() for name, weight in self.weights.items() if name not in frozen]

    def loss(self, x: Any, labels: Any) -> Any:
        hidden = torch.relu(torch.tensor(x) @ self.weights["fc1.weight"].T + self.weights["fc1.bias"])
        logits = hidden @ self.weights["fc2.weight"].T + self.weights["fc2.bias"]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(labels))


CASES: dict[str, tuple[optim.Optimizer, Any, float | None]] = {
    "AdamW": (optim.AdamW(), lambda p: torch.optim.AdamW(p, eps=1e-6, weight_decay=0.0), None),
    "AdamW, decay and clipping": (
        optim.AdamW(weight_decay=0.1, betas=(0.8, 0.99), eps=1e-8, clip_grad=optim.ClipGradNorm(0.3)),
        lambda p: torch.optim.AdamW(p, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.1),
        0.3,
    ),
    "SGD": (optim.SGD(), torch.optim.SGD, None),
    "SGD, clipping": (optim.SGD(clip_grad=optim.ClipGradNorm(0.3)), torch.optim.SGD, 0.3),
    "SGD, momentum, decay and clipping": (
        optim.SGD(momentum=0.9, weight_decay=0.05, clip_grad=optim.ClipGradNorm(0.3)),
        lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.05),
        0.3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_follow_pytorch(tmp_path: Path, name: str) -> None:
    """With a schedule, two batches for each step, and a frozen layer."""
    block, reference, clip = CASES[name]
    frozen = ("fc1.bias",)
    make(tmp_path, perceptron(), requires_grad=["*"], frozen_params=list(frozen), optimizer=block)
    _, module, optimizer = load(tmp_path)
    schedule = LinearLRScheduler(optimizer, WARMUP, STEPS, RATE)
    twin = Twin(frozen)
    other = reference(twin.trained)
    for step in range(STEPS):
        for group in other.param_groups:
            group["lr"] = RATE * (step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP))
        assert optimizer.get_learning_rate() == pytest.approx(other.param_groups[0]["lr"])
        other.zero_grad()
        module.lazy_reset_grad()
        for part in range(2):
            x, labels = batch(seed=2 * step + part)
            wanted = twin.loss(x, labels)
            wanted.backward()
            assert module(x, labels) == pytest.approx(wanted.item(), rel=RTOL)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.trained, clip)
        other.step()
        optimizer.step()
        schedule.step()


def test_bias_correction_can_be_left_out(tmp_path: Path) -> None:
    """The first step is then that of moments that start at zero."""
    make(tmp_path, perceptron(), optimizer=optim.AdamW(bias_correction=False))
    state, module, optimizer = load(tmp_path)
    optimizer.set_learning_rate(0.1)
    before = state.parameters["fc2.bias"].data
    module(*batch())
    gradient = state.parameters["fc2.bias"].grad
    assert gradient is not None
    optimizer.step()
    wanted = before - 0.1 * 0.1 * gradient / (np.sqrt(0.001 * gradient**2) + 1e-6)
    np.testing.assert_allclose(state.parameters["fc2.bias"].data, wanted, rtol=1e-5)


def test_gradients_are_clipped_together() -> None:
    """By the norm of all, and not beyond it."""
    x, y = np.array([3, 0], np.float32), np.array([[4]], np.float32)
    small, same = run_block(optim.ClipGradNorm(1.0), {"x": x, "y": y})
    np.testing.assert_allclose(small, x / 5, rtol=1e-5)
    np.testing.assert_allclose(same, y / 5, rtol=1e-5)
    np.testing.assert_array_equal(run_block(optim.ClipGradNorm(10.0), {"x": x})[0], x)


def test_the_number_of_kernels_does_not_grow_with_the_parameters() -> None:
    """All lie in one buffer."""

    def nodes(parameters: list[Any]) -> int:
        block = optim.AdamW()
        with onnxblock.empty_base():
            block((parameters, []))
        return len(block.to_model_proto().graph.node)

    tensors = list(perceptron().graph.initializer)
    assert nodes(tensors) == nodes(tensors[:1])


def test_an_optimizer_without_parameters_is_refused() -> None:
    """And so are parameters that it cannot work on."""
    half = onnx.numpy_helper.from_array(np.zeros(3, np.float16), "w")
    for parameters, message in (([], "no parameter to optimize"), ([half], "w are not float32")):
        with onnxblock.empty_base(), pytest.raises(ArtifactError, match=message):
            optim.AdamW()((parameters, []))


def test_a_norm_of_zero_is_refused() -> None:
    """Nothing would be learned."""
    with pytest.raises(ArtifactError, match="norm 0"):
        optim.ClipGradNorm(0)
