"""Verify that artifacts train as PyTorch does, by three steps with them before they are moved into place.

Each step compares losses, gradients and the new parameters, from which both sides start the next one. In the reference,
dropout is enabled and scales its input but drops nothing. This way both sides need no shared random numbers, and a
missing scale in the backward pass is detected. Letters: B samples, S tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool.errors import ArtifactError, SessionError, first_line
from onnxtool.training.checkpoints.checkpoint import load_checkpoint
from onnxtool.training.graphs.names import (
    GRADIENTS,
    INPUTS_WITH_GRADIENT,
    LAZY_RESET,
    LEARNING_RATE,
    PARAMETERS,
    STEP,
    accumulated_name,
    buffer_name,
    description,
    parameter_of_buffer,
    updated_name,
)

_SEED = 20
STEPS = 3
_RATE = 1e-3


@dataclass(frozen=True)
class LossSetting:
    """A loss on one output of the model.

    Attributes:
        name: a member of LossType.
        output: the name of the output.
        class_axis: 1 or -1, for a cross entropy.
        ignore_index: for a cross entropy; None if no label is ignored.
        shift: whether the logits at a token are for the label of the next one.
    """

    name: str
    output: str
    class_axis: int = -1
    ignore_index: int | None = None
    shift: bool = False


@dataclass(frozen=True)
class OptimizerSetting:
    """An optimizer, a member of OptimType, and its options."""

    name: str
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


@dataclass(frozen=True)
class TorchStep:
    """The results computed by PyTorch.

    Attributes:
        labels: the labels or targets.
        loss: in training mode.
        eval_loss: in eval mode.
        own_loss: the model's own loss for these labels, in eval mode; None if it computes none.
        gradients: by parameter name, with all names of a tied parameter, or by input name.
    """

    labels: NDArray[Any]
    loss: float
    eval_loss: float
    own_loss: float | None
    gradients: dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class TorchModel:
    """A transformers model and sample inputs for it.

    Attributes:
        model: in float32, on the CPU.
        sample: input tensors by name.
    """

    model: Any
    sample: Mapping[str, Any]

    def inputs(self) -> dict[str, NDArray[Any]]:
        """Return the sample as arrays."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.sample.items()}

    def step(self, setting: LossSetting, trained: Collection[str], inputs: Collection[str] = ()) -> TorchStep:
        """Compute the loss and gradients, including those of `inputs`.

        Batch normalizations whose parameters are not in `trained` stay in eval mode.
        """
        import torch

        model = self.model.eval()
        with torch.no_grad():
            logits = self._output(setting.output, self.sample)
            labels = draw_labels(logits, setting)
            eval_loss = float(torch_loss(logits, labels, setting))
            own = self._own_loss(labels, setting)
        model.train()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not {  # noqa: SLF001 - there is no other
                f"{name}.weight",
                f"{name}.bias",
            } & set(trained):
                module.eval()
        model.zero_grad(set_to_none=True)
        leaves = {name: self.sample[name].detach().clone().requires_grad_() for name in inputs}
        with _scaling_dropout():
            loss = torch_loss(self._output(setting.output, {**self.sample, **leaves}), labels, setting)
            loss.backward()
        gradients = {
            name: leaf.grad.numpy()
            for name, leaf in (*model.named_parameters(remove_duplicate=False), *leaves.items())
            if leaf.grad is not None
        }
        return TorchStep(labels.numpy(), loss.item(), eval_loss, own, gradients)

    def load(self, parameters: Mapping[str, NDArray[Any]]) -> None:
        """Set parameters."""
        import torch

        known = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, array in parameters.items():
                known[name].copy_(torch.from_numpy(array))
                known[name].grad = None

    def _output(self, name: str, sample: Mapping[str, Any]) -> Any:
        result = self.model(**sample)
        return result if not isinstance(result, Mapping) else result[name]

    def _own_loss(self, labels: Any, setting: LossSetting) -> float | None:
        """Return the model's own loss for labels; None if it takes no labels, or a different kind."""
        import torch

        if setting.output != "logits":
            return None
        own_labels = labels.reshape(-1) if setting.name == "MSELoss" and labels.shape[-1] == 1 else labels
        try:
            loss = self.model(**self.sample, labels=own_labels).loss
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError):
            return None
        return float(loss) if isinstance(loss, torch.Tensor) else None


