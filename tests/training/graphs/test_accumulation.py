"""Gradients go straight into their buffers, each as soon as it can."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxtool.training import artifacts
from tests.training.graphs.live_memory import peak_bytes, training_feeds
from tests.training.small_models import make, parameters_of, perceptron

ROWS, WIDTH, LAYERS = 256, 32, 8


def test_a_product_is_made_in_the_buffer_and_not_copied_to_it(tmp_path: Path) -> None:
    """The gradient of a weight is a Gemm inside the choice; that of a bias is a sum before it."""
    make(tmp_path, perceptron())
    nodes = {node.name: node for node in onnx.load(tmp_path / "training_model.onnx").graph.node}
    inside = {
        name: [attribute.g.node[0].op_type for attribute in nodes[f"{name}_grad/accumulate"].attribute]
        for name in ("fc1.weight", "fc1.bias")
    }
    assert sorted(inside["fc1.weight"]) == ["Gemm", "Gemm"]
    assert sorted(inside["fc1.bias"]) == ["Add", "Identity"]


def test_memory_falls_on_the_way_back(tmp_path: Path) -> None:
    """One gradient of an activation is there at once, whatever the order of the parameters in the file."""
    draw = np.random.default_rng(0)
    weights = [(draw.standard_normal((WIDTH, WIDTH)) / 4).astype(np.float32) for _ in range(LAYERS)]
    nodes = []
    for layer in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"p{layer}"], name=f"product{layer}"))
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], [f"h{layer + 1}"], name=f"tanh{layer}"))
    graph = helper.make_graph(
        nodes,
        "deep",
        [helper.make_tensor_value_info("h0", 1, [ROWS, WIDTH])],
        [helper.make_tensor_value_info(f"h{LAYERS}", 1, [ROWS, WIDTH])],
        [numpy_helper.from_array(array, f"w{layer}") for layer, array in enumerate(weights)][::-1],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    make(tmp_path, model, loss=artifacts.LossType.MSELoss)
    user = {name: draw.standard_normal((ROWS, WIDTH)).astype(np.float32) for name in ("h0", "target")}
    peak = peak_bytes(tmp_path / "training_model.onnx", training_feeds(parameters_of(model), user), tmp_path)
    activation = 4 * ROWS * WIDTH
    assert peak < (LAYERS + 6) * activation  # the activations, and what the loss and one layer need
