"""A training on stock onnxruntime: modules, states, schedules and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from onnxtool.errors import ArtifactError, CheckpointError, InputError, ProviderError
from onnxtool.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer, Progress, fit
from onnxtool.training.checkpoints.checkpoint import Format
from tests.training.small_models import batch, load, make, parameters_of, perceptron


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a perceptron with its first bias frozen."""
    folder = tmp_path_factory.mktemp("artifacts")
    make(folder, perceptron(), frozen_params=["fc1.bias"], additional_output_names=["y"], nominal_checkpoint=True)
    return folder


def train(state: CheckpointState, module: Module, optimizer: Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(module(*batch(seed=state.checkpoint.step))[0]))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def test_a_training_goes_down(folder: Path) -> None:
    """In ten lines, with progress."""
    _, module, optimizer = load(folder)
    seen: list[Progress] = []
    optimizer.set_learning_rate(0.05)
    losses = fit(module, optimizer, [batch()] * 30, on_step=seen.append)
    assert losses[-1] < losses[0] / 2
    assert [progress.step for progress in seen] == list(range(1, 31))
    assert [progress.loss for progress in seen] == losses


def test_accumulated_batches_are_one_step(folder: Path) -> None:
    """What remains at the end is one as well."""
    _, module, optimizer = load(folder)
    fit(module, optimizer, [batch(seed=seed) for seed in range(5)], accumulate=2)
    assert optimizer.num_steps == 3
    with pytest.raises(InputError):
        fit(module, optimizer, [], accumulate=0)


def test_a_loss_of_several_values_is_refused(folder: Path) -> None:
    """The loss of a step is one number."""
    _, module, optimizer = load(folder)
    module.output_names = lambda: ["y"]  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"the loss is \[8, 3\], and a step needs one value"):
        fit(module, optimizer, [batch()])


def test_gradients_add_up_until_they_are_reset(folder: Path) -> None:
    """Lazily: the step after the reset begins anew."""
    state, module, _ = load(folder)
    parameter = state.parameters["fc2.weight"]
    assert parameter.grad is not None
    assert not parameter.grad.any()
    assert state.parameters["fc1.bias"].grad is None  # frozen
    grads: list[NDArray[Any]] = []
    for reset in (False, False, True):
        if reset:
            module.lazy_reset_grad()
        module(*batch())
        gradient = parameter.grad
        assert gradient is not None
        grads.append(gradient)
    np.testing.assert_allclose(grads[1], 2 * grads[0], rtol=1e-6)
    np.testing.assert_array_equal(grads[2], grads[0])


def test_evaluation_changes_nothing(folder: Path) -> None:
    """And gives the same loss as training, as there is no dropout here."""
    state, module, _ = load(folder)
    wanted = module(*batch())
    gradient = state.parameters["fc2.weight"].grad
    found = module.eval()(*batch())
    assert not module.training
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    np.testing.assert_array_equal(state.parameters["fc2.weight"].grad, gradient)
    assert module.train().training


def test_frozen_parameters_stay(folder: Path) -> None:
    """Whatever the steps."""
    state, module, optimizer = load(folder)
    frozen, trained = state.parameters["fc1.bias"], state.parameters["fc1.weight"]
    before = frozen.data, trained.data
    train(state, module, optimizer, 2)
    np.testing.assert_array_equal(frozen.data, before[0])
    assert (trained.data != before[1]).any()
    assert (frozen.requires_grad, trained.requires_grad) == (False, True)
    assert frozen.grad is None


@pytest.mark.parametrize("format_name", ["safetensors", "odtc"])
def test_a_training_goes_on_where_it_was_saved(folder: Path, tmp_path: Path, format_name: Format) -> None:
    """With its optimizer: the losses are those of a training that was not interrupted."""
    state, module, optimizer = load(folder)
    train(state, module, optimizer, 3)
    state.properties["epoch"] = 2
    path = tmp_path / "saved"
    CheckpointState.save_checkpoint(state, path, include_optimizer_state=True, format_name=format_name)
    wanted = train(state, module, optimizer, 3)
    again = CheckpointState.load_checkpoint(path)
    assert again.properties["epoch"] == 2
    other = Module(folder / "training_model.onnx", again, folder / "eval_model.onnx")
    assert train(again, other, Optimizer(folder / "optimizer_model.onnx", other), 3) == pytest.approx(wanted, rel=1e-6)


