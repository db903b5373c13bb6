"""Labels that are neither a class nor ignored are an error, as in PyTorch: in the graphs, and by name in the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxtool.errors import InputError
from onnxtool.training import artifacts, onnxblock
from onnxtool.training.onnxblock.block import TrainingBlock
from onnxtool.training.onnxblock.loss import CrossEntropyLoss
from tests.training.small_models import load, make, perceptron

CLASSES = 3
SAMPLES, TOKENS, PIXELS = (4, CLASSES), (2, 3, CLASSES), (2, CLASSES, 2)
WRONG = (-1, -CLASSES, -CLASSES - 1, CLASSES, -100, 2**40)
_WEIGHT = np.array([1, 2, 3], np.float32)


def _own(kind: str, **attributes: Any) -> list[Any]:
    """Make the nodes of a model that computes its loss itself."""
    if kind == "NegativeLogLikelihoodLoss":
        first = helper.make_node("LogSoftmax", ["y"], ["logarithms"], axis=1)
        return [first, helper.make_node(kind, ["logarithms", "labels"], ["loss"], **attributes)]
    return [helper.make_node(kind, ["y", "labels"], ["loss"], **attributes)]


# The shape of the scores, the loss or the nodes of one, and what PyTorch is told of it.
LOSSES: dict[str, tuple[tuple[int, ...], Any, dict[str, Any]]] = {
    "samples": (SAMPLES, CrossEntropyLoss(), {}),
    "samples, one ignored": (SAMPLES, CrossEntropyLoss(ignore_index=-100), {"ignore_index": -100}),
    "samples, a class ignored": (SAMPLES, CrossEntropyLoss(ignore_index=1), {"ignore_index": 1}),
    "samples, weighted": (SAMPLES, CrossEntropyLoss(_WEIGHT), {"weight": _WEIGHT}),
    "samples, weighted and ignored": (
        SAMPLES,
        CrossEntropyLoss(_WEIGHT, ignore_index=-1),
        {"weight": _WEIGHT, "ignore_index": -1},
    ),
    "tokens": (TOKENS, CrossEntropyLoss(ignore_index=-100, axis=-1), {"ignore_index": -100}),
    "pixels": (PIXELS, CrossEntropyLoss(), {}),
    "pixels, one ignored": (PIXELS, CrossEntropyLoss(ignore_index=-100), {"ignore_index": -100}),
    "of the model": (PIXELS, _own("SoftmaxCrossEntropyLoss", ignore_index=-1), {"ignore_index": -1}),
    "likelihood": (SAMPLES, _own("NegativeLogLikelihoodLoss"), {}),
    "likelihood of pixels": (PIXELS, _own("NegativeLogLikelihoodLoss", ignore_index=-100), {"ignore_index": -100}),
}


def graphs(shape: tuple[int, ...], loss: Any) -> tuple[ModelProto, ModelProto]:
    """Return the training and the eval model of scores that are the parameter x."""

    class Model(TrainingBlock):
        def build(self, *names: str) -> Any:
            return onnxblock.blocks.PassThrough()(*names) if isinstance(loss, list) else loss(*names)

    sizes = [size for axis, size in enumerate(shape) if axis != (2 if shape == TOKENS else 1)]
    nodes, output, inputs = [helper.make_node("Identity", ["x"], ["y"])], "y", []
    if isinstance(loss, list):
        nodes, output = [*nodes, *loss], "loss"
        inputs = [helper.make_tensor_value_info("labels", TensorProto.INT64, sizes)]
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, [] if inputs else shape)
    graph = helper.make_graph(nodes, "g", inputs, [result], [numpy_helper.from_array(np.zeros(shape, np.float32), "x")])
    built = Model()
    built.requires_grad("x")
    with onnxblock.base(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)):
        built(output)
    return built.to_model_proto()


def run(model: ModelProto, feeds: dict[str, NDArray[Any]]) -> float | str:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options)
    try:
        return float(session.run(None, {one.name: feeds[one.name] for one in session.get_inputs()})[0])
    except Exception as error:  # noqa: BLE001 - onnxruntime has no error of its own
        return str(error)


def in_pytorch(x: NDArray[np.float32], labels: NDArray[np.int64], options: dict[str, Any]) -> float | str:
    scores = torch.tensor(x).movedim(-1, 1) if x.shape == TOKENS else torch.tensor(x)
    options = {name: torch.tensor(one) if name == "weight" else one for name, one in options.items()}
    try:
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(labels), **{"ignore_index": -12345, **options})
    except IndexError as error:
        return str(error)
    return float(loss)


@pytest.mark.parametrize("name", LOSSES)
def test_no_runtime_trains_on_a_label_that_is_no_class(name: str) -> None:
    """ONNX would count from -C to -1 from the last class; the index is out of bounds instead, so any runtime raises."""
    shape, loss, options = LOSSES[name]
    models, draw = graphs(shape, loss), np.random.default_rng(0)
    x = draw.standard_normal(shape).astype(np.float32)
    feeds = {"x": x, "x_grad.accumulation.buffer": np.zeros_like(x), "lazy_reset_grad": np.array([True])}
    sizes = [size for axis, size in enumerate(shape) if axis != (2 if shape == TOKENS else 1)]
    outcomes = set()
    for wrong in (*range(CLASSES), *WRONG):
        labels = np.resize([0, 2, wrong, 1], sizes)
        expected = in_pytorch(x, labels, options)
        outcomes.add(type(expected))
        for model in models:
            found = run(model, {**feeds, "labels": labels})
            if isinstance(expected, str):
                assert isinstance(found, str), (wrong, found)
                assert "out of" in found.lower(), (wrong, found)
            else:
                assert found == pytest.approx(expected, rel=1e-5), wrong
    assert outcomes == {float, str}


# The ignored label, the labels of two samples, and the error of one of them.
NAMED: dict[int | None, dict[tuple[int, int], str]] = {
    None: {
        (0, -1): "the label -1, .* 3 classes, from 0 to 2; no ignore_index is set",
        (3, 0): "the label 3, .* 3 classes, from 0 to 2",
        (0, -100): "the label -100, .* no ignore_index is set",
        (2**40, 0): "the label 1099511627776",
    },
    -1: {(-1, -100): "the label -100, .* the ignore_index is -1", (-1, 3): "the label 3"},
}


@pytest.mark.parametrize("ignored", NAMED)
def test_the_label_the_classes_and_the_ignored_one_are_named(tmp_path: Path, ignored: int | None) -> None:
    """In training and in evaluation, in arrays and OrtValues, before anything runs: the gradients stay as they are."""
    make(tmp_path, perceptron(), loss=CrossEntropyLoss(ignore_index=ignored))
    _, module, _ = load(tmp_path)
    x, right = np.ones((2, 5), np.float32), np.array([0, 2])
    for mode in (True, False):
        module.train(mode)
        before = module(x, right)
        module.lazy_reset_grad()
        gradient = module.gradient("fc1.weight")
        for labels, message in NAMED[ignored].items():
            for wrong in (np.array(labels), ort.OrtValue.ortvalue_from_numpy(np.array(labels))):
                with pytest.raises(InputError, match=message) as caught:
                    module(x, wrong)
                assert "--ignore_index" in caught.value.hint
        np.testing.assert_array_equal(module.gradient("fc1.weight"), gradient)
        assert module(x, right) == before


def test_shifted_labels_count_from_the_second_on(tmp_path: Path) -> None:
    """The first one of a text has no logits, so PyTorch does not look at it."""
    model = perceptron()
    del model.graph.output[0].type.tensor_type.shape.dim[:], model.graph.input[0].type.tensor_type.shape.dim[:]
    for value, last in ((model.graph.output[0], CLASSES), (model.graph.input[0], 5)):
        for size in ("N", "S", last):
            dim = value.type.tensor_type.shape.dim.add()
            dim.dim_value, dim.dim_param = (size, "") if isinstance(size, int) else (0, size)
    for node, place in ((model.graph.node[0], "h"), (model.graph.node[2], "y")):
        node.CopyFrom(helper.make_node("MatMul", [node.input[0], node.input[1]], [place], name=place))
    for tensor in (model.graph.initializer[0], model.graph.initializer[2]):
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).T.copy(), tensor.name))
    report = make(tmp_path, model, loss=CrossEntropyLoss(ignore_index=-100, axis=-1, shift=True))
    assert report.labels == {"labels": {"classes": 3, "first": 1, "ignore_index": -100}}
    _, module, _ = load(tmp_path)
    x, labels = np.ones((1, 4, 5), np.float32), np.array([[-7, 1, -100, 2]])
    assert np.isfinite(module(x, labels))
    with pytest.raises(InputError, match="the label -7"):
        module(x, labels[:, ::-1].copy() * 0 - 7)


def test_any_target_of_a_binary_loss_of_logits_is_taken(tmp_path: Path) -> None:
    """As in PyTorch, whose BCEWithLogitsLoss takes any number."""
    make(tmp_path, perceptron(), loss=artifacts.LossType.BCEWithLogitsLoss, optimizer=artifacts.OptimType.SGD)
    _, module, _ = load(tmp_path)
    x, target = np.ones((2, 5), np.float32), np.array([[-1, 2, 0.5], [0, 1, 3]], np.float32)
    graph = perceptron().graph
    weights = [torch.tensor(numpy_helper.to_array(one)) for one in graph.initializer]
    hidden = torch.relu(torch.tensor(x) @ weights[0].T + weights[1])
    scores = hidden @ weights[2].T + weights[3]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor(target))
    assert module(x, target) == pytest.approx(expected.item(), rel=1e-5)
