"""Verify that artifacts compute PyTorch's loss and gradients, by running them once before they are moved into place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool.errors import ArtifactError
from onnxtool.runtime.session import open_session
from onnxtool.training.artifacts.reference import LossSetting, TorchModel, TorchStep, adapted
from onnxtool.training.checkpoints.checkpoint import load_checkpoint
from onnxtool.training.checkpoints.lora import Lora
from onnxtool.training.graphs.names import (
    LAZY_RESET,
    accumulated_name,
    buffer_name,
    inputs_with_gradient,
    parameter_of_buffer,
)

# Both sides compute in float32. Rounding gives errors of 1e-6 to 1e-4, by the depth of the network; a bug gives 1e-2.
TOLERANCE = 1e-3
# The error of a gradient that is zero except for rounding, such as that of the key bias in attention, is relative to
# this share of the largest gradient of the network.
_SMALL = 1e-2
_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)


@dataclass(frozen=True)
class ArtifactVerification:
    """The differences between artifacts and PyTorch; all errors are relative.

    Attributes:
        reference: the class of the model.
        loss: of the training model.
        reference_loss: of PyTorch.
        loss_error: of the loss in training mode.
        eval_loss_error: of the loss of the eval model.
        gradient_error: the largest error of an element divided by the largest element, maximum over all of them.
        worst_parameter: the parameter or input with this error.
        num_gradients: the number of parameters and inputs that were compared.
        tolerance: the largest accepted error.
        own_loss: the loss that the model itself computes for the same labels, in eval mode; None if it computes none.
        own_loss_error: its difference from the loss of the eval model.
    """

    reference: str
    loss: float
    reference_loss: float
    loss_error: float
    eval_loss_error: float
    gradient_error: float
    worst_parameter: str
    num_gradients: int
    tolerance: float
    own_loss: float | None
    own_loss_error: float

    @property
    def passed(self) -> bool:
        """Whether all errors are within the tolerance."""
        errors = (self.loss_error, self.eval_loss_error, self.gradient_error)
        return all(error <= self.tolerance for error in errors)  # NaN is not


def verify_artifacts(folder: Path, prefix: str, model: TorchModel, setting: LossSetting) -> ArtifactVerification | None:
    """Compare the training and the eval model in `folder` with PyTorch; dropout scales, but drops nothing.

    Returns:
        Their differences; None if the model draws random numbers other than in a Dropout.

    Raises:
        ArtifactError: they differ by more than the tolerance.
    """
    training = onnx.load(folder / f"{prefix}training_model.onnx", load_external_data=False)
    if not _RANDOM.isdisjoint(node.op_type for node in training.graph.node):
        return None
    replace_dropout(training)
    checkpoint = load_checkpoint(folder / f"{prefix}checkpoint")
    inputs = inputs_with_gradient({entry.key: entry.value for entry in training.metadata_props})
    values = {**checkpoint.trainable, **checkpoint.frozen}
    lora = Lora.of(checkpoint)
    if lora is not None:  # at its beginning B is zero, and so is the gradient of A
        draw = np.random.default_rng(0)
        values |= {one.up: draw.uniform(-0.1, 0.1, values[one.up].shape).astype(np.float32) for one in lora.adapters}
    with adapted(model, lora, values) as adapters:
        step = model.step(setting, checkpoint.trainable, inputs, adapters)
    feeds = {**model.inputs(), **values}
    with_gradient = (*checkpoint.trainable, *inputs)
    feeds |= {buffer_name(name): np.zeros_like(feeds[name]) for name in with_gradient}
    feeds[LAZY_RESET] = np.array([True])
    path = folder / f".{prefix}verification.onnx"
    onnx.save(training, path)
    found = _run(path, feeds, step.labels)
    path.unlink()
    evaluated = _run(folder / f"{prefix}eval_model.onnx", feeds, step.labels)
    loss, eval_loss = (float(next(iter(outputs.values())).reshape(-1)[0]) for outputs in (found, evaluated))
    gradients = {name: found[accumulated_name(name)] for name in with_gradient}
    result = _compare(type(model.model).__name__, (loss, eval_loss), gradients, step)
    if not result.passed:
        raise ArtifactError(_describe(result), "report it with the checkpoint; --no_verify writes the artifacts anyway")
    return result


def replace_dropout(model: onnx.ModelProto) -> None:
    """Replace each Dropout by its result if it drops nothing: its input times `1 / (1 - ratio)`."""
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


def _run(path: Path, feeds: Mapping[str, NDArray[Any]], labels: NDArray[Any]) -> dict[str, NDArray[Any]]:
    session = open_session(path, provider="cpu", frugal=True)
    known = {name for name in session.input_names if name in feeds or parameter_of_buffer(name)}
    added = [name for name in session.input_names if name not in known]
    return session.run({name: feeds.get(name, labels) for name in (*known, *added)})


def _compare(
    reference: str, losses: tuple[float, float], gradients: Mapping[str, NDArray[Any]], step: TorchStep
) -> ArtifactVerification:
    expected = {name: step.gradients.get(name, np.zeros_like(array)) for name, array in gradients.items()}
    largest = {name: float(np.abs(array).max(initial=0.0)) for name, array in expected.items()}
    least = max(_SMALL * max(largest.values(), default=0.0), float(np.finfo(np.float32).tiny))
    errors = {
        name: float(np.abs(array - expected[name]).max(initial=0.0)) / max(largest[name], least)
        for name, array in gradients.items()
    }
    # NaN is the worst.
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name], default="")
    return ArtifactVerification(
        reference=reference,
        loss=losses[0],
        reference_loss=step.loss,
        loss_error=_relative_error(losses[0], step.loss),
        eval_loss_error=_relative_error(losses[1], step.eval_loss),
        gradient_error=errors.get(worst, 0.0),
        worst_parameter=worst,
        num_gradients=len(errors),
        tolerance=TOLERANCE,
        own_loss=step.own_loss,
        own_loss_error=0.0 if step.own_loss is None else _relative_error(losses[1], step.own_loss),
    )


def _relative_error(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-6)


def _describe(result: ArtifactVerification) -> str:
    return (
        f"the artifacts differ from {result.reference} in PyTorch: the loss is {result.loss:.6g} instead of "
        f"{result.reference_loss:.6g}, a relative error of {result.loss_error:.2g} (eval model "
        f"{result.eval_loss_error:.2g}); the gradient of {result.worst_parameter} has a relative error of "
        f"{result.gradient_error:.2g}; the tolerance is {result.tolerance:g}"
    )
