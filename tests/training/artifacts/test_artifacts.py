"""Artifacts have the contract of onnxruntime-training, and stock onnxruntime runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onnxtool.errors import ArtifactError, GradientError, OutputWriteError
from onnxtool.training import artifacts, onnxblock
from onnxtool.training.api import fit
from onnxtool.training.artifacts import generation
from onnxtool.training.checkpoints.checkpoint import load_checkpoint
from tests.training.small_models import batch, load, make, parameters_of, perceptron

NAMES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
FILES = ["checkpoint", "eval_model.onnx", "optimizer_model.onnx", "training_model.onnx"]


def names_of(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(path).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def test_the_four_files_are_written(tmp_path: Path) -> None:
    """As the document of onnxruntime-training says, with its example's arguments."""
    report = make(tmp_path, perceptron(), requires_grad=NAMES[:2], frozen_params=NAMES[2:])
    assert sorted(file.name for file in tmp_path.iterdir()) == FILES
    assert report.trained == tuple(NAMES[:2])
    assert report.frozen == tuple(NAMES[2:])


def test_inputs_and_outputs_are_the_references(tmp_path: Path) -> None:
    """The lists were read off the models that onnxruntime-training 1.19.2 writes for this network."""
    make(tmp_path, perceptron(), requires_grad=["fc1.weight", "fc2.weight", "fc2.bias"], frozen_params=["fc1.bias"])
    inputs, outputs = names_of(tmp_path / "training_model.onnx")
    trained = ("fc1.weight", "fc2.weight", "fc2.bias")
    buffers = [f"{name}_grad.accumulation.buffer" for name in trained]
    assert inputs == ["x", "labels", *NAMES, *buffers, "lazy_reset_grad"]
    assert outputs[1:] == [f"{name}_grad.accumulation.out" for name in trained]
    inputs, outputs = names_of(tmp_path / "eval_model.onnx")
    assert inputs == ["x", "labels", *NAMES]
    assert len(outputs) == 1
    inputs, _ = names_of(tmp_path / "optimizer_model.onnx")
    moments = ["first_order_moments", "second_order_moments"]
    assert inputs == ["learning_rate", "step", "params", "gradients", *moments]


def test_models_are_for_old_runtimes_and_small_ones(tmp_path: Path) -> None:
    """Standard operators, IR 9 and opset 20 at most: onnxruntime 1.17 reads them, and so do browsers and phones."""
    model = perceptron(dropout=0.1)
    model.opset_import[0].version, model.ir_version = 23, 11
    make(tmp_path, model)
    for path in tmp_path.glob("*.onnx"):
        written = onnx.load(path)
        onnx.checker.check_model(written, full_check=True)
        assert written.ir_version <= 9
        assert [opset.domain for opset in written.opset_import] == [""]
        assert written.opset_import[0].version <= 20
        assert {node.domain for node in written.graph.node} == {""}
        assert not {"SoftmaxCrossEntropyLoss", "BatchNormalization"} & {node.op_type for node in written.graph.node}


def test_patterns_name_parameters(tmp_path: Path) -> None:
    """Frozen ones stay frozen where both lists mean them, and a name goes before a pattern."""
    report = make(tmp_path, perceptron(), requires_grad=["*"], frozen_params=["fc1.*"])
    assert report.trained == ("fc2.weight", "fc2.bias")
    report = make(tmp_path, perceptron(), requires_grad=["*", "fc1.bias"], frozen_params=["fc1.*"])
    assert report.trained == ("fc1.bias", "fc2.weight", "fc2.bias")


def test_weights_in_constant_nodes_train_like_initializers(tmp_path: Path) -> None:
    """As Paddle's converter writes them: the same parameters, and the same losses over steps of training."""
    model = perceptron()
    held = perceptron()
    nodes = []
    for tensor in held.graph.initializer:
        array = numpy_helper.to_array(tensor)
        value: dict[str, Any] = {"value_floats": array.tolist()} if array.ndim == 1 else {"value": tensor}
        nodes.append(helper.make_node("Constant", [], [tensor.name], **value))
    nodes += held.graph.node
    del held.graph.initializer[:], held.graph.node[:]
    held.graph.node.extend(nodes)
    onnx.save(held, tmp_path / "held.onnx")
    assert make(tmp_path / "plain", model).trained == tuple(NAMES)
    assert make(tmp_path / "held", tmp_path / "held.onnx").trained == tuple(NAMES)
    losses = [
        fit(module, optimizer, [batch()] * 3)
        for _, module, optimizer in map(load, (tmp_path / "plain", tmp_path / "held"))
    ]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    assert len(onnx.load(tmp_path / "held.onnx").graph.initializer) == 0  # the file is as it was