def draw_labels(logits: Any, setting: LossSetting) -> Any:
    """Draw labels for logits [B, C] or [B, S, C] with a third of them ignored, or targets of the same shape."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    if setting.name != "CrossEntropyLoss":
        targets = torch.rand(logits.shape, generator=generator)
        return targets.round() if setting.name == "BCEWithLogitsLoss" else targets
    sizes = list(logits.shape)
    classes = sizes.pop(setting.class_axis)
    labels = torch.randint(classes, sizes, generator=generator)
    if setting.ignore_index is not None and labels.numel() > 2:
        flat = labels.reshape(-1)
        flat[2::3] = setting.ignore_index
    return labels


def torch_loss(logits: Any, labels: Any, setting: LossSetting) -> Any:
    """Compute one of the LossType losses in PyTorch."""
    from torch.nn import functional

    if setting.name == "CrossEntropyLoss":
        if setting.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        ignored = -100 if setting.ignore_index is None else setting.ignore_index
        return functional.cross_entropy(logits.movedim(setting.class_axis, 1), labels, ignore_index=ignored)
    functions: dict[str, Any] = {
        "MSELoss": functional.mse_loss,
        "L1Loss": functional.l1_loss,
        "BCEWithLogitsLoss": functional.binary_cross_entropy_with_logits,
    }
    return functions[setting.name](logits, labels)


@contextmanager
def _scaling_dropout() -> Iterator[None]:
    """Make dropout scale its input but drop nothing."""
    from torch.nn import functional

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002 - PyTorch's name
        return input / (1 - p) if training and p < 1 else input

    original = functional.dropout
    functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = original


# Both sides compute in float32. Rounding causes errors of 1e-6 to 1e-4, depending on depth; a bug causes 1e-2.
TOLERANCE = 1e-3
# A gradient that is zero apart from rounding, such as the gradient of the key bias in attention, is compared relative
# to this fraction of the network's largest gradient.
SMALL = 1e-2
_USUAL = 8.0  # times the median: the usual elements
_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)


@dataclass(frozen=True)
class ArtifactVerification:
    """The differences between artifacts and PyTorch; all errors are relative.

    Attributes:
        reference: the class of the model.
        loss: the training model's loss.
        reference_loss: PyTorch's loss.
        loss_error: error of the loss in training mode.
        eval_loss_error: error of the eval model's loss.
        gradient_error: the largest error of an element divided by it, or by the usual ones of its gradient.
        worst_parameter: the parameter or input with this error.
        update_error: the same of the changes that the optimizer makes; 0 without one.
        num_gradients: number of parameters and inputs compared.
        tolerance: the largest accepted error.
        own_loss: the model's own loss for the same labels, in eval mode; None if it computes none.
        own_loss_error: the difference between the model's own loss and the eval model's loss.
    """

    reference: str
    loss: float
    reference_loss: float
    loss_error: float
    eval_loss_error: float
    gradient_error: float
    worst_parameter: str
    num_gradients: int
    update_error: float
    tolerance: float
    own_loss: float | None
    own_loss_error: float

    @property
    def passed(self) -> bool:
        """Whether all errors are within the tolerance."""
        errors = (self.loss_error, self.eval_loss_error, self.gradient_error, self.update_error)
        return all(error <= self.tolerance for error in errors)  # False for NaN


def verify_artifacts(
    folder: Path, prefix: str, model: TorchModel, setting: LossSetting, optimizer: OptimizerSetting | None = None
) -> ArtifactVerification | None:
    """Compare three steps of the models in `folder` with PyTorch's; dropout scales but drops nothing.

    Returns:
        The largest differences; None if the model draws random numbers outside Dropout.

    Raises:
        ArtifactError: they exceed the tolerance.
    """
    training = without_dropout(folder / f"{prefix}training_model.onnx")
    if training is None:
        return None
    written = WrittenModels(folder, prefix, training, model.inputs(), optimizer)
    trained, results = written.checkpoint.trainable, list[ArtifactVerification]()
    for _ in range(STEPS):
        step = model.step(setting, trained, written.inputs)
        losses, gradients = written.step(step.labels)
        parameters, error = written.update(gradients)
        model.load(parameters)
        results.append(
            compared(
                f"{type(model.model).__name__} in PyTorch",
                losses,
                (step.loss, step.eval_loss),
                _gradient_errors(gradients, step.gradients),
                error,
                step.own_loss,
            )
        )
    model.load(trained)
    return worst_of(results)


class OwnSession:
    """A session on the CPU for a model that was made here, and so is not examined like a file of unknown origin.

    Attributes:
        input_names: the inputs in graph order.
    """

    def __init__(self, path: Path) -> None:
        """Load the model.

        Raises:
            SessionError: onnxruntime cannot load it.
        """
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level, options.enable_cpu_mem_arena = 4, False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has no error class of its own
            raise SessionError(f"onnxruntime cannot load {path.name}: {first_line(error)}") from error
        self.input_names = [value.name for value in self._session.get_inputs()]
        self._output_names = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the outputs by name.

        Raises:
            SessionError: onnxruntime fails on these inputs.
        """
        try:
            return dict(zip(self._output_names, self._session.run(None, dict(feeds)), strict=True))
        except Exception as error:  # onnxruntime has no error class of its own
            raise SessionError(f"onnxruntime cannot run the model: {first_line(error)}") from error


