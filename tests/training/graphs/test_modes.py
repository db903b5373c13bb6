"""Dropout and batch normalization train as PyTorch's, and rest afterwards."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onnxtool.training.onnxblock import optim
from tests.training.small_models import batch, load, make, perceptron


def test_dropout_is_off_in_the_eval_model(tmp_path: Path) -> None:
    """And on in the training model."""
    make(tmp_path / "with", perceptron(dropout=0.5))
    make(tmp_path / "without", perceptron())
    _, module, _ = load(tmp_path / "with")
    losses = {float(module(*batch())) for _ in range(8)}
    assert len(losses) > 1
    _, other, _ = load(tmp_path / "without")
    assert module.eval()(*batch()) == pytest.approx(other.eval()(*batch()), rel=1e-6)


def test_a_dropout_that_is_an_output_keeps_its_name(tmp_path: Path) -> None:
    """In the eval model it is its input."""
    make(tmp_path, perceptron(dropout=0.5), additional_output_names=["d", "a"])
    _, module, _ = load(tmp_path)
    _, dropped, whole = module.eval()(*batch())
    np.testing.assert_array_equal(dropped, whole)
    _, dropped, whole = module.train()(*batch())
    assert ((dropped == 0) & (whole != 0)).any()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_normalization_follows_pytorch(tmp_path: Path, mode: str) -> None:
    """Values, gradients and running statistics, whatever mode the file was written in."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    )
    model = _export(net, torch.randn(2, 2, 6, 6), training=mode == "train")
    make(tmp_path, model, optimizer=optim.SGD(), additional_output_names=["y"])
    state, module, optimizer = load(tmp_path)
    optimizer.set_learning_rate(0.1)
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if "running" in name:
                buffer.copy_(torch.tensor(state.parameters[name].data))  # tracing in training mode has moved them
    net.train()
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = np.random.default_rng(0)
    for _ in range(5):
        x, labels = draw.standard_normal((4, 2, 6, 6)).astype(np.float32), draw.integers(0, 3, 4)
        other.zero_grad()
        wanted = torch.nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(labels))
        wanted.backward()
        other.step()
        module.lazy_reset_grad()
        assert module(x, labels)[0] == pytest.approx(wanted.item(), rel=1e-4)
        optimizer.step()
    for name, buffer in net.named_buffers():
        if "running" in name:
            np.testing.assert_allclose(state.parameters[name].data, buffer.numpy(), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        expected = net.eval()(torch.tensor(x)).numpy()
    np.testing.assert_allclose(module.eval()(x, labels)[1], expected, rtol=1e-3, atol=1e-5)


def test_a_frozen_batch_normalization_of_an_inference_file_rests(tmp_path: Path) -> None:
    """Nothing asks for the statistics of the batch, and the running ones stay."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    model = _export(net, torch.randn(2, 5), training=False)
    make(tmp_path, model, requires_grad=["2.*"], frozen_params=["1.*"])
    _, module, _ = load(tmp_path)
    assert module(*batch()) == pytest.approx(module.eval()(*batch()), rel=1e-6)


def _export(net: torch.nn.Module, sample: torch.Tensor, *, training: bool) -> onnx.ModelProto:
    """Export as the document of onnxruntime-training says, or for inference."""
    buffer = io.BytesIO()
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.PRESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Left alone, the exporter folds a normalization that rests into the convolution before it.
        torch.onnx.export(
            copy.deepcopy(net).train(training), (sample,), buffer, dynamo=False, do_constant_folding=False,
            training=mode, keep_initializers_as_inputs=False, input_names=["x"], output_names=["y"],
            dynamic_axes={"x": {0: "N"}},
        )  # fmt: skip
    return onnx.load_from_string(buffer.getvalue())