def test_a_constant_with_an_attribute_of_any_name_is_refused(tmp_path: Path) -> None:
    """Onnxruntime takes it, ONNX does not know it; the message does not grow with the name."""
    model = perceptron()
    node = helper.make_node("Constant", [], ["odd"])
    node.attribute.append(helper.make_attribute("a" * 5_000, numpy_helper.from_array(np.zeros(2, np.float32))))
    model.graph.node.insert(0, node)
    with pytest.raises(ArtifactError, match="a Constant of the model cannot be read: Unsupported") as found:
        make(tmp_path, model)
    assert len(str(found.value)) < 500


def test_parameters_of_no_list_stay_constants(tmp_path: Path) -> None:
    """As the reference has it."""
    make(tmp_path, perceptron(), requires_grad=["fc2.weight"])
    inputs, _ = names_of(tmp_path / "eval_model.onnx")
    assert inputs == ["x", "labels", "fc2.weight"]


def test_a_prefix_is_before_each_name(tmp_path: Path) -> None:
    """And is no way out of the folder."""
    make(tmp_path, perceptron(), prefix="mine_", nominal_checkpoint=True)
    assert {file.name for file in tmp_path.iterdir()} == {f"mine_{name}" for name in (*FILES, "nominal_checkpoint")}
    with pytest.raises(ArtifactError, match="is a path"):
        make(tmp_path / "deeper", perceptron(), prefix="../")


def test_further_outputs_are_given(tmp_path: Path) -> None:
    """In both models, after the loss; the gradients do not change by it."""
    make(tmp_path, perceptron(), additional_output_names=["y", "h"])
    _, module, _ = load(tmp_path)
    x, labels = batch()
    loss, y, h = module(x, labels)
    weights = parameters_of(perceptron())
    np.testing.assert_allclose(h, x @ weights["fc1.weight"].T + weights["fc1.bias"], rtol=1e-5, atol=1e-6)
    assert torch.nn.functional.cross_entropy(torch.tensor(y), torch.tensor(labels)).item() == pytest.approx(loss)
    assert len(module.eval()(x, labels)) == 3


def test_a_nominal_checkpoint_has_names_alone(tmp_path: Path) -> None:
    """Beside the complete one."""
    make(tmp_path, perceptron(), nominal_checkpoint=True)
    nominal = load_checkpoint(tmp_path / "nominal_checkpoint")
    assert nominal.is_nominal
    assert list(nominal.trainable) == list(load_checkpoint(tmp_path / "checkpoint").trainable)
    assert not any(array.any() for array in nominal.trainable.values())


def test_ort_files_train_as_well(tmp_path: Path) -> None:
    """They are for builds of onnxruntime that read nothing else."""
    from onnxtool.training.api import CheckpointState, Module

    report = make(tmp_path, perceptron(), ort_format=True)
    assert {Path(file.path) for file in report.files} == set(tmp_path.iterdir())
    operators = (tmp_path / "training_model.required_operators.config").read_text()  # for a build of these alone
    assert "# - training_model.ort" in operators
    x, labels = batch()
    modules = [
        Module(tmp_path / f"training_model.{ending}", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
        for ending in ("onnx", "ort")
    ]
    # The converter optimizes, which changes the order of sums.
    assert modules[0](x, labels) == pytest.approx(modules[1](x, labels), rel=1e-6)


def test_a_model_with_external_data_is_passed_by_its_path(tmp_path: Path) -> None:
    """Models of more than 2 GB have to be; what stays constant in them goes beside the artifacts."""
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(perceptron(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    make(tmp_path / "a", path, requires_grad=["fc2.weight"], frozen_params=["fc2.bias"])
    make(tmp_path / "b", perceptron(), requires_grad=["fc2.weight"], frozen_params=["fc2.bias"])
    (folder / "weights.bin").unlink()  # nothing refers to it any more
    losses = [load(tmp_path / name)[1](*batch()) for name in ("a", "b")]
    assert losses[0] == losses[1]


def test_the_loss_is_called_loss(tmp_path: Path) -> None:
    """In both models; a model that has a value of this name keeps it, and one that ends in its loss its own name."""
    make(tmp_path / "a", perceptron())
    taken = perceptron()
    taken.graph.node[0].output[0] = taken.graph.node[1].input[0] = "loss"
    make(tmp_path / "b", taken)
    for folder, expected in (("a", "loss"), ("b", "onnxblock/")):
        for name in ("training_model", "eval_model"):
            first = onnx.load(tmp_path / folder / f"{name}.onnx").graph.output[0].name
            assert first.startswith(expected), (folder, name)
    losses = [load(tmp_path / folder)[1](*batch()) for folder in ("a", "b")]
    assert losses[0] == losses[1]


def test_an_optimizer_of_ones_own_is_taken(tmp_path: Path) -> None:
    """A block in place of the enumeration."""

    class SignDescent(onnxblock.optim.Optimizer):
        def update(self, body: Any, parameters: str, gradients: str, moments: Any) -> None:
            step = body.op("Mul", body.op("Sign", gradients), "learning_rate")
            body.op("Sub", parameters, step, to=f"{parameters}_out")

    make(tmp_path, perceptron(), optimizer=SignDescent())
    state, module, optimizer = load(tmp_path)
    before = state.parameters["fc2.bias"].data
    optimizer.set_learning_rate(0.25)
    module(*batch())
    optimizer.step()
    np.testing.assert_allclose(np.abs(state.parameters["fc2.bias"].data - before), 0.25, rtol=1e-6)


def test_without_a_loss_the_first_output_is_it(tmp_path: Path) -> None:
    """For models that compute their own."""
    model = perceptron()
    model.graph.node.append(helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0, name="mean"))
    model.graph.output.insert(0, helper.make_tensor_value_info("mean", TensorProto.FLOAT, []))
    make(tmp_path, model, loss=None)
    _, module, _ = load(tmp_path)
    assert module.input_names() == ["x"]
    assert len(module(batch()[0])) == 2


def test_without_an_optimizer_three_files_are_written(tmp_path: Path) -> None:
    """The reference does the same."""
    make(tmp_path, perceptron(), optimizer=None)
    assert sorted(file.name for file in tmp_path.iterdir()) == [name for name in FILES if "optimizer" not in name]


def integer_output() -> onnx.ModelProto:
    model = perceptron()
    model.graph.node.append(helper.make_node("ArgMax", ["y"], ["best"], name="best"))
    model.graph.output.insert(0, helper.make_tensor_value_info("best", TensorProto.INT64, [1, 3]))
    return model


def half_precision() -> onnx.ModelProto:
    model = perceptron()
    array = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float16)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, "fc1.weight"))
    return model


