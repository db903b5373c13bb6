"""Verify the artifacts of a file whose checkpoint is not known, by differences of the loss in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxtool.errors import InputError, SessionError
from onnxtool.model_file import ModelFile, ModelPath
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.session import open_session
from onnxtool.training.artifacts.verification import (
    SMALL,
    STEPS,
    TOLERANCE,
    ArtifactVerification,
    LossSetting,
    OptimizerSetting,
    OwnSession,
    WrittenModels,
    compared,
    draw_labels,
    torch_loss,
    without_dropout,
    worst_of,
)
from onnxtool.training.graphs.parameters import FLOATS

_Feeds = Mapping[str, NDArray[Any]]
# Of a step along a direction. onnxruntime's normalizations of float64 keep their mean and deviation in float32, so that
# the loss has noise of 1e-9 of itself.
_SIZE = 3e-4
# Two losses in float64 for each direction: a direction of its own for each parameter of a file up to the first size,
# fewer for a larger file, whose losses take longer. A file above the second size would not fit into memory in float64.
_SMALL_BYTES, _MOST_BYTES = 8_000_000, 2_000_000_000
_SMALL_DIRECTIONS, _LEAST_DIRECTIONS = 64, 4
_MOST_WEIGHT = 10.0


def verify_file(
    folder: Path, prefix: str, file: ModelPath, setting: LossSetting, optimizer: OptimizerSetting | None
) -> ArtifactVerification | None:
    """Compare three steps of the models in `folder` with differences of the training loss in float64.

    The loss of the eval model is compared with that of the file's output.

    Returns:
        The largest differences; None if the file has more than 2 GB, the model draws random numbers outside Dropout or
        rounds, no inputs can be made up, or nothing computes its loss in float64.

    Raises:
        ArtifactError: they exceed the tolerance.
    """
    import torch

    opened = ModelFile.open(file)
    if opened.size_bytes > _MOST_BYTES:
        return None
    training = without_dropout(folder / f"{prefix}training_model.onnx")
    if training is None or any(node.op_type == "QuantizeLinear" for node in training.graph.node):
        return None
    exact = _loss_in_float64(training, folder)
    try:
        case = _case(input_cases(opened), opened.size_bytes)
        logits = torch.from_numpy(open_session(opened, provider="cpu").run(case.feeds)[setting.output])
    except (InputError, SessionError):  # what is made up does not fit the file
        return None
    labels = draw_labels(logits, setting)
    written = WrittenModels(folder, prefix, training, case.feeds, optimizer)
    results, expected = list[ArtifactVerification](), float(torch_loss(logits, labels, setting))
    most = max(_LEAST_DIRECTIONS, _SMALL_DIRECTIONS * _SMALL_BYTES // max(opened.size_bytes, _SMALL_BYTES))
    for _ in range(STEPS):
        names = written.sessions[0].input_names
        inputs = {name: _widened(written.feeds.get(name, labels.numpy())) for name in names}
        losses, gradients = written.step(labels.numpy())
        try:
            wanted = exact(inputs)
        except Exception:  # noqa: BLE001 - neither onnxruntime nor onnx.reference has a class for it
            return None
        errors = _errors(exact, inputs, gradients, wanted, most)
        _, update_error = written.update(gradients)
        reference = f"differences of {opened.path.name} in float64"
        results.append(compared(reference, losses, (wanted, losses[1] if results else expected), errors, update_error))
    return worst_of(results)


def _case(cases: Sequence[Case], size_bytes: int) -> Case:
    """Return the case with the most rows; for a large file, the smallest one without an axis of one element."""
    several = [case for case in cases if all(1 not in array.shape for array in case.feeds.values())]
    if size_bytes > _SMALL_BYTES and several:
        return min(several, key=lambda case: sum(array.size for array in case.feeds.values()))
    return max(cases, key=lambda case: len(next(iter(case.feeds.values()))))


def _errors(
    exact: Callable[[_Feeds], float], inputs: _Feeds, gradients: _Feeds, loss: float, most: int
) -> dict[str, float]:
    """Return the error of each gradient along itself and a random direction in its elements that are not zero.

    If there are more gradients than `most`, those of similar size share a direction, in which each counts by its own
    size, and all have its error.
    """
    draw, errors = np.random.default_rng(0), dict[str, float]()
    norms = {name: float(np.linalg.norm(array.astype(np.float64))) for name, array in gradients.items()}
    largest = max(norms.values(), default=0.0)
    names = sorted(gradients, key=norms.__getitem__) if len(gradients) > most else list(gradients)
    length = -(-len(names) // most) or 1
    groups = [names[start : start + length] for start in range(0, len(names), length)]
    while groups:
        group = groups.pop()
        size = max(norms[name] for name in group)
        directions = {name: _direction(draw, gradients[name], norms[name], size) for name in group}
        least = max(size, SMALL * largest, 1e-30)
        expected = sum(float((gradients[name] * directions[name]).sum()) for name in group)

        def differences(step: float, directions: _Feeds = directions) -> tuple[float, float]:
            """Return the slope along the directions, and by how much it changes at the point."""
            moved = ({name: inputs[name] + one * array for name, array in directions.items()} for one in (-step, step))
            below, above = (exact({**inputs, **one}) for one in moved)
            return (above - below) / (2 * step), (above - 2 * loss + below) / (2 * step)

        slope, change = differences(_SIZE)
        error = abs(expected - slope)
        if error > TOLERANCE * least:  # where the slope has a jump, as of a rectifier, both sides are right
            closer, jump = differences(_SIZE / 2)
            error = min(error, abs(expected - closer)) - abs(2 * jump - change)  # a curve's change is half as large
        error = max(error, 0.0) / least
        errors |= dict.fromkeys(group, error)
        if error > TOLERANCE and len(group) > 1:  # whose is it?
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return errors


def _direction(draw: np.random.Generator, array: NDArray[Any], norm: float, size: float) -> NDArray[np.float64]:
    """Return a direction that changes the loss as much as a gradient of that size does."""
    noise = draw.normal(size=array.shape) * ((array != 0) if norm else 1.0)
    direction = noise / np.linalg.norm(noise) + (array / norm if norm else 0.0)
    return np.asarray(direction * (min(size / norm, _MOST_WEIGHT) if norm else 1.0), np.float64)


def _loss_in_float64(training: onnx.ModelProto, folder: Path) -> Callable[[_Feeds], float]:
    """Return what computes the loss of a training model: onnxruntime, or onnx.reference where it has no kernels."""
    from onnx.reference import ReferenceEvaluator

    model = ir.from_proto(training)
    # RemoveUnusedNodesPass would leave all gradients: an If that it removes still counts as a use of what it read.
    graph = ir.convenience.extract(model.graph, model.graph.inputs, model.graph.outputs[:1])
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    double = ir.to_proto(ir.Model(graph, ir_version=model.ir_version, functions=model.functions.values()))
    del double.graph.value_info[:]
    _widen(double)
    path = folder / ".float64.onnx"
    onnx.save(double, path)
    try:
        run = OwnSession(path).run
    except SessionError:
        evaluator = ReferenceEvaluator(double)
        run = lambda feeds: {"loss": evaluator.run(None, dict(feeds))[0]}  # noqa: E731 - as the session's method
    path.unlink()
    names = [value.name for value in double.graph.input]

    def loss(feeds: _Feeds) -> float:
        return float(np.ravel(next(iter(run({name: feeds[name] for name in names}).values())))[0])

    return loss


def _widened(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _widen(message: Any) -> None:
    """Replace the float types in a part of a model by float64, in place."""
    if isinstance(message, onnx.TypeProto.Tensor) and message.elem_type in FLOATS:
        message.elem_type = TensorProto.DOUBLE
    elif isinstance(message, TensorProto) and message.data_type in FLOATS:
        message.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(message).astype(np.float64), message.name))
    elif isinstance(message, onnx.AttributeProto) and message.name in ("dtype", "to") and message.i in FLOATS:
        message.i = TensorProto.DOUBLE
    for field, value in message.ListFields():
        for one in (value if hasattr(value, "__len__") else [value]) if field.message_type is not None else ():
            _widen(one)
