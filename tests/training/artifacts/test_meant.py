"""What is trained is what is meant: parameters of one element, tied weights, logits; the rest is named or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper

from onnxtool.errors import ArtifactError
from onnxtool.training import artifacts
from onnxtool.training.artifacts.preparation import prepare_training
from onnxtool.training.onnxblock.loss import CrossEntropyLoss
from onnxtool.training.options import PreparationOptions
from tests.graphs import of_text
from tests.training.small_models import load, make, perceptron

Arrays = dict[str, NDArray[np.float32]]
WORDS, WIDTH = 7, 4


def draw(**shapes: tuple[int, ...]) -> Arrays:
    generator = np.random.default_rng(0)
    return {
        name.replace("__", "."): generator.uniform(0.1, 1, size).astype(np.float32) for name, size in shapes.items()
    }


def scorer() -> tuple[onnx.ModelProto, Arrays]:
    """Make a ranker of one score: its bias and the slope of PReLU are of one element, and so are two constants."""
    arrays = draw(w=(5, 3), b=(3,), slope=(1,), v=(3, 1), c=(1,), layer__scale=(1,), epsilon=(1,))
    arrays["half"] = np.array(0.5, np.float32)
    body = """h0 = MatMul(x, w) h1 = Add(h0, b) h2 = PRelu(h1, slope) h3 = Add(h2, epsilon) h4 = MatMul(h3, v)
        h5 = Add(h4, c) h6 = Mul(h5, "layer.scale") y = Mul(h6, half)"""
    return of_text(f"g (float[N, 5] x) => (float[N, 1] y) {{ {body} }}", arrays), arrays


def test_a_pattern_trains_the_weights_of_one_element(tmp_path: Path) -> None:
    """With PyTorch's gradients; what only may be a parameter is named."""
    model, arrays = scorer()
    report = make(tmp_path, model, loss=artifacts.LossType.MSELoss)
    assert report.trained == ("w", "b", "slope", "v", "c")
    assert report.notes == (
        "layer.scale, half of one element not trained: patterns do not match what may be a constant",
    )
    _, module, _ = load(tmp_path)
    x, target = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32), np.ones((6, 1), np.float32)
    module(x, target)
    p = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    hidden = torch.nn.functional.prelu(torch.tensor(x) @ p["w"] + p["b"], p["slope"]) + p["epsilon"]
    torch.nn.functional.mse_loss(
        (hidden @ p["v"] + p["c"]) * p["layer.scale"] * p["half"], torch.tensor(target)
    ).backward()
    for name in report.trained:
        np.testing.assert_allclose(module.gradient(name), p[name].grad.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


# The node that makes scores [N, S, WORDS] of hidden states h, and the shape of the head.
HEADS: dict[str, tuple[str, tuple[int, int]]] = {
    "as it is": ("Gemm <transB=1> (flat, head)", (WORDS, WIDTH)),
    "transposed": ("MatMul(flat, head)", (WIDTH, WORDS)),
    "transposed for Gemm": ("Gemm(flat, head)", (WIDTH, WORDS)),
}


def language_model(name: str, **changed: NDArray[np.float32]) -> tuple[onnx.ModelProto, Arrays]:
    """Make embedding -> tanh -> head, whose weight equals the embedding where it is not changed."""
    head, shape = HEADS[name]
    arrays = draw(table=(WORDS, WIDTH))
    arrays["head"] = arrays["table"] if shape == (WORDS, WIDTH) else arrays["table"].T.copy()
    arrays |= changed
    body = f"e = Gather(table, ids) h = Tanh(e) flat = Flatten <axis=2> (h) scores = {head}"
    return of_text(f"g (int64[N, S] ids) => (float[R, {WORDS}] scores) {{ {body} }}", arrays), arrays


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_equals_the_embedding_is_trained_with_it(tmp_path: Path, name: str) -> None:
    """The gradient is that of PyTorch's tied weight, and either name selects it; also of external data."""
    model, arrays = language_model(name)
    path = tmp_path / "forward.onnx"
    onnx.save(model, path, save_as_external_data=name == "transposed", location="weights", size_threshold=0)
    loss = CrossEntropyLoss(ignore_index=-100)
    report = make(tmp_path / "made", path, requires_grad=["head"], loss=loss)
    assert report.trained == ("table",)
    assert report.notes == ("head and table are equal, and trained as one tensor",)
    _, module, _ = load(tmp_path / "made")
    ids, labels = np.array([[1, 2, 3]]), np.array([4, -100, 0])
    table = torch.tensor(arrays["table"], requires_grad=True)
    scores = torch.tanh(torch.nn.functional.embedding(torch.tensor(ids), table)) @ table.T
    expected = torch.nn.functional.cross_entropy(scores[0], torch.tensor(labels))
    expected.backward()
    assert module(ids, labels) == pytest.approx(expected.item(), rel=1e-5)
    assert table.grad is not None
    np.testing.assert_allclose(module.gradient("table"), table.grad.numpy(), rtol=1e-4, atol=1e-6)
    with pytest.raises(ArtifactError, match="trained and frozen at once"):
        make(tmp_path / "both", path, requires_grad=["head"], frozen_params=["table"], loss=loss)


@pytest.mark.parametrize(
    "changed",
    [
        {"head": np.ones((WORDS, WIDTH), np.float32)},
        {"head": np.zeros((WORDS, WIDTH), np.float32), "table": np.zeros((WORDS, WIDTH), np.float32)},
        {"head": np.nextafter(draw(table=(WORDS, WIDTH))["table"], np.float32(2))},
    ],
    ids=["other", "new", "nearly"],
)
def test_weights_that_are_not_tied_stay_apart(tmp_path: Path, changed: Arrays) -> None:
    """Other ones, those that are all the same number, and those that differ in their last bit."""
    report = make(tmp_path, language_model("as it is", **changed)[0], optimizer=None)
    assert report.trained == ("table", "head")
    assert report.notes == ()


def test_equal_layers_stay_apart(tmp_path: Path) -> None:
    """As copies of a layer are before their training."""
    arrays = draw(first=(5, 5))
    arrays["second"] = arrays["first"]
    model = of_text("g (float[N, 5] x) => (float[N, 5] y) { h = MatMul(x, first) y = MatMul(h, second) }", arrays)
    assert make(tmp_path, model, optimizer=None).trained == ("first", "second")


def named(output: str) -> onnx.ModelProto:
    model = perceptron()
    model.graph.node[-1].output[0] = model.graph.output[0].name = output
    return model


DOUBTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one element": (lambda: scorer()[0], {"loss": "MSELoss"}, "layer.scale, half of one element not trained"),
    "unreachable": (lambda: perceptron(outputs=2), {"loss_inputs": ["y1"]}, r"fc3.weight, fc3.bias frozen: the loss"),
    "probabilities by name": (lambda: named("probs"), {}, "name of probs says probabilities"),
    "softmax by name": (lambda: named("softmax_1"), {"loss": "BCEWithLogitsLoss"}, "name of softmax_1 says"),
}
CHOSEN = {"train": ["fc2.*"]}
SETTLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "frozen": (lambda: perceptron(outputs=2), {"loss_inputs": ["y1"], "freeze": ["fc3.*"]}),
    "one element": (lambda: scorer()[0], {"loss": "MSELoss", "train": ["*", "layer.scale"], "freeze": ["half"]}),
    "no logits": (lambda: named("probs"), {"loss": "MSELoss"}),
    "both by name": (perceptron, {**CHOSEN, "freeze": ["fc1.*"]}),
    "all": (perceptron, {}),
}