WRONG: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, Any], str]] = {
    "in both lists": (perceptron, {"requires_grad": NAMES, "frozen_params": NAMES[:1]}, "trained and frozen at once"),
    "unknown": (perceptron, {"requires_grad": ["fc1.wieght"]}, "no parameter called 'fc1.wieght'"),
    "unknown and frozen": (perceptron, {"frozen_params": ["fc9"]}, "no parameter called 'fc9'"),
    "no match": (perceptron, {"requires_grad": ["conv*"]}, "matches none of the 4"),
    "nothing": (perceptron, {"requires_grad": None}, "no parameter to optimize"),
    "missing loss input": (perceptron, {"loss_input_names": ["logits"]}, "no value called 'logits'"),
    "missing output": (perceptron, {"additional_output_names": ["z"]}, "no value called 'z'"),
    "two outputs": (lambda: perceptron(outputs=2), {}, "takes one value, and there are y1, y2"),
    "integer loss": (integer_output, {"loss": None}, "is int64"),
    "not scalar": (perceptron, {"loss": None}, "has the shape"),
    "no loss": (perceptron, {"loss": "mse"}, "'mse' is not a loss"),
    "half": (half_precision, {}, "is float16"),
    "library": (perceptron, {"custom_op_library": "ops.so"}, "no gradients"),
    "unread": (lambda: perceptron(outputs=2), {"loss_input_names": ["y1"], "requires_grad": ["fc3.bias"]}, "depend"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_gives_one_clear_error(tmp_path: Path, name: str) -> None:
    """With a hint, and nothing is written."""
    model, arguments, message = WRONG[name]
    with pytest.raises((ArtifactError, GradientError), match=message) as caught:
        make(tmp_path, model(), **arguments)
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


def test_the_nearest_names_are_offered(tmp_path: Path) -> None:
    """Names are long, and typed by hand."""
    with pytest.raises(ArtifactError) as caught:
        make(tmp_path, perceptron(), requires_grad=["fc1.wieght"])
    assert "did you mean fc1.weight" in caught.value.hint


def test_errors_are_those_of_the_reference_as_well(tmp_path: Path) -> None:
    """Code that catches RuntimeError and TypeError goes on to work."""
    with pytest.raises(RuntimeError):
        make(tmp_path, perceptron(), requires_grad=NAMES, frozen_params=NAMES)
    with pytest.raises(TypeError):
        make(tmp_path, perceptron(), optimizer="adam")


def test_a_failure_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training in a folder of two halves would diverge without an error."""
    make(tmp_path, perceptron())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generation, "write_checkpoint", fail)
    with pytest.raises(OutputWriteError):
        make(tmp_path, perceptron(), requires_grad=["fc2.*"])
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_every_loss_and_optimizer_of_the_enumerations_is_there(tmp_path: Path) -> None:
    """Each pair gives models that onnxruntime loads."""
    for kind in artifacts.LossType:
        for optimizer in artifacts.OptimType:
            make(tmp_path, perceptron(), loss=kind, optimizer=optimizer)
            for path in tmp_path.glob("*.onnx"):
                ort.InferenceSession(path)
