"""Verify the artifacts of a file whose checkpoint is not known, by differences of the loss in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxtool.errors import InputError, SessionError
from onnxtool.graph.edit import reads
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
_Run = Callable[[_Feeds], _Feeds]
_WITHOUT_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(")
# Of a step along a direction. onnxruntime's normalizations of float64 keep their mean and deviation in float32, so that
# the loss has noise of 1e-9 of itself.
_SIZE = 3e-4
# Two losses in float64 for each direction: in the first step, a direction of its own for each parameter of a file up to
# the first size, fewer for a larger file, whose losses take longer. A file above the second size would not fit into
# memory in float64. Later steps, which show whether state is carried on, have the fewest directions.
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
    except (InputError, SessionError):  # the generated inputs do not fit the file
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
            exact_loss = exact(inputs)
        except Exception:  # noqa: BLE001 - neither onnxruntime nor onnx.reference has a class for it
            return None
        errors = _errors(exact, inputs, gradients, exact_loss, most)
        most = _LEAST_DIRECTIONS
        _, update_error = written.update(gradients)
        reference = f"differences of {opened.path.name} in float64"
        references = exact_loss, losses[1] if results else expected
        results.append(compared(reference, losses, references, errors, update_error))
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
    size, and all have its error. There, each has a random sign and a random weight from 1 to 2, so that errors rarely
    cancel out: whatever the others are, an error of r times the tolerance is missed with a probability of 1 / r at
    most. A direction that exceeds the tolerance is divided, down to single gradients.
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
        weights = draw.uniform(1, 2, len(group)) * draw.choice([-1, 1], len(group)) if len(group) > 1 else [1.0]
        directions = {
            name: weight * _direction(draw, gradients[name], norms[name], size)
            for name, weight in zip(group, weights, strict=True)
        }
        least = max(size, SMALL * largest, 1e-30)
        expected = sum(float((gradients[name] * directions[name]).sum()) for name in group)

        def differences(step: float, directions: _Feeds = directions) -> tuple[float, float]:
            """Return the slope along the directions, and by how much it changes at the point."""
            below, above = (
                exact({**inputs, **{name: inputs[name] + offset * array for name, array in directions.items()}})
                for offset in (-step, step)
            )
            return (above - below) / (2 * step), (above - 2 * loss + below) / (2 * step)

        slope, change = differences(_SIZE)
        error = abs(expected - slope)
        if error > TOLERANCE * least:  # where the slope has a jump, as of a rectifier, both sides are right
            closer, jump = differences(_SIZE / 2)
            error = min(error, abs(expected - closer)) - abs(2 * jump - change)  # a curve's change is half as large
        error = max(error, 0.0) / least
        errors |= dict.fromkeys(group, error)
        if error > TOLERANCE and len(group) > 1:  # find the one with the error
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return errors


def _direction(draw: np.random.Generator, array: NDArray[Any], norm: float, size: float) -> NDArray[np.float64]:
    """Return a direction that changes the loss as much as a gradient of that size does."""
    noise = draw.normal(size=array.shape) * ((array != 0) if norm else 1.0)
    direction = noise / np.linalg.norm(noise) + (array / norm if norm else 0.0)
    return np.asarray(direction * (min(size / norm, _MOST_WEIGHT) if norm else 1.0), np.float64)


def _loss_in_float64(training: onnx.ModelProto, folder: Path) -> _Loss:
    """Return what computes the loss of a training model."""
    model = ir.from_proto(training)
    # RemoveUnusedNodesPass would leave all gradients: an If that it removes still counts as a use of what it read.
    graph = ir.convenience.extract(model.graph, model.graph.inputs, model.graph.outputs[:1])
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    double = ir.to_proto(ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values())))
    del double.graph.value_info[:]
    _widen(double)
    return _Loss(ir.from_proto(double), folder / ".float64.onnx")


class _Loss:
    """A loss in float64, by onnxruntime; operators that it has no kernels for are computed by onnx.reference.

    The graph is cut into parts of consecutive nodes, each for one of the two. Parts are loaded during the first run,
    which shows the types of their inputs.
    """

    def __init__(self, model: ir.Model, path: Path) -> None:
        self._model, self._path = model, path
        self._without_kernel: set[str] = set()
        self._parts: list[tuple[list[str], _Run]] = []

    def __call__(self, feeds: _Feeds) -> float:
        """Return the loss for values of all inputs of the training model."""
        while not self._parts:
            try:
                self._parts = self._load(feeds)
            except SessionError as error:
                operator = _WITHOUT_KERNEL.search(str(error))
                rejected = {operator[1]} if operator else {node.op_type for node in self._model.graph}
                if rejected <= self._without_kernel:
                    raise
                self._without_kernel |= rejected
        values = dict(feeds)
        for names, run in self._parts:
            values |= run({name: values[name] for name in names})
        return float(np.ravel(values[str(self._model.graph.outputs[0].name)])[0])

    def _load(self, feeds: _Feeds) -> list[tuple[list[str], _Run]]:
        """Load each part, and run it for the types of the next one's inputs."""
        values, parts = dict(feeds), list[tuple[list[str], _Run]]()
        for is_rejected, nodes in groupby(self._model.graph, lambda node: node.op_type in self._without_kernel):
            part = self._part(list(nodes), values)
            names = [value.name for value in part.graph.input]
            if is_rejected:
                run = _reference(part)
            else:
                onnx.save(part, self._path)
                try:
                    run = OwnSession(self._path).run
                finally:
                    self._path.unlink()
            values |= run({name: values[name] for name in names})
            parts.append((names, run))
        return parts

    def _part(self, nodes: Sequence[ir.Node], values: _Feeds) -> onnx.ModelProto:
        """Return a model of consecutive nodes; the inputs have the types of `values`."""
        graph, inside = self._model.graph, set(nodes)
        needed = [value for value in dict.fromkeys(value for node in nodes for value in reads(node)) if value]
        inputs = [value for value in needed if value.name in values]
        for value in inputs:
            value.type = ir.TensorType(ir.DataType.from_numpy(values[str(value.name)].dtype))
        read_outside = {value for node in graph if node not in inside for value in reads(node)} | set(graph.outputs)
        view = ir.GraphView(
            inputs,
            [value for node in nodes for value in node.outputs if value in read_outside],
            nodes=nodes,
            initializers=[value for value in needed if value.name in graph.initializers],
            opset_imports=graph.opset_imports,
            name="part",
        )
        functions = list(self._model.functions.values())
        return ir.to_proto(ir.Model(view.clone(), ir_version=self._model.ir_version, functions=functions))


def _reference(model: onnx.ModelProto) -> _Run:
    from onnx.reference import ReferenceEvaluator

    evaluator, names = ReferenceEvaluator(model), [value.name for value in model.graph.output]
    return lambda feeds: dict(zip(names, evaluator.run(None, dict(feeds)), strict=True))


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
        for part in (value if hasattr(value, "__len__") else [value]) if field.message_type is not None else ():
            _widen(part)