def test_without_the_optimizer_a_checkpoint_starts_anew(folder: Path, tmp_path: Path) -> None:
    """The default, as in the reference."""
    state, module, optimizer = load(folder)
    train(state, module, optimizer, 2)
    CheckpointState.save_checkpoint(state, tmp_path / "saved")
    saved = CheckpointState.load_checkpoint(tmp_path / "saved").checkpoint
    assert (saved.step, saved.moments) == (0, {})
    np.testing.assert_array_equal(saved.trainable["fc1.weight"], state.parameters["fc1.weight"].data)


def test_parameters_are_set_and_counted(folder: Path) -> None:
    """By name, with and without a module."""
    for state in (CheckpointState.load_checkpoint(folder / "checkpoint"), load(folder)[0]):
        new = np.arange(3, dtype=np.float32)
        state.parameters["fc2.bias"] = new
        np.testing.assert_array_equal(state.parameters["fc2.bias"].data, new)
        assert "fc2.bias" in state.parameters
        assert "fc9" not in state.parameters
        assert len(state.parameters) == len(list(state.parameters)) == 4
        with pytest.raises(KeyError):
            state.parameters["fc9"]
        with pytest.raises(ArtifactError, match="same shape|new value"):
            state.parameters["fc2.bias"] = np.zeros(4, np.float32)


def test_properties_are_numbers_and_texts(folder: Path) -> None:
    """Nothing else has a place in a checkpoint."""
    properties = CheckpointState.load_checkpoint(folder / "checkpoint").properties
    properties["epoch"], properties["name"] = 3, "run"
    assert dict(properties) == {"epoch": 3, "name": "run"}
    assert len(properties) == 2
    with pytest.raises(TypeError):
        properties["list"] = [1]  # type: ignore[assignment]


def test_all_parameters_are_one_buffer(folder: Path) -> None:
    """Copied out and in, as federated training does it."""
    state, module, _ = load(folder)
    sizes = {name: array.size for name, array in parameters_of(perceptron()).items()}
    assert module.get_parameters_size(trainable_only=False) == sum(sizes.values())
    assert module.get_parameters_size() == sum(sizes.values()) - sizes["fc1.bias"]
    buffer = module.get_contiguous_parameters(trainable_only=True)
    doubled = ort.OrtValue.ortvalue_from_numpy(2 * buffer.numpy())
    before = state.parameters["fc2.weight"].data
    module.copy_buffer_to_parameters(doubled)
    np.testing.assert_array_equal(state.parameters["fc2.weight"].data, 2 * before)
    with pytest.raises(ArtifactError, match="elements"):
        module.copy_buffer_to_parameters(doubled, trainable_only=False)


def test_a_nominal_checkpoint_wants_its_values(folder: Path) -> None:
    """Then it trains as the complete one does."""
    state, module, optimizer = load(folder)
    bare, other, other_optimizer = load(folder, "nominal_checkpoint")
    for call in (
        lambda: other(*batch()),
        other_optimizer.step,
        lambda: bare.parameters["fc2.weight"].data,
        other.get_contiguous_parameters,
    ):
        with pytest.raises(ArtifactError, match="has no values"):
            call()
    other.copy_buffer_to_parameters(module.get_contiguous_parameters(), trainable_only=False)
    assert train(bare, other, other_optimizer, 2) == train(state, module, optimizer, 2)


