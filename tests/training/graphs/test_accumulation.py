"""Gradients go straight into their buffers, each as soon as it can."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from onnxtool.training import artifacts
from tests.graphs import of_text
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
    body = " ".join(f"p{i} = MatMul(h{i}, w{i}) h{i + 1} = Tanh(p{i})" for i in range(LAYERS))
    ends = f"(float[{ROWS}, {WIDTH}] h0) => (float[{ROWS}, {WIDTH}] h{LAYERS})"
    model = of_text(f"deep {ends} {{ {body} }}", {f"w{i}": weights[i] for i in reversed(range(LAYERS))})
    make(tmp_path, model, loss=artifacts.LossType.MSELoss)
    user = {name: draw.standard_normal((ROWS, WIDTH)).astype(np.float32) for name in ("h0", "target")}
    peak = peak_bytes(tmp_path / "training_model.onnx", training_feeds(parameters_of(model), user), tmp_path)
    activation = 4 * ROWS * WIDTH
    assert peak < (LAYERS + 6) * activation  # the activations, and what the loss and one layer need