def options(tmp_path: Path, model: onnx.ModelProto, **changes: Any) -> PreparationOptions:
    onnx.save(model, tmp_path / "forward.onnx")
    made = tmp_path / "made"
    return PreparationOptions(model_path=tmp_path / "forward.onnx", output=made, optimizer="none", **changes)


@pytest.mark.parametrize("name", DOUBTS)
def test_what_may_be_meant_otherwise_is_a_note_or_an_error(tmp_path: Path, name: str) -> None:
    """By name; with `require_all` nothing is written."""
    make_model, changes, message = DOUBTS[name]
    with pytest.raises(ArtifactError, match=message) as caught:
        prepare_training(options(tmp_path, make_model(), require_all=True, **changes))
    assert "--require_all" in caught.value.hint
    assert not (tmp_path / "made").exists()
    report = prepare_training(options(tmp_path, make_model(), **changes))
    assert len(report.notes) == 1


def test_all_parameters_are_accounted_for_where_that_is_asked(tmp_path: Path) -> None:
    """A list that leaves some out is a choice, and no note."""
    assert prepare_training(options(tmp_path, perceptron(), **CHOSEN)).notes == ()
    with pytest.raises(ArtifactError, match=r"fc1.weight, fc1.bias neither trained nor frozen"):
        prepare_training(options(tmp_path, perceptron(), require_all=True, force=True, **CHOSEN))


@pytest.mark.parametrize("name", SETTLED)
def test_what_is_said_by_name_is_no_doubt(tmp_path: Path, name: str) -> None:
    """It was meant."""
    make_model, changes = SETTLED[name]
    report = prepare_training(options(tmp_path, make_model(), require_all=True, **changes))
    assert report.notes == ()


@pytest.mark.parametrize(
    "operators",
    [("Softmax", "Dropout"), ("Softmax", "Clip"), ("LogSoftmax", "Exp")],
    ids=["dropout", "clipped", "exponential"],
)
def test_probabilities_in_another_form_are_refused(tmp_path: Path, operators: tuple[str, str]) -> None:
    """The graph proves them, whatever their name is; the exponential of anything else may be logits."""
    model = perceptron()
    model.graph.node[-1].output[0] = "scores"
    values = ("scores", "p", "y")
    for kind, source, result in zip(operators, values, values[1:], strict=False):
        model.graph.node.append(helper.make_node(kind, [source], [result]))
    with pytest.raises(ArtifactError, match="'y' are probabilities") as caught:
        make(tmp_path, model)
    assert "--loss_input scores" in caught.value.hint
    model.graph.node[-2].CopyFrom(helper.make_node("Neg", ["scores"], ["p"]))
    assert make(tmp_path, model, optimizer=None).trained