class WrittenModels:
    """The models in a folder, run step by step, each from the parameters that the last one made.

    Attributes:
        checkpoint: the parameters at the start.
        inputs: the inputs of the model that have a gradient.
        feeds: what the next step reads, apart from the labels.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        training: onnx.ModelProto,
        sample: Mapping[str, NDArray[Any]],
        optimizer: OptimizerSetting | None,
    ) -> None:
        self.checkpoint = load_checkpoint(folder / f"{prefix}checkpoint")
        self.inputs = description(INPUTS_WITH_GRADIENT, {entry.key: entry.value for entry in training.metadata_props})
        trained = self.checkpoint.trainable
        self.feeds = {**sample, **trained, **self.checkpoint.frozen, LAZY_RESET: np.array([True])}
        self.feeds |= {buffer_name(name): np.zeros_like(self.feeds[name]) for name in (*trained, *self.inputs)}
        path = folder / f".{prefix}verification.onnx"
        onnx.save(training, path)
        files = (path, folder / f"{prefix}eval_model.onnx")
        self.sessions = [OwnSession(file) for file in files]
        path.unlink()
        start = {name: self.feeds[name] for name in trained}
        self._updates = Updates(folder / f"{prefix}optimizer_model.onnx", optimizer, start)

    def step(self, labels: NDArray[Any]) -> tuple[tuple[float, float], dict[str, NDArray[Any]]]:
        """Return the losses of the training and the eval model, and the gradient of each parameter or input."""
        trained, frozen = self.checkpoint.trainable, self.checkpoint.frozen
        results, evaluated = (run_model(session, self.feeds, labels) for session in self.sessions)
        loss, eval_loss = (float(next(iter(outputs.values())).reshape(-1)[0]) for outputs in (results, evaluated))
        self.feeds |= {name: results[updated_name(name)] for name in frozen if updated_name(name) in results}
        return (loss, eval_loss), {name: results[accumulated_name(name)] for name in (*trained, *self.inputs)}

    def update(self, gradients: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], float]:
        """Return the parameters after a step of the optimizer, and its error; see `Updates`."""
        parameters, error = self._updates.step({name: gradients[name] for name in self.checkpoint.trainable})
        self.feeds |= parameters
        return parameters, error


class Updates:
    """Steps of the optimizer model, and of PyTorch's optimizer in float64 on the same gradients.

    Without an optimizer model, steps are those of SGD, and are not compared.
    """

    def __init__(self, path: Path, setting: OptimizerSetting | None, parameters: Mapping[str, NDArray[Any]]) -> None:
        import torch

        self._shapes = {name: array.shape for name, array in parameters.items()}
        flat = _flat(parameters)
        self._setting = setting or OptimizerSetting("SGD")
        self._tensor = torch.tensor(flat, dtype=torch.float64)
        self._moments = [torch.zeros_like(self._tensor) for _ in range(2)]
        self._count = torch.zeros(())
        self._session = None if setting is None or not flat.size else OwnSession(path)
        names = () if self._session is None else self._session.input_names
        self._feeds = {name: np.zeros((1, flat.size), np.float32) for name in names} | {
            PARAMETERS: flat[None],
            LEARNING_RATE: np.array([_RATE], np.float32),
            STEP: np.array([0]),
        }

    def step(self, gradients: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], float]:
        """Return the new parameters, and the largest error of the optimizer model's."""
        import torch

        flat = _flat(gradients)
        if not flat.size:
            return {}, 0.0
        before = self._tensor.clone()
        self._tensor.grad = torch.tensor(flat, dtype=torch.float64)
        if self._setting.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([self._tensor], self._setting.max_grad_norm)
        self._update()
        expected, changes = self._tensor.numpy(), (self._tensor - before).numpy()
        error = 0.0
        if self._session is not None:
            self._feeds |= {GRADIENTS: flat[None], STEP: self._feeds[STEP] + 1}
            updates = self._session.run({name: self._feeds[name] for name in self._session.input_names})
            self._feeds |= {name.removesuffix("_out"): array for name, array in updates.items()}
            rounding = 2.0**-22 * np.abs(expected)
            beyond = np.maximum(np.abs(updates[updated_name(PARAMETERS)][0] - expected) - rounding, 0)
            error = _largest(beyond, changes, SMALL * float(np.abs(changes).max()))
        self._feeds[PARAMETERS] = expected.astype(np.float32)[None]
        sizes = [int(np.prod(shape)) for shape in self._shapes.values()]
        parts = np.split(self._feeds[PARAMETERS][0], np.cumsum(sizes)[:-1])
        return {
            name: part.reshape(shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)
        }, error

    def _update(self) -> None:
        """Apply PyTorch's optimizer by its functions: its classes import torch._dynamo, which takes seconds."""
        from torch.optim.adamw import adamw
        from torch.optim.sgd import sgd

        tensors, (first, second) = ([self._tensor], [self._tensor.grad]), self._moments
        options = {"lr": _RATE, "weight_decay": self._setting.weight_decay, "maximize": False}
        if self._setting.name == "AdamW":
            options |= {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
            adamw(*tensors, [first], [second], [], [self._count], **options)
        else:
            sgd(*tensors, [None], momentum=0.0, dampening=0.0, nesterov=False, **options)


def _flat(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *(array.reshape(-1) for array in arrays.values())])


