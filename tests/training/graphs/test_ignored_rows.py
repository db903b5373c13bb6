"""Rows without a label are left out, and nothing but the time changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onnxtool.training.onnxblock.loss import CrossEntropyLoss
from tests.graphs import of_text
from tests.training.small_models import load, make

SAMPLES, TOKENS, WIDTH, WORDS = 2, 6, 4, 11


def language_model() -> onnx.ModelProto:
    """Make an embedding, a mean over the tokens, and a head of a layer, gelu, a normalization and a product."""
    draw = np.random.default_rng(0)
    shapes = {"embedding": (WORDS, WIDTH), "dense": (WIDTH, WIDTH), "bias": (WIDTH,), "scale": (WIDTH,)}
    shapes |= {"shift": (WIDTH,), "decoder": (WIDTH, WORDS), "decoder.bias": (WORDS,)}
    body = """[gather] e = Gather(embedding, ids) [mean] m = ReduceMean <keepdims=1> (e, one) [context] c = Add(e, m)
        [dense] d0 = MatMul(c, dense) [add] d = Add(d0, bias) [sigmoid] s = Sigmoid(d) [swish] g = Mul(d, s)
        [norm] n = LayerNormalization(g, scale, shift) [decoder] l = MatMul(n, decoder)
        [decoder_bias] logits = Add(l, "decoder.bias")"""
    arrays = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    graph = f"language (int64[N, T] ids) => (float[N, T, {WORDS}] logits) {{ {body} }}"
    return of_text(graph, {**arrays, "one": np.array([1])})


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kept", [(), ("logits",)], ids=["dropped", "kept"])
def test_loss_and_gradients_are_pytorchs(tmp_path: Path, share: float, kept: tuple[str, ...]) -> None:
    """With no label, some, and all; and where the logits of all rows are an output, which keeps the rows."""
    make(
        tmp_path,
        language_model(),
        loss=CrossEntropyLoss(axis=-1, ignore_index=-100),
        additional_output_names=list(kept),
    )
    state, module, _ = load(tmp_path)
    draw = np.random.default_rng(1)
    ids = draw.integers(0, WORDS, (SAMPLES, TOKENS))
    labels = np.where(draw.uniform(size=ids.shape) < share, draw.integers(0, WORDS, ids.shape), -100)
    loss, gradients = _torch(ids, labels)
    found = module(ids, labels)
    assert float(found[0] if kept else found) == pytest.approx(loss, rel=1e-5)
    for name, wanted in gradients.items():
        gradient = state.parameters[name].grad
        assert gradient is not None
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_the_head_sees_rows_with_a_label_alone(tmp_path: Path) -> None:
    """All of it, back to where rows meet: both products have matrices on the left, and the first reads a Gather."""
    make(tmp_path, language_model(), loss=CrossEntropyLoss(axis=-1, ignore_index=-100))
    graph = onnx.load(tmp_path / "training_model.onnx").graph
    makers = {output: node for node in graph.node for output in node.output}
    dense = next(node for node in graph.node if "dense" in node.input and node.op_type in ("MatMul", "Gemm"))
    assert makers[dense.input[0]].op_type == "Gather"


def _torch(ids: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in language_model().graph.initializer}
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items() if name != "one"}
    embedded = weights["embedding"][torch.tensor(ids)]
    dense = (embedded + embedded.mean(1, keepdim=True)) @ weights["dense"] + weights["bias"]
    normalized = torch.nn.functional.layer_norm(
        dense * torch.sigmoid(dense), (WIDTH,), weights["scale"], weights["shift"]
    )
    logits = normalized @ weights["decoder"] + weights["decoder.bias"]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten(), reduction="sum")
    loss = total / max(1, int((labels != -100).sum()))
    loss.backward()
    grads = {name: weight.grad for name, weight in weights.items()}
    return loss.item(), {name: grad.numpy() for name, grad in grads.items() if grad is not None}
