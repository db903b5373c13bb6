"""Activations that are computed again for the gradients: less memory at once, and the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool.training import artifacts
from tests.autodiff.networks import Network, make_network, shared_export
from tests.training.graphs.live_memory import peak_bytes, training_feeds
from tests.training.small_models import make, parameters_of
from tests.workshop import Workshop

ROWS, WIDTH, LAYERS = 256, 32, 6
_RESIDUAL, _WITH_ATTENTION = "resnet", "bert"


def deep_model(
    *, dropout: float = 0.0, skip: bool = False, rows: Sequence[int | str] = (ROWS,), gated: bool = False
) -> onnx.ModelProto:
    """Make x [256, 32] -> six times a product, a gelu and a normalization -> y [256, 32].

    Args:
        dropout: after each normalization, with a fixed seed.
        skip: the first gelu is added to the last.
        rows: the axes of rows; with names, gradients ask for shapes.
        gated: h * sigmoid(h) in place of the gelu, a product of two tensors of one shape.
    """
    draw = np.random.default_rng(0)
    nodes, tensors, hidden = [], [], "x"
    numbers: dict[str, Any] = {"ratio": np.float32(dropout), "on": np.array(True)}
    tensors += [numpy_helper.from_array(np.asarray(value), name) for name, value in numbers.items()]
    for layer in range(LAYERS):
        for name, shape in (("w", (WIDTH, WIDTH)), ("b", (WIDTH,)), ("scale", (WIDTH,)), ("shift", (WIDTH,))):
            array = (draw.standard_normal(shape) / 4).astype(np.float32)
            tensors.append(numpy_helper.from_array(array, f"{name}{layer}"))
        nodes.append(helper.make_node("MatMul", [hidden, f"w{layer}"], [f"p{layer}"]))
        nodes.append(helper.make_node("Add", [f"p{layer}", f"b{layer}"], [f"h{layer}"]))
        if gated:
            nodes.append(helper.make_node("Sigmoid", [f"h{layer}"], [f"e{layer}"]))
        activation = ("Mul", [f"h{layer}", f"e{layer}"]) if gated else ("Gelu", [f"h{layer}"])
        nodes.append(helper.make_node(*activation, [f"g{layer}"]))
        hidden = f"g{layer}"
        if skip and layer == LAYERS - 1:
            nodes.append(helper.make_node("Add", [hidden, "g0"], ["s"]))
            hidden = "s"
        nodes.append(
            helper.make_node("LayerNormalization", [hidden, f"scale{layer}", f"shift{layer}"], [f"n{layer}"], axis=-1)
        )
        hidden = f"n{layer}"
        if dropout:
            nodes.append(helper.make_node("Dropout", [hidden, "ratio", "on"], [f"d{layer}"], seed=layer))
            hidden = f"d{layer}"
    nodes[-1].output[0] = "y"
    for place, node in enumerate(nodes):
        node.name = f"node_{place}"
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "deep", [info("x", 1, [*rows, WIDTH])], [info("y", 1, [*rows, WIDTH])], initializer=tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def step(folder: Path, model: onnx.ModelProto, *, recompute: bool) -> tuple[list[NDArray[np.float32]], int]:
    """Return loss and gradients of a step, and the bytes of tensors at once."""
    folder.mkdir()
    make(folder, model, loss=artifacts.LossType.MSELoss, recompute=recompute)
    draw = np.random.default_rng(1)
    shape = (ROWS, WIDTH) if len(model.graph.input[0].type.tensor_type.shape.dim) == 2 else (ROWS // 8, 8, WIDTH)
    user = {name: draw.standard_normal(shape).astype(np.float32) for name in ("x", "target")}
    path = folder / "training_model.onnx"
    feeds = training_feeds(parameters_of(model), user)
    return ort.InferenceSession(path).run(None, feeds), peak_bytes(path, feeds, folder)


@pytest.mark.parametrize(
    ("options", "fewer"),
    [
        ({}, 4),
        ({"dropout": 0.3}, 4),
        ({"skip": True}, 4),
        ({"rows": ("batch_size", "sequence")}, 10),
        ({"rows": ("batch_size", "sequence"), "gated": True}, 15),
    ],
    ids=["plain", "dropout", "skip connection", "axes with names", "products of one shape"],
)
def test_gradients_are_the_same_and_fewer_tensors_live_at_once(
    tmp_path: Path, options: dict[str, Any], fewer: int
) -> None:
    """No copy is merged, and none runs before its time, so that neither gelu nor normalization stays."""
    model = deep_model(**options)
    kept, kept_bytes = step(tmp_path / "kept", model, recompute=False)
    again, again_bytes = step(tmp_path / "again", model, recompute=True)
    for one, other in zip(kept, again, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)  # fusions may differ
    activation = 4 * ROWS * WIDTH
    assert kept_bytes - again_bytes >= fewer * activation


@pytest.mark.slow
@pytest.mark.parametrize("name", [_RESIDUAL, _WITH_ATTENTION])
def test_networks_have_the_same_gradients_and_one_with_attention_needs_less(
    workshop: Workshop, tmp_path: Path, name: str
) -> None:
    """Residual connections, attention, convolutions and batch normalization, as torch.onnx exports them."""
    network = make_network(name)
    model = onnx.load(shared_export(name, workshop))
    (kept, kept_bytes), (again, again_bytes) = (
        network_step(tmp_path / str(recompute), network, model, recompute=recompute) for recompute in (False, True)
    )
    largest = max(float(np.abs(gradient).max()) for gradient in kept[1:])
    for one, other in zip(kept, again, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * largest)  # fusions may differ
    # What copies are made of is there beside them for a moment; in a network of one layer that is its peak.
    assert again_bytes <= (0.85 if name == _WITH_ATTENTION else 1.2) * kept_bytes


def network_step(
    folder: Path, network: Network, model: onnx.ModelProto, *, recompute: bool
) -> tuple[list[NDArray[np.float32]], int]:
    """Return loss and gradients of an exported network, and the bytes of tensors at once."""
    folder.mkdir()
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    trained = [name for name, _ in network.module.named_parameters() if name in weights]
    make(folder, model, requires_grad=trained, loss=None, optimizer=None, recompute=recompute)
    path = folder / "training_model.onnx"
    wanted = {value.name for value in onnx.load(path).graph.input}
    given = [value.name for value in model.graph.input if value.name not in weights]
    inputs = [one.float() if one.is_floating_point() else one for one in (*network.inputs, network.labels)]
    user = {name: one.numpy() for name, one in zip(given, inputs, strict=True)}
    feeds = {name: array for name, array in training_feeds(weights, user).items() if name in wanted}
    return ort.InferenceSession(path).run(None, feeds), peak_bytes(path, feeds, folder)
