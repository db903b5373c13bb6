"""Gradients of inputs, and training models that train nothing; PyTorch's autograd is the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

from onnxtool.errors import ArtifactError
from onnxtool.training import onnxblock
from onnxtool.training.api import CheckpointState, Module
from onnxtool.training.artifacts.generation import ArtifactOptions, make_artifacts
from onnxtool.training.artifacts.verification import LossSetting, TorchModel, verify_artifacts
from onnxtool.training.options import LossType, TrainingTarget
from tests.training.small_models import batch, convolutions, load, make, parameters_of, perceptron

TOLERANCE = 1e-6
"""Absolute; float32 sums of a few dozen terms below one."""
NAMES = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def logits(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The perceptron in PyTorch."""
    first, first_bias, second, second_bias = (parameters[name] for name in NAMES)
    return functional.linear(functional.linear(x, first, first_bias).relu(), second, second_bias)


def module_of(folder: Path, trained: Sequence[str], frozen: Sequence[str] = ()) -> Module:
    make(folder, perceptron(), requires_grad=trained, frozen_params=frozen, optimizer=None)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    return Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")


@pytest.mark.parametrize("trained", [["x", "*"], ["x"]], ids=["with parameters", "alone"])
def test_the_gradient_of_an_input_is_that_of_autograd(tmp_path: Path, trained: list[str]) -> None:
    """Of each batch by itself, of any size, while those of the parameters add up."""
    module = module_of(tmp_path, trained, [] if "*" in trained else ["*"])
    parameters = {name: torch.tensor(array) for name, array in parameters_of(perceptron()).items()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    assert module.input_names() == ["x", "labels"]
    assert module.output_names() == ["loss"]
    for seed, samples in enumerate((8, 8, 3)):
        array, labels = batch(samples, seed)
        x = torch.tensor(array, requires_grad=True)
        loss = functional.cross_entropy(logits(parameters, x), torch.tensor(labels))
        loss.backward()
        np.testing.assert_allclose(module(array, labels), loss.item(), rtol=TOLERANCE)
        assert x.grad is not None
        np.testing.assert_allclose(module.gradient("x"), x.grad.numpy(), atol=TOLERANCE)
    for name, parameter in parameters.items() if "*" in trained else ():
        assert parameter.grad is not None
        np.testing.assert_allclose(module.gradient(name), parameter.grad.numpy(), atol=TOLERANCE)
    np.testing.assert_allclose(module.eval()(array, labels), loss.item(), rtol=TOLERANCE)


def test_an_input_of_images_has_a_gradient_behind_a_batch_normalization(tmp_path: Path) -> None:
    """Its buffer and its gradient have the names of the reference."""
    report = make(tmp_path, convolutions(), requires_grad=["x", "*"])
    assert [value.name for value in report.inputs] == ["x", "labels"]
    assert "gradients of the inputs x" in report.notes[0]
    graph = onnx.load(tmp_path / "training_model.onnx").graph
    assert "x_grad.accumulation.buffer" in [value.name for value in graph.input]
    assert "x_grad.accumulation.out" in [value.name for value in graph.output]
    _, module, _ = load(tmp_path)
    draw = np.random.default_rng(3)
    x, labels = draw.standard_normal((4, 3, 8, 8)).astype(np.float32), draw.integers(0, 3, 4)
    step = np.zeros_like(x)
    step[1, 2, 3, 4] = 1e-2
    module(x, labels)
    expected = float(module.gradient("x")[1, 2, 3, 4])
    difference = float(module(x + step, labels)) - float(module(x - step, labels))
    # Central differences of float32 losses: an error of 1e-7 / 2e-2.
    np.testing.assert_allclose(difference / 2e-2, expected, atol=2e-5)


def test_a_gradient_that_is_not_computed_is_no_array(tmp_path: Path) -> None:
    """Before the first step, and of what requires_grad does not name."""
    module = module_of(tmp_path, ["x", "fc2.*"])
    with pytest.raises(ArtifactError, match="the input x has no gradient yet"):
        module.gradient("x")
    with pytest.raises(ArtifactError, match=r"computes no gradient for fc1\.bias") as caught:
        module.gradient("fc1.bias")
    assert "it does for fc2.weight, fc2.bias, x" in caught.value.hint


def test_inputs_without_a_gradient_are_refused(tmp_path: Path) -> None:
    """Integers have none, and nothing freezes an input."""
    for arguments, message in (
        ({"requires_grad": ["labels"]}, "no parameter called 'labels'"),  # the loss adds it
        ({"requires_grad": ["x"], "frozen_params": ["x"]}, "no parameter called 'x'"),
        ({"frozen_params": ["x"]}, "no parameter called 'x'"),
    ):
        with pytest.raises(ArtifactError, match=message):
            make(tmp_path, perceptron(), **arguments)

    class Loss(onnxblock.TrainingBlock):
        def build(self, name: str) -> str:
            return str(onnxblock.loss.CrossEntropyLoss()(name))

    block = Loss()
    block.requires_grad("labels")
    with (
        onnxblock.base(perceptron()),
        pytest.raises(ArtifactError, match="the input labels is int64, and inputs with a gradient are float32"),
    ):
        block("y")


def test_programs_in_javascript_train_parameters_only(tmp_path: Path) -> None:
    """They have no buffer for the gradient of an input."""
    options = ArtifactOptions(
        perceptron(), ["x", "*"], loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path, target=TrainingTarget.web
    )
    with pytest.raises(ArtifactError, match="the program for web has no gradients of inputs, and x is to have one"):
        make_artifacts(options)
    assert not list(tmp_path.iterdir())


def test_the_verification_compares_the_gradient_of_an_input(tmp_path: Path) -> None:
    """With that of PyTorch: another input has another one."""
    arrays = parameters_of(perceptron())

    class Perceptron(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": logits({name: torch.tensor(array) for name, array in arrays.items()}, x)}

    make(tmp_path, perceptron(), requires_grad=["x"], frozen_params=["*"], optimizer=None)
    reference = TorchModel(Perceptron(), {"x": torch.tensor(batch()[0])})
    setting = LossSetting("CrossEntropyLoss", "logits", class_axis=1)
    found = verify_artifacts(tmp_path, "", reference, setting)
    assert found is not None
    assert (found.num_gradients, found.worst_parameter) == (1, "x")
    assert found.gradient_error < TOLERANCE


def test_without_a_parameter_to_train_the_training_model_computes_the_loss(tmp_path: Path) -> None:
    """And the report says that there are no gradients."""
    report = make(tmp_path, perceptron(dropout=0.0), requires_grad=None, optimizer=None)
    assert report.trained == ()
    assert report.notes == ("no parameter is trained: the training model computes the loss, and no gradients",)
    module = Module(tmp_path / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    array, labels = batch()
    parameters = {name: torch.tensor(array) for name, array in parameters_of(perceptron()).items()}
    expected = functional.cross_entropy(logits(parameters, torch.tensor(array)), torch.tensor(labels))
    np.testing.assert_allclose(module(array, labels), expected.item(), rtol=TOLERANCE)
