"""Prove that artifacts compute PyTorch's loss and gradients, by running them once before anybody sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.errors import ArtifactError
from onnxtool.training.graphs.names import LAZY_RESET, accumulated_name, buffer_name, parameter_of_buffer

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

    from onnxtool.training.artifacts.reference import LossSetting, TorchModel, TorchStep

# Both sides compute in float32, whose rounding gives 1e-6 to 1e-4 by the depth of the network; an error gives 1e-2.
TOLERANCE = 1e-3
# A gradient that is zero but for rounding, as that of the bias of keys in attention, is compared with this share of the
# largest gradient of the network.
_SMALL = 1e-2
_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)


@dataclass(frozen=True)
class Proof:
    """How far the artifacts are from PyTorch, each error relative.

    Attributes:
        reference: the class of the model.
        loss: of the training model.
        reference_loss: PyTorch's.
        loss_error: of the loss in training mode.
        eval_loss_error: of the loss of the eval model.
        gradient_error: the largest over all parameters: the largest error of an element, by the largest element.
        worst_parameter: whose it is.
        num_gradients: how many parameters were compared.
        tolerance: what each error may be.
        own_loss: that of the model itself for the same labels, in eval mode; None where it computes none.
        own_loss_error: how far it is from the same loss.
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
        return all(error <= self.tolerance for error in errors)  # what is not a number is not within


def prove(folder: Path, prefix: str, model: TorchModel, setting: LossSetting) -> Proof | None:
    """Run the training and the eval model in `folder` beside PyTorch, with nothing dropped.

    Returns:
        How far apart they are; None where the model draws random numbers otherwise than in a Dropout.

    Raises:
        ArtifactError: they differ by more than the tolerance.
    """
    import onnx

    from onnxtool.training.checkpoints.checkpoint import load_checkpoint

    training = onnx.load(folder / f"{prefix}training_model.onnx", load_external_data=False)
    if not _RANDOM.isdisjoint(node.op_type for node in training.graph.node):
        return None
    keep_everything(training)
    checkpoint = load_checkpoint(folder / f"{prefix}checkpoint")
    step = model.step(setting, checkpoint.trainable)
    feeds = {**model.inputs(), **checkpoint.trainable, **checkpoint.frozen}
    feeds |= {buffer_name(name): np.zeros_like(array) for name, array in checkpoint.trainable.items()}
    feeds[LAZY_RESET] = np.array([True])
    scratch = folder / f".{prefix}proof.onnx"
    onnx.save(training, scratch)
    found = _run(scratch, feeds, step.labels)
    scratch.unlink()
    evaluated = _run(folder / f"{prefix}eval_model.onnx", feeds, step.labels)
    loss, eval_loss = (float(next(iter(outputs.values())).reshape(-1)[0]) for outputs in (found, evaluated))
    gradients = {name: found[accumulated_name(name)] for name in checkpoint.trainable}
    proof = _compare(type(model.model).__name__, (loss, eval_loss), gradients, step)
    if not proof.passed:
        raise ArtifactError(_describe(proof), "report it with the checkpoint; --no_verify writes the artifacts anyway")
    return proof


def keep_everything(model: onnx.ModelProto) -> None:
    """Replace each Dropout by what it does where it happens to drop nothing: its input, scaled."""
    from onnx import helper, numpy_helper

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
    from onnxtool.runtime.session import open_session

    session = open_session(path, provider="cpu", frugal=True)
    known = {name for name in session.input_names if name in feeds or parameter_of_buffer(name)}
    added = [name for name in session.input_names if name not in known]
    return session.run({name: feeds.get(name, labels) for name in (*known, *added)})


def _compare(
    reference: str, losses: tuple[float, float], gradients: Mapping[str, NDArray[Any]], step: TorchStep
) -> Proof:
    expected = {name: step.gradients.get(name, np.zeros_like(array)) for name, array in gradients.items()}
    largest = {name: float(np.abs(array).max(initial=0.0)) for name, array in expected.items()}
    least = max(_SMALL * max(largest.values()), float(np.finfo(np.float32).tiny))
    errors = {
        name: float(np.abs(array - expected[name]).max(initial=0.0)) / max(largest[name], least)
        for name, array in gradients.items()
    }
    # What is not a number is the worst.
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    return Proof(
        reference,
        losses[0],
        step.loss,
        _apart(losses[0], step.loss),
        _apart(losses[1], step.eval_loss),
        errors[worst],
        worst,
        len(errors),
        TOLERANCE,
        step.own_loss,
        0.0 if step.own_loss is None else _apart(losses[1], step.own_loss),
    )


def _apart(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-6)


def _describe(proof: Proof) -> str:
    return (
        f"the artifacts differ from {proof.reference} in PyTorch: the loss is {proof.loss:.6g} where it is "
        f"{proof.reference_loss:.6g}, apart by {proof.loss_error:.2g} (eval model {proof.eval_loss_error:.2g}); the "
        f"gradient of {proof.worst_parameter} is apart by {proof.gradient_error:.2g} of its largest element; allowed "
        f"are {proof.tolerance:g} each"
    )