def without_dropout(path: Path) -> onnx.ModelProto | None:
    """Read a training model, and replace its Dropout; None if it draws other random numbers."""
    training = onnx.load(path, load_external_data=False)
    if not _RANDOM.isdisjoint(node.op_type for node in training.graph.node):
        return None
    replace_dropout(training)
    return training


def replace_dropout(model: onnx.ModelProto) -> None:
    """Replace each Dropout with what it computes if nothing is dropped: its input times `1 / (1 - ratio)`."""
    ratios = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type != "Dropout" or node.domain:
            model.graph.node.append(node)
            continue
        ratio = float(numpy_helper.to_array(ratios[node.input[1]])) if node.input[1:2] not in ([], [""]) else 0.5
        scale = f"{node.output[0]}/scale"
        model.graph.initializer.append(numpy_helper.from_array(np.float32(1 / (1 - ratio)), scale))
        model.graph.node.append(helper.make_node("Mul", [node.input[0], scale], node.output[:1]))
        if node.output[1:2] not in ([], [""]):
            model.graph.node.append(helper.make_node("Equal", [node.input[0]] * 2, node.output[1:2]))


def run_model(session: OwnSession, feeds: Mapping[str, NDArray[Any]], labels: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Run a training or eval model; inputs that are not in `feeds` are labels."""
    known = {name for name in session.input_names if name in feeds or parameter_of_buffer(name)}
    added = [name for name in session.input_names if name not in known]
    return session.run({name: feeds.get(name, labels) for name in (*known, *added)})


def _largest(errors: NDArray[Any], expected: NDArray[Any], least: float) -> float:
    """Return the largest error relative to its element, or to the usual ones: a few large ones must not hide others."""
    magnitudes = np.abs(expected)
    usual = _USUAL * float(np.median(magnitudes[magnitudes > 0])) if magnitudes.any() else 0.0
    scales = np.maximum(magnitudes, max(min(usual, float(magnitudes.max(initial=0.0))), least))
    return float((errors / scales).max(initial=0.0))


def _gradient_errors(
    gradients: Mapping[str, NDArray[Any]], reference: Mapping[str, NDArray[np.float32]]
) -> dict[str, float]:
    expected = {name: reference.get(name, np.zeros_like(array)) for name, array in gradients.items()}
    largest = max((float(np.abs(array).max(initial=0.0)) for array in expected.values()), default=0.0)
    least = max(SMALL * largest, float(np.finfo(np.float32).tiny))
    return {name: _largest(np.abs(array - expected[name]), expected[name], least) for name, array in gradients.items()}


def compared(
    reference: str,
    losses: tuple[float, float],
    expected: tuple[float, float],
    errors: Mapping[str, float],
    update_error: float,
    own_loss: float | None = None,
) -> ArtifactVerification:
    """Describe a step: the losses of training and eval model with the expected ones, and the error of each gradient."""
    # NaN counts as the worst.
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name], default="")
    return ArtifactVerification(
        reference=reference,
        loss=losses[0],
        reference_loss=expected[0],
        loss_error=_relative_error(losses[0], expected[0]),
        eval_loss_error=_relative_error(losses[1], expected[1]),
        gradient_error=errors.get(worst, 0.0),
        worst_parameter=worst,
        num_gradients=len(errors),
        update_error=update_error,
        tolerance=TOLERANCE,
        own_loss=own_loss,
        own_loss_error=0.0 if own_loss is None else _relative_error(losses[1], own_loss),
    )


def worst_of(results: Sequence[ArtifactVerification]) -> ArtifactVerification:
    """Return the first step with the largest errors of all; NaN is the largest.

    Raises:
        ArtifactError: they exceed the tolerance.
    """

    def most(name: str) -> float:
        return float(np.max([getattr(result, name) for result in results]))

    worst = next((result for result in results if not result.gradient_error < most("gradient_error")), results[0])
    result = replace(
        results[0],
        worst_parameter=worst.worst_parameter,
        loss_error=most("loss_error"),
        eval_loss_error=most("eval_loss_error"),
        gradient_error=most("gradient_error"),
        update_error=most("update_error"),
    )
    if not result.passed:
        raise ArtifactError(_describe(result), "report it with the model; --no_verify writes the artifacts anyway")
    return result


def _relative_error(actual: float, expected: float) -> float:
    return abs(actual - expected) / max(abs(expected), 1e-6)


def _describe(result: ArtifactVerification) -> str:
    return (
        f"the artifacts differ from {result.reference}: the loss is {result.loss:.6g} instead of "
        f"{result.reference_loss:.6g}, a relative error of {result.loss_error:.2g} (eval model "
        f"{result.eval_loss_error:.2g}); the gradient of {result.worst_parameter} has a relative error of "
        f"{result.gradient_error:.2g}, the optimizer's changes {result.update_error:.2g}; the tolerance is "
        f"{result.tolerance:g}"
    )
