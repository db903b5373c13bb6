"""Fake quantization trains as in PyTorch; a file that was quantized for inference is refused."""

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


def check_gradients(state: CheckpointState, weights: Mapping[str, torch.Tensor]) -> None:
    """Require the gradients of a training step to be those of PyTorch."""
    for name, weight in weights.items():
        found = state.parameters[name].grad
        assert weight.grad is not None
        assert found is not None
        np.testing.assert_allclose(found, weight.grad.numpy(), rtol=1e-4, atol=1e-6)


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
    with pytest.raises(GradientError, match=r"MatMulInteger \(node product\); QuantizeLinear") as caught:
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
