"""A model with quantizing and dequantizing in it trains as PyTorch's fake quantization does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from onnxtool.errors import GradientError
from onnxtool.training.api import CheckpointState
from tests.training.small_models import batch, load, make, parameters_of, perceptron

_SCALES = np.linspace(0.005, 0.02, 7, dtype=np.float32)


def quantized_perceptron() -> onnx.ModelProto:
    """Quantize the first weight by row, and the hidden values with one scale; numbers of both are out of range."""
    model = perceptron()
    graph = model.graph
    for name, scale, zero, axis in (
        ("fc1.weight", _SCALES, np.zeros(7, np.int8), 0),
        ("a", np.float32(0.01), np.uint8(3), 1),
    ):
        graph.initializer.append(numpy_helper.from_array(np.asarray(scale), f"{name}_scale"))
        graph.initializer.append(numpy_helper.from_array(np.asarray(zero), f"{name}_zero"))
        settings = [f"{name}_scale", f"{name}_zero"]
        for node in graph.node:
            for place, read in enumerate(node.input):
                if read == name:
                    node.input[place] = f"{name}_dequantized"
        quantize = helper.make_node("QuantizeLinear", [name, *settings], [f"{name}_q"], name=f"{name}_q", axis=axis)
        dequantize = helper.make_node("DequantizeLinear", [f"{name}_q", *settings], [f"{name}_dequantized"], axis=axis)
        at = next(place for place, node in enumerate(graph.node) if f"{name}_dequantized" in node.input)
        graph.node.insert(at, dequantize)
        graph.node.insert(at, quantize)
    return model


def check_gradients(state: CheckpointState, weights: Mapping[str, torch.Tensor]) -> None:
    """Require the gradients of a training step to be those of PyTorch."""
    for name, weight in weights.items():
        found = state.parameters[name].grad
        assert weight.grad is not None
        assert found is not None
        np.testing.assert_allclose(found, weight.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_quantized_model_trains_as_pytorchs(tmp_path: Path) -> None:
    """Loss and gradients are those of fake quantization; scales are no parameters that a pattern means."""
    model = quantized_perceptron()
    report = make(tmp_path, model, requires_grad=["*"])
    assert report.trained == ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    state, module, _ = load(tmp_path)
    x, labels = batch()
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in parameters_of(perceptron()).items()}
    rows = torch.fake_quantize_per_channel_affine(
        weights["fc1.weight"], torch.tensor(_SCALES), torch.zeros(7, dtype=torch.int32), 0, -128, 127
    )
    hidden = torch.relu(torch.tensor(x) @ rows.T + weights["fc1.bias"])
    hidden = torch.fake_quantize_per_tensor_affine(hidden, 0.01, 3, 0, 255)
    scores = hidden @ weights["fc2.weight"].T + weights["fc2.bias"]
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
    loss.backward()
    assert module(x, labels) == pytest.approx(loss.item(), rel=1e-5)
    check_gradients(state, weights)
    rows_found = state.parameters["fc1.weight"].grad
    assert rows_found is not None
    assert np.count_nonzero(rows_found == 0)  # some weights are out of range


def test_scales_are_trained_by_name(tmp_path: Path) -> None:
    """Whoever asks for them gets learned step sizes."""
    report = make(tmp_path, quantized_perceptron(), requires_grad=["*.weight", "fc1.weight_scale"])
    assert report.trained == ("fc1.weight", "fc2.weight", "fc1.weight_scale")
    state, module, _ = load(tmp_path)
    module(*batch())
    gradient = state.parameters["fc1.weight_scale"].grad
    assert gradient is not None
    assert gradient.any()


def test_a_product_of_integers_is_refused_with_what_to_freeze(tmp_path: Path) -> None:
    """A model that was quantized for inference has no gradient; nothing is written."""
    model = perceptron()
    graph = model.graph
    del graph.node[:]
    for name in ("fc1", "fc2"):
        graph.initializer.append(numpy_helper.from_array(np.float32(0.02), f"{name}_scale"))
    graph.initializer.append(numpy_helper.from_array(np.uint8(128), "zero"))
    graph.node.extend(
        [
            helper.make_node("QuantizeLinear", ["x", "fc1_scale", "zero"], ["xq"], name="q"),
            helper.make_node("Transpose", ["fc1.weight"], ["t"], name="t"),
            helper.make_node("QuantizeLinear", ["t", "fc1_scale", "zero"], ["wq"], name="w"),
            helper.make_node("MatMulInteger", ["xq", "wq", "zero", "zero"], ["p"], name="product"),
            helper.make_node("Cast", ["p"], ["c"], to=1, name="cast"),
            helper.make_node("Gemm", ["c", "fc2.weight", "fc2.bias"], ["y"], transB=1, name="fc2"),
        ]
    )
    with pytest.raises(GradientError, match=r"MatMulInteger \(node product\)") as caught:
        make(tmp_path, model)
    assert "fc1.weight" in caught.value.hint
    assert not list(tmp_path.iterdir())
    assert make(tmp_path, model, frozen_params=["fc1.*"]).trained == ("fc2.weight", "fc2.bias")


def test_operators_of_builds_for_training_become_standard_ones(tmp_path: Path) -> None:
    """FakeQuant and ScaledSum of onnxruntime-training are in no other build; both models run without them."""
    model = perceptron()
    graph = model.graph
    for name, number in (("scale", 0.01), ("zero", 128.0)):
        graph.initializer.append(numpy_helper.from_array(np.float32(number), name))
    graph.node[0].output[0] = "raw"
    nodes = [
        helper.make_node("FakeQuant", ["raw", "scale", "zero"], ["f", "mask"], domain="com.microsoft", quant_max=200),
        helper.make_node("ScaledSum", ["f", "raw"], ["h"], domain="com.microsoft", scale_0=0.5, scale_1=2.0),
    ]
    for place, node in enumerate(nodes, 1):
        graph.node.insert(place, node)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    make(tmp_path, model)
    for name in ("training_model", "eval_model"):
        written = onnx.load(tmp_path / f"{name}.onnx")
        assert [opset.domain for opset in written.opset_import] == [""]
    state, module, _ = load(tmp_path)
    x, labels = batch()
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in parameters_of(perceptron()).items()}
    raw = torch.tensor(x) @ weights["fc1.weight"].T + weights["fc1.bias"]
    hidden = 0.5 * torch.fake_quantize_per_tensor_affine(raw, 0.01, 128, 0, 200) + 2 * raw
    scores = torch.relu(hidden) @ weights["fc2.weight"].T + weights["fc2.bias"]
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
    loss.backward()
    assert module(x, labels) == pytest.approx(loss.item(), rel=1e-5)
    check_gradients(state, weights)
    assert module.eval()(x, labels) == pytest.approx(loss.item(), rel=1e-5)
