"""Artifacts of a file train what the network has, and refuse what PyTorch refuses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from onnxtool.errors import InputError
from onnxtool.training import artifacts
from onnxtool.training.api import CheckpointState, Module
from tests.graphs import of_text
from tests.training.small_models import load, make, perceptron


class Equal(nn.Module):
    """Scales and biases that are equal at the start, and an embedding with a padding index."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.batch = nn.BatchNorm1d(6)
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Normalize three times: [N, S] to [N, 3]."""
        x = self.batch(functional.silu(self.embedding(ids)).mean(1))
        return self.head(self.second(functional.silu(self.first(x))))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Equal, Path]:
    """Return a new network, and the file that torch's exporter writes of it, which holds equal tensors once."""
    torch.manual_seed(0)
    network, path = Equal().eval(), tmp_path_factory.mktemp("equal") / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about PyTorch itself
        torch.onnx.export(
            network,
            (torch.tensor([[0, 1, 2], [3, 2, 2]]),),
            path,
            dynamo=True,
            input_names=["ids"],
            dynamic_shapes=({0: torch.export.Dim("N")},),
            verbose=False,
        )
    return network, path


def test_parameters_that_start_equal_are_trained_apart(exported: tuple[Equal, Path], tmp_path: Path) -> None:
    """The losses of four steps are PyTorch's, and so are the names; the padding row is not trained."""
    network, path = exported
    report = make(tmp_path, path, loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.SGD, require_all=True)
    named = {name for name, _ in network.named_parameters() if not name.startswith("head.weight")}
    assert named <= set(report.trained)
    assert len(report.trained) == len(named) + 1
    ids, target = torch.tensor([[0, 1, 2], [3, 2, 2], [5, 6, 2]]), torch.randn(3, 3)
    _, module, step = load(tmp_path)
    step.set_learning_rate(0.1)
    optimizer = torch.optim.SGD(network.train().parameters(), lr=0.1)
    for _ in range(4):
        ours = module(ids.numpy(), target.numpy())
        step.step()
        module.lazy_reset_grad()
        theirs = functional.mse_loss(network(ids), target)
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        np.testing.assert_allclose(ours, theirs.item(), rtol=1e-4)


@pytest.mark.parametrize("number", [-1, -100, 7])
def test_ids_outside_of_the_table_are_refused(exported: tuple[Equal, Path], tmp_path: Path, number: int) -> None:
    """ONNX counts negative indices from the last row."""
    make(tmp_path, exported[1], loss=artifacts.LossType.MSELoss)
    _, module, _ = load(tmp_path)
    ids = np.array([[0, 1, 2], [3, 2, number]])
    for mode in (True, False):
        with pytest.raises(InputError, match=rf"input ids .*index {number}, .*7 rows"):
            module.train(mode)(ids, np.zeros((2, 3), np.float32))


def test_labels_of_another_number_than_the_rows_are_refused(tmp_path: Path) -> None:
    """Axes of one name have one size."""
    make(tmp_path, perceptron())
    _, module, _ = load(tmp_path)
    with pytest.raises(InputError, match=r"input labels .*axis 0 has to be 4, as N is in x"):
        module(np.zeros((4, 5), np.float32), np.zeros(3, np.int64))


@pytest.mark.parametrize(
    ("equation", "shape", "scale"),
    [
        ("bd,bd->bd", (4, 3), (1, 3)),
        ("bd,bd->b", (1, 3), (4, 1)),
        ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 1, 3, 4)),
        ("b...d,...d->b...", (2, 5, 3), (1, 3)),
        ("iij,jk->ik", (3, 3, 2), (2, 4)),
    ],
)
def test_gradients_of_einsum_are_those_of_pytorch(
    tmp_path: Path, equation: str, shape: tuple[int, ...], scale: tuple[int, ...]
) -> None:
    """With sizes of 1, an ellipsis, and a letter twice."""
    draw = np.random.default_rng(0)
    x, s = (draw.standard_normal(sizes).astype(np.float32) for sizes in (shape, scale))
    axes = ", ".join(f"d{axis}" for axis in range(len(shape)))
    body = f'y = Einsum <equation="{equation}"> (x, s) z = Mul(y, y) loss = ReduceSum <keepdims=0> (z)'
    arguments: dict[str, Any] = {"requires_grad": ["s", "x"], "artifact_directory": tmp_path}
    artifacts.generate_artifacts(of_text(f"g (float[{axes}] x) => (float loss) {{ {body} }}", {"s": s}), **arguments)
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    module(x)
    tensors = [torch.tensor(array, requires_grad=True) for array in (x, s)]
    torch.einsum(equation, *tensors).square().sum().backward()
    for name, tensor in zip("xs", tensors, strict=True):
        np.testing.assert_allclose(module.gradient(name), tensor.grad, rtol=1e-4, atol=1e-4)
