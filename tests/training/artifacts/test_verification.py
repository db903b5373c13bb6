"""The verification of artifacts fails where they train otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from onnxtool.errors import ArtifactError
from onnxtool.training.artifacts import differences
from onnxtool.training.artifacts.differences import verify_file
from onnxtool.training.artifacts.verification import (
    LossSetting,
    OptimizerSetting,
    OwnSession,
    TorchModel,
    verify_artifacts,
)
from onnxtool.training.graphs.names import LEARNING_RATE, accumulated_name
from tests.training.small_models import batch, make, parameters_of, perceptron


class Perceptron(nn.Module):
    """The perceptron in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(5, 7), nn.Linear(7, 3)
        self.load_state_dict({name: torch.tensor(array) for name, array in parameters_of(perceptron()).items()})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits."""
        return {"logits": self.fc2(self.fc1(x).relu())}


def scale(path: Path, name: str, factor: float) -> None:
    """Multiply an input or output of a model by a number."""
    model = onnx.load(path)
    graph, raw = model.graph, f"{name}/raw"
    is_input = any(value.name == name for value in graph.input)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [raw if one == name else one for one in names]
    product = helper.make_node("Mul", [*([name] if is_input else [raw]), "factor"], [raw if is_input else name])
    graph.node.insert(0 if is_input else len(graph.node), product)
    graph.initializer.append(numpy_helper.from_array(np.array([factor], np.float32), "factor"))
    onnx.save(model, path)


FAULTS = {
    "none": ("training_model.onnx", accumulated_name("fc2.bias"), 1.0, ""),
    "gradient": ("training_model.onnx", accumulated_name("fc2.bias"), 1.01, "gradient of fc2.bias .* error of 0.01"),
    "not trained": ("training_model.onnx", accumulated_name("fc1.weight"), 0.0, "gradient of fc1.weight .* error of 1"),
    "rate": ("optimizer_model.onnx", LEARNING_RATE, 1.1, "optimizer's changes 0.1"),
    "parameters": ("optimizer_model.onnx", "params_out", 1.0001, "optimizer's changes"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_three_steps_are_those_of_pytorch(tmp_path: Path, kind: str) -> None:
    """Or the error says what differs."""
    file, name, factor, message = FAULTS[kind]
    make(tmp_path, perceptron())
    scale(tmp_path / file, name, factor)
    reference = TorchModel(Perceptron(), {"x": torch.tensor(batch()[0])})
    setting, optimizer = LossSetting("CrossEntropyLoss", "logits", class_axis=1), OptimizerSetting("AdamW")
    onnx.save(perceptron(), tmp_path / "m.onnx")
    if not message:
        for found in (
            verify_artifacts(tmp_path, "", reference, setting, optimizer),
            verify_file(tmp_path, "", tmp_path / "m.onnx", replace(setting, output="y"), optimizer),
        ):
            assert found is not None
            assert found.num_gradients == 4
            assert max(found.gradient_error, found.update_error) < 1e-4
        return
    with pytest.raises(ArtifactError, match=message):
        verify_artifacts(tmp_path, "", reference, setting, optimizer)
    with pytest.raises(ArtifactError, match=message.replace("0.01", "0.0").replace("of 1", "of ")):
        verify_file(tmp_path, "", tmp_path / "m.onnx", replace(setting, output="y"), optimizer)


@pytest.mark.parametrize("factor", [1.0, 1.005])
def test_gradients_of_a_large_file_share_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Half a percent in one of them is found, and the error names it."""
    monkeypatch.setattr(differences, "_SMALL_BYTES", 1)
    monkeypatch.setattr(differences, "_LEAST_DIRECTIONS", 1)
    make(tmp_path, perceptron())
    scale(tmp_path / "training_model.onnx", accumulated_name("fc2.weight"), factor)
    onnx.save(perceptron(), tmp_path / "m.onnx")
    setting = LossSetting("CrossEntropyLoss", "y", class_axis=1)
    if factor != 1:
        with pytest.raises(ArtifactError, match=r"gradient of fc2\.weight .* error of 0\.00"):
            verify_file(tmp_path, "", tmp_path / "m.onnx", setting, OptimizerSetting("AdamW"))
        return
    found = verify_file(tmp_path, "", tmp_path / "m.onnx", setting, OptimizerSetting("AdamW"))
    assert found is not None
    assert 0 < found.gradient_error < 1e-3


def test_the_loss_in_float64_is_computed_by_onnxruntime_without_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for Erf, which has no kernel for float64. The branches of an If read gradients to add them up."""
    parts: list[set[str]] = []
    model = perceptron()
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Erf"
    make(tmp_path, model)
    onnx.save(model, tmp_path / "m.onnx")

    def session(path: Path) -> OwnSession:
        if path.name == ".float64.onnx":
            parts.append({node.op_type for node in onnx.load(path).graph.node})
        return OwnSession(path)

    monkeypatch.setattr(differences, "OwnSession", session)
    setting = LossSetting("CrossEntropyLoss", "y", class_axis=1)
    verification = verify_file(tmp_path, "", tmp_path / "m.onnx", setting, OptimizerSetting("AdamW"))
    assert verification is not None
    assert max(verification.loss_error, verification.gradient_error) < 1e-4
    rejected, before, after = parts
    assert rejected == before | {"Erf"} | after
    of_gradients = {"If", "ScatterElements"}  # sums, and the derivative of the cross entropy
    assert of_gradients < {node.op_type for node in onnx.load(tmp_path / "training_model.onnx").graph.node}
    assert not of_gradients & rejected
