"""The code blocks of onnxruntime's document on training artifacts run as they stand, but for imports.

In its first block, names of parameters are placeholders: some are in both lists, which the reference refuses as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onnxtool.training.api import fit
from tests.training.small_models import batch, load, parameters_of, perceptron

_SAMPLE_USAGE = """
from onnxtool.training import artifacts

# Load the forward only onnx model
model = onnx.load(path_to_forward_only_onnx_model)

# Generate the training artifacts
artifacts.generate_artifacts(model,
                             requires_grad = ["fc1.weight", "fc1.bias"],
                             frozen_params = ["fc2.weight", "fc2.bias"],
                             loss = artifacts.LossType.CrossEntropyLoss,
                             optimizer = artifacts.OptimType.AdamW,
                             artifact_directory = path_to_output_artifact_directory)
"""
_CUSTOM_LOSS = """
import onnxtool.training.onnxblock as onnxblock
from onnxtool.training import artifacts

# Define a custom loss block that takes in two inputs
# and performs a weighted average of the losses from these
# two inputs.
class WeightedAverageLoss(onnxblock.Block):
    def __init__(self):
        self._loss1 = onnxblock.loss.MSELoss()
        self._loss2 = onnxblock.loss.MSELoss()
        self._w1 = onnxblock.blocks.Constant(0.4)
        self._w2 = onnxblock.blocks.Constant(0.6)
        self._add = onnxblock.blocks.Add()
        self._mul = onnxblock.blocks.Mul()

    def build(self, loss_input_name1, loss_input_name2):
        # The build method defines how the block should be stacked on top of
        # loss_input_name1 and loss_input_name2

        # Returns weighted average of the two losses
        return self._add(
            self._mul(self._w1(), self._loss1(loss_input_name1, target_name="target1")),
            self._mul(self._w2(), self._loss2(loss_input_name2, target_name="target2"))
        )

my_custom_loss = WeightedAverageLoss()

# Load the onnx model
model_path = "model.onnx"
base_model = onnx.load(model_path)

# Define the parameters that need their gradient computed
requires_grad = ["weight1", "bias1", "weight2", "bias2"]
frozen_params = ["weight3", "bias3"]

# Now, we can invoke generate_artifacts with this custom loss function
artifacts.generate_artifacts(base_model, requires_grad = requires_grad, frozen_params = frozen_params,
                            loss = my_custom_loss, optimizer = artifacts.OptimType.AdamW)
"""
_FILES = {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"}


def gradients(folder: Path) -> list[str]:
    outputs = onnx.load(folder / "training_model.onnx").graph.output
    return [output.name.partition("_grad.")[0] for output in outputs if "_grad." in output.name]


def test_the_sample_makes_the_four_artifacts_of_a_forward_model(tmp_path: Path) -> None:
    onnx.save(perceptron(), tmp_path / "forward.onnx")
    folder = tmp_path / "artifacts"
    places = {"path_to_forward_only_onnx_model": tmp_path / "forward.onnx", "path_to_output_artifact_directory": folder}
    exec(_SAMPLE_USAGE, {"onnx": onnx, **places})  # noqa: S102  the document's code
    assert {file.name for file in folder.iterdir()} == _FILES
    assert gradients(folder) == ["fc1.weight", "fc1.bias"]


def test_the_custom_loss_has_the_gradients_of_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working directory, of a model with two outputs, and with the document's names of parameters."""
    model = perceptron(outputs=2)
    names = {f"fc{number}.{kind}": f"{kind}{number}" for number in (1, 2, 3) for kind in ("weight", "bias")}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    monkeypatch.chdir(tmp_path)
    onnx.save(model, "model.onnx")
    exec(_CUSTOM_LOSS, {"onnx": onnx, "__name__": "document"})  # noqa: S102  the document's code
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", *_FILES}
    trained = ["weight1", "bias1", "weight2", "bias2"]
    assert gradients(tmp_path) == trained
    state, module, optimizer = load(tmp_path)
    assert module.input_names() == ["x", "target1", "target2"]
    x, _ = batch()
    targets = np.random.default_rng(3).standard_normal((2, 8, 3)).astype(np.float32)
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in parameters_of(model).items()}
    hidden = torch.relu(torch.tensor(x) @ weights["weight1"].T + weights["bias1"])
    means = [
        ((hidden @ weights[f"weight{number}"].T + weights[f"bias{number}"] - torch.tensor(target)) ** 2).mean()
        for number, target in zip((2, 3), targets, strict=True)
    ]
    wanted = 0.4 * means[0] + 0.6 * means[1]
    wanted.backward()
    assert module(x, *targets) == pytest.approx(wanted.item(), rel=1e-5)
    for name in trained:
        gradient, found = weights[name].grad, state.parameters[name].grad
        assert gradient is not None
        assert found is not None
        np.testing.assert_allclose(found, gradient.numpy(), rtol=1e-4, atol=1e-6)
    assert state.parameters["weight3"].grad is None
    assert fit(module, optimizer, [(x, *targets)]) == pytest.approx([wanted.item()], rel=1e-5)
