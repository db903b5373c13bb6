"""Artifacts of a file train what the network has, and refuse what PyTorch refuses."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from onnxtool.errors import ArtifactError, InputError
from onnxtool.training import artifacts
from onnxtool.training.api import CheckpointState, Module
from tests.graphs import of_text
from tests.training.small_models import load, make, perceptron


class Equal(nn.Module):
    """Scales and biases that are equal at the start, and an embedding with a padding index."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.conv = nn.Conv1d(6, 6, 1)
        self.batch, self.group = nn.BatchNorm1d(6), nn.GroupNorm(2, 6)
        self.first, self.second, self.layer = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        nn.init.zeros_(self.head.bias)
        nn.init.zeros_(self.layer.bias)
        nn.init.zeros_(self.conv.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Normalize four times, and multiply by one layer twice: [N, S] to [N, 3]."""
        x = functional.silu(self.conv(self.embedding(ids).transpose(1, 2)))
        x = self.group(functional.silu(self.batch(x.mean(2))))
        x = self.first(functional.silu(self.layer(functional.silu(self.layer(x)))))
        return self.head(self.second(functional.silu(x)))


def export(network: nn.Module, path: Path, *inputs: torch.Tensor, dynamo: bool = True, optimize: bool = True) -> None:
    """Write the file of a network with one of torch's exporters, whose first axis is dynamic."""
    axes: dict[str, Any] = (
        {"dynamic_shapes": ({0: torch.export.Dim("N")},), "optimize": optimize}
        if dynamo
        else {"dynamic_axes": {"ids": {0: "N"}}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about PyTorch itself
        torch.onnx.export(network.eval(), inputs, path, dynamo=dynamo, input_names=["ids"], verbose=False, **axes)


@pytest.fixture(scope="module", params=["dynamo", "torchscript"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Equal, Path]:
    """Return a new network, and the file that torch's exporter writes of it, which holds equal tensors once."""
    torch.manual_seed(0)
    network, path = Equal(), tmp_path_factory.mktemp("equal") / "m.onnx"
    export(network, path, torch.tensor([[0, 1, 2], [3, 2, 2]]), dynamo=request.param == "dynamo")
    if request.param == "torchscript":
        network.embedding.padding_idx = None  # which its files do not have
    return network, path


def test_parameters_that_start_equal_are_trained_apart(exported: tuple[Equal, Path], tmp_path: Path) -> None:
    """The losses of four steps are PyTorch's, and so are the names; a padding row that the file has is not trained."""
    network, path = exported
    report = make(tmp_path, path, loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.SGD, require_all=True)
    named = {name for name, _ in network.named_parameters() if name.endswith("bias")}
    assert named <= set(report.trained)
    assert len(report.trained) == len(list(network.parameters()))
    assert any("padding" in note for note in report.notes) == (network.embedding.padding_idx is None)
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


def test_a_tied_head_of_a_nested_model_stays_one_tensor(tmp_path: Path) -> None:
    """Its parameter has the name of another module than the one that reads it first."""
    body, head = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4)), nn.Linear(4, 7, bias=False)
    head.weight = body[0].weight
    network, path = nn.Sequential(nn.Sequential(body, head)), tmp_path / "m.onnx"
    export(network, path, torch.tensor([[0, 1], [2, 3]]), optimize=False)
    report = make(tmp_path / "made", path, loss=artifacts.LossType.MSELoss)
    assert sorted(report.trained) == ["0.0.1.bias", "0.0.1.weight", "0.1.weight"]


def test_what_an_exporter_computed_from_parameters_is_named(tmp_path: Path) -> None:
    """It folds a normalization into the layer before it, and the norm of a weight; buffers are no parameters."""
    network = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    network.register_buffer("other", torch.randn(4))
    network.register_forward_hook(lambda module, _, output: output * module.other)
    export(network, path := tmp_path / "m.onnx", torch.randn(2, 4))
    notes = make(tmp_path / "made", path).notes
    assert any(note.startswith("3.weight, 3.bias not trained") for note in notes)
    assert any(note.startswith("0.parametrizations.weight.original0, 0.parametrizations") for note in notes)
    assert len(notes) == 2
    with pytest.raises(ArtifactError, match="as require_all asks: "):
        make(tmp_path / "made", path, require_all=True)


def test_biases_of_files_without_names_belong_to_their_matrices(tmp_path: Path) -> None:
    """Equal ones of two layers are two; equal scales may be of one normalization, which a note says."""
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal((4, 4)).astype(np.float32) for name in ("v", "w")}
    weights |= {"zeros": np.zeros(4, np.float32), "ones": np.ones(4, np.float32)}
    body = """a = Gemm(x, v, zeros) b = LayerNormalization(a, ones) c = MatMul(b, w) d = Add(c, zeros)
        y = LayerNormalization(d, ones)"""
    report = make(tmp_path, of_text(f"g (float[N, 4] x) => (float[N, 4] y) {{ {body} }}", weights))
    assert sorted(report.trained) == ["ones", "v", "w", "w.bias", "zeros"]
    assert report.notes == ("ones is read in several places, and trained as one tensor in some",)


def test_texts_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    """With the limit, which no name in the graph has to tell."""
    body = """zero = Constant <value_ints=[0]> () size = Shape <start=1> (x) e = Slice(p, zero, size) y = Add(x, e)"""
    table = {"p": np.arange(6, dtype=np.float32)}
    make(
        tmp_path, of_text(f"g (float[N, S] x) => (float[N, S] y) {{ {body} }}", table), loss=artifacts.LossType.MSELoss
    )
    _, module, _ = load(tmp_path)
    for mode in (True, False):
        with pytest.raises(InputError, match=r"input x .*has the size 9 in axis 1, and the model takes 6 at most"):
            module.train(mode)(np.zeros((2, 9), np.float32), np.zeros((2, 9), np.float32))


def test_ids_outside_of_the_table_are_refused(exported: tuple[Equal, Path], tmp_path: Path) -> None:
    """ONNX counts negative indices from the last row."""
    make(tmp_path, exported[1], loss=artifacts.LossType.MSELoss)
    _, module, _ = load(tmp_path)
    for number, mode in itertools.product((-1, -100, 7), (True, False)):
        with pytest.raises(InputError, match=rf"input ids .*index {number}, .*7 rows"):
            module.train(mode)(np.array([[0, 1, 2], [3, 2, number]]), np.zeros((2, 3), np.float32))


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