def test_the_trained_model_is_exported_for_inference(folder: Path, tmp_path: Path) -> None:
    """With the parameters inside, and without labels and loss."""
    state, module, optimizer = load(folder)
    train(state, module, optimizer, 3)
    module.export_model_for_inferencing(tmp_path / "model.onnx", ["y"])
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert [value.name for value in session.get_inputs()] == ["x"]
    x, labels = batch()
    np.testing.assert_allclose(session.run(None, {"x": x})[0], module.eval()(x, labels)[1], rtol=1e-6)
    with pytest.raises(ArtifactError, match="no value called 'z'"):
        module.export_model_for_inferencing(tmp_path / "model.onnx", ["z"])


def test_ortvalues_come_back_for_ortvalues(folder: Path) -> None:
    """What is on a device need not leave it for numpy."""
    _, module, _ = load(folder)
    values = [ort.OrtValue.ortvalue_from_numpy(array) for array in batch()]
    loss, _ = module(*values)
    assert isinstance(loss, ort.OrtValue)
    module.lazy_reset_grad()
    assert loss.numpy() == module(*batch())[0]


def test_a_schedule_warms_up_and_comes_down(folder: Path) -> None:
    """The reference takes the warm-up for the total."""
    state, module, optimizer = load(folder)
    schedule = LinearLRScheduler(optimizer, 2, 6, 0.4)
    rates = [optimizer.get_learning_rate()]
    for _ in range(6):
        train(state, module, optimizer, 1)
        schedule.step()
        rates.append(optimizer.get_learning_rate())
    assert rates == pytest.approx([0, 0.2, 0.4, 0.3, 0.2, 0.1, 0])
    with pytest.raises(ArtifactError):
        LinearLRScheduler(optimizer, 7, 6, 0.4)


def test_wrong_inputs_are_named(folder: Path) -> None:
    """Before onnxruntime sees them."""
    _, module, _ = load(folder)
    x, labels = batch()
    assert module.input_names() == ["x", "labels"]
    with pytest.raises(InputError, match="takes x, labels, but 1 were given"):
        module(x)
    with pytest.raises(InputError, match="labels.*int64.*not tensor.float"):
        module(x, labels.astype(np.float32))
    with pytest.raises(InputError, match="shape"):
        module(x[0], labels)
    with pytest.raises(InputError, match="input x .*axis 1 has to be 5"):
        module(x[:, :3], labels)


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """By names, and by shapes."""
    make(tmp_path, perceptron(), requires_grad=["fc2.*"])
    with pytest.raises(ArtifactError, match="does not fit.*missing fc1.weight"):
        Module(folder / "training_model.onnx", CheckpointState.load_checkpoint(tmp_path / "checkpoint"))
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    state.checkpoint.trainable["fc2.bias"] = np.zeros(9, np.float32)
    with pytest.raises(ArtifactError, match=r"fc2.bias is \[9\], not \[3\]"):
        Module(folder / "training_model.onnx", state)


def test_moments_of_another_model_are_refused(folder: Path) -> None:
    """They would be added to the wrong parameters."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    state.checkpoint.moments = {"momentum0": {"other": np.zeros(3, np.float32)}}
    module = Module(folder / "training_model.onnx", state)
    with pytest.raises(ArtifactError, match="moments momentum0"):
        Optimizer(folder / "optimizer_model.onnx", module)


def test_files_in_the_wrong_place_are_told(folder: Path, tmp_path: Path) -> None:
    """An eval model that is not there, a device that is none, a model that is no optimizer."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    with pytest.raises(ArtifactError, match="no eval model"):
        module.eval()(*batch())
    with pytest.raises(ArtifactError, match="needs the eval model"):
        module.export_model_for_inferencing(tmp_path / "model.onnx", ["y"])
    with pytest.raises(ArtifactError, match="has no input"):
        Optimizer(folder / "eval_model.onnx", module)
    with pytest.raises(ProviderError):
        Module(folder / "training_model.onnx", state, device="tpu")
    with pytest.raises(CheckpointError):
        CheckpointState.load_checkpoint(tmp_path / "nothing")
