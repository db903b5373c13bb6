"""Losses have PyTorch's values and slopes, at the extremes as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import ArtifactError
from onnxtool.training import artifacts, onnxblock
from onnxtool.training.onnxblock import loss
from tests.training.small_models import perceptron, run_block

# Both compute in float32, and sum in other orders.
RTOL = 1e-5
F = torch.nn.functional


def pairs(seed: int = 0) -> dict[str, NDArray[Any]]:
    draw = np.random.default_rng(seed)
    return {
        "x": draw.standard_normal((4, 3)).astype(np.float32),
        "target": draw.uniform(size=(4, 3)).astype(np.float32),
    }


def slopes(block: onnxblock.Block, x: NDArray[np.float32], labels: NDArray[Any], name: str) -> tuple[float, Any]:
    """Return loss and gradient with respect to x, a parameter."""

    class Model(onnxblock.TrainingBlock):
        def build(self, *names: str) -> Any:
            return block(*names)

    x_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "g", [], [x_info], [onnx.numpy_helper.from_array(x, "x")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    built = Model()
    built.requires_grad("x")
    with onnxblock.base(model):
        built("y")
    session = ort.InferenceSession(built.to_model_proto()[0].SerializeToString())
    feeds = {name: labels, "x": x, "x_grad.accumulation.buffer": np.zeros_like(x), "lazy_reset_grad": np.array([True])}
    value, gradient = session.run(None, feeds)
    return float(value), gradient


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("block", "reference"),
    [
        (loss.MSELoss, F.mse_loss),
        (loss.L1Loss, F.l1_loss),
        (lambda reduction: loss.BCEWithLogitsLoss(reduction=reduction), F.binary_cross_entropy_with_logits),
    ],
    ids=["MSELoss", "L1Loss", "BCEWithLogitsLoss"],
)
def test_losses_of_elements_are_pytorchs(block: Any, reference: Any, reduction: str) -> None:
    """With every reduction, none among them."""
    feeds = pairs()
    wanted = reference(torch.tensor(feeds["x"]), torch.tensor(feeds["target"]), reduction=reduction)
    np.testing.assert_allclose(run_block(block(reduction=reduction), feeds, ["x"])[0], wanted.numpy(), rtol=RTOL)


def test_binary_cross_entropy_takes_weights() -> None:
    """One for each element, and one for positive targets."""
    feeds = pairs()
    weight, positive = np.array([0.5, 1, 2], np.float32), np.array([3, 1, 0.2], np.float32)
    wanted = F.binary_cross_entropy_with_logits(
        torch.tensor(feeds["x"]),
        torch.tensor(feeds["target"]),
        weight=torch.tensor(weight),
        pos_weight=torch.tensor(positive),
    )
    found = run_block(loss.BCEWithLogitsLoss(weight=weight, pos_weight=positive), feeds, ["x"])[0]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=RTOL)


def test_binary_cross_entropy_is_finite_for_any_logit() -> None:
    """log(sigmoid(x)) is -inf from about -104 on; the loss there is 200 for a positive target."""
    feeds = {"x": np.array([[-200, 200]], np.float32), "target": np.array([[1, 0]], np.float32)}
    found = run_block(loss.BCEWithLogitsLoss(reduction="none"), feeds, ["x"])[0]
    np.testing.assert_allclose(found, [[200, 200]], rtol=RTOL)


def test_binary_cross_entropy_has_its_slope_at_zero() -> None:
    """Where a form with abs(x) has none; a network that starts at zero would not learn from it."""
    x, target = np.zeros((2, 2), np.float32), np.array([[1, 0], [1, 1]], np.float32)
    _, gradient = slopes(loss.BCEWithLogitsLoss(reduction="sum"), x, target, "target")
    np.testing.assert_allclose(gradient, 0.5 - target, rtol=RTOL)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, np.array([0.2, 1, 3], np.float32)], ids=["equal", "weighted"])
@pytest.mark.parametrize("ignored", [None, 1, -100])
@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 4)], ids=["samples", "pixels"])
def test_cross_entropy_and_its_gradient_are_pytorchs(
    reduction: str, weight: NDArray[np.float32] | None, ignored: int | None, shape: tuple[int, ...]
) -> None:
    """With class weights, ignored labels and further axes."""
    draw = np.random.default_rng(1)
    x = draw.standard_normal(shape).astype(np.float32)
    labels = draw.integers(0, 3, (shape[0], *shape[2:]))
    if ignored is not None:
        labels.flat[::2] = ignored
    tensor = torch.tensor(x, requires_grad=True)
    options: dict[str, Any] = {} if ignored is None else {"ignore_index": ignored}
    classes = None if weight is None else torch.tensor(weight)
    wanted = F.cross_entropy(tensor, torch.tensor(labels), weight=classes, reduction=reduction, **options)
    wanted.backward()
    block = loss.CrossEntropyLoss(weight=weight, reduction=reduction, ignore_index=ignored)
    value, gradient = slopes(block, x, labels, "labels")
    assert value == pytest.approx(wanted.item(), rel=RTOL)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_cross_entropy_of_no_label_is_zero() -> None:
    """And so is its gradient; PyTorch gives nan, which would end a training."""
    x = np.ones((2, 3), np.float32)
    value, gradient = slopes(loss.CrossEntropyLoss(ignore_index=-100), x, np.full(2, -100), "labels")
    assert value == 0
    assert not gradient.any()


def test_cross_entropy_takes_classes_on_the_last_axis() -> None:
    """As language models give them."""
    draw = np.random.default_rng(2)
    x, labels = draw.standard_normal((2, 4, 3)).astype(np.float32), draw.integers(0, 3, (2, 4))
    tensor = torch.tensor(x, requires_grad=True)
    wanted = F.cross_entropy(tensor.flatten(0, 1), torch.tensor(labels).flatten())
    wanted.backward()
    value, gradient = slopes(loss.CrossEntropyLoss(axis=-1), x, labels, "labels")
    assert value == pytest.approx(wanted.item(), rel=RTOL)
    assert tensor.grad is not None
    np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-4, atol=1e-7)


def test_an_unknown_reduction_is_refused() -> None:
    """When the loss is made, and not when it is built."""
    with pytest.raises(ArtifactError, match="no reduction 'median'"):
        loss.MSELoss("median")


def test_two_losses_share_a_target() -> None:
    """A target that is there already is read, and no second input is made."""
    feeds = pairs()

    class Both(onnxblock.Block):
        def build(self, name: str) -> Any:
            return onnxblock.blocks.Add()(loss.MSELoss()(name), loss.L1Loss()(name))

    x, target = (torch.tensor(feeds[name]) for name in ("x", "target"))
    wanted = F.mse_loss(x, target) + F.l1_loss(x, target)
    np.testing.assert_allclose(run_block(Both(), feeds, ["x"])[0], wanted.numpy(), rtol=RTOL)


def test_a_cross_entropy_of_one_class_is_refused() -> None:
    """It is zero, and so is its gradient: a ranker of one score would never learn."""
    feeds = {"scores": np.zeros((4, 1), np.float32)}
    with pytest.raises(ArtifactError, match="are of one class") as caught:
        run_block(onnxblock.loss.CrossEntropyLoss(), feeds)
    assert "BCEWithLogitsLoss" in caught.value.hint


def _ends_in(operator: str) -> onnx.ModelProto:
    """Make the perceptron whose output is probabilities, by way of an Identity."""
    model = perceptron()
    model.graph.node[-1].output[0] = "scores"
    model.graph.node.append(helper.make_node(operator, ["scores"], ["p"], name="last"))
    model.graph.node.append(helper.make_node("Identity", ["p"], ["y"]))
    return model


@pytest.mark.parametrize(
    ("operator", "loss_type"),
    [("Softmax", artifacts.LossType.CrossEntropyLoss), ("Sigmoid", artifacts.LossType.BCEWithLogitsLoss)],
)
def test_a_loss_of_logits_refuses_probabilities_and_takes_what_they_are_made_of(
    tmp_path: Path, operator: str, loss_type: artifacts.LossType
) -> None:
    """A softmax of a softmax trains something else; the logits behind it train as those of a model without it."""
    model, losses = _ends_in(operator), []
    chosen: dict[str, Any] = {"requires_grad": ["fc1.weight"], "loss": loss_type}
    with pytest.raises(ArtifactError, match=f"'y' are probabilities: the node 'last' is a {operator}") as caught:
        artifacts.generate_artifacts(model, artifact_directory=tmp_path / "refused", **chosen)
    assert "--loss_input scores" in caught.value.hint
    for name, one, inputs in (("inner", model, ["scores"]), ("plain", perceptron(), None)):
        artifacts.generate_artifacts(one, artifact_directory=tmp_path / name, loss_input_names=inputs, **chosen)
        session = ort.InferenceSession(tmp_path / name / "eval_model.onnx")
        draw = np.random.default_rng(1)
        feeds = {"x": draw.standard_normal((4, 5)).astype(np.float32)}
        feeds |= (
            {"labels": np.array([0, 2, 1, 1])}
            if loss_type == artifacts.LossType.CrossEntropyLoss
            else {"target": draw.uniform(size=(4, 3)).astype(np.float32)}
        )
        state = {key: numpy_helper.to_array(weight) for weight in one.graph.initializer for key in [weight.name]}
        names = {value.name for value in session.get_inputs()}
        losses.append(session.run(None, {**{n: a for n, a in state.items() if n in names}, **feeds})[0])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_a_cross_entropy_takes_logarithms_of_probabilities() -> None:
    """Which are logits as good as any: a LogSoftmax of them changes nothing."""
    scores = np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32)
    labels = np.array([0, 2, 1, 1])

    class Logged(onnxblock.Block):
        def build(self, name: str) -> Any:
            return loss.CrossEntropyLoss()(self.accessor.add_node("LogSoftmax", [name]))

    found = run_block(Logged(), {"scores": scores, "labels": labels}, ["scores"])[0]
    assert float(found) == pytest.approx(F.cross_entropy(torch.tensor(scores), torch.tensor(labels)).item(), rel=1e-6)


def test_labels_are_shifted_by_one() -> None:
    """The scores at a token are for the next one; the last have no label, and what is ignored stays so."""
    draw = np.random.default_rng(4)
    scores = draw.standard_normal((2, 5, 7)).astype(np.float32)
    labels = draw.integers(0, 7, (2, 5))
    labels[1, 2:4] = -100
    loss = onnxblock.loss.CrossEntropyLoss(ignore_index=-100, axis=-1, shift=True)
    found = run_block(loss, {"scores": scores, "labels": labels}, ["scores"])[0]
    wanted = torch.nn.functional.cross_entropy(
        torch.tensor(scores)[:, :-1].flatten(0, 1), torch.tensor(labels)[:, 1:].flatten()
    )
    assert float(found) == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("arguments", [{"axis": -1}, {"ignore_index": -100}])
def test_labels_are_shifted_along_tokens_alone(arguments: dict[str, int]) -> None:
    """With the classes last, and with a label for what has no next one."""
    with pytest.raises(ArtifactError, match="shifted with axis=-1"):
        onnxblock.loss.CrossEntropyLoss(shift=True, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="have 2 axes"):
        run_block(
            onnxblock.loss.CrossEntropyLoss(ignore_index=-100, axis=-1, shift=True), {"x": np.zeros((2, 3), np.float32)}
        )
