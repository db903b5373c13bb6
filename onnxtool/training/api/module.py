"""Train and evaluate a model with its artifacts; parameters and gradients stay on the device and change in place."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxruntime as ort
from numpy.typing import NDArray

from onnxtool.errors import ArtifactError, InputError
from onnxtool.model_file import ModelFile, save_model, staged
from onnxtool.model_file.weights import load_model
from onnxtool.options import checked
from onnxtool.training.api.session import BoundSession, Buffer, BufferLayout, Device, allocate
from onnxtool.training.api.state import CheckpointState
from onnxtool.training.graphs.names import LAZY_RESET, accumulated_name, buffer_name, updated_name


class Module:
    """A model that can be trained.

    Calling it runs a training step, which accumulates gradients, or an evaluation step.

    Args:
        train_model_uri: the training model.
        state: the checkpoint; from now on the module holds its values.
        eval_model_uri: the eval model, used by `eval` and for exports.
        device: cpu, cuda or cuda:1.
        session_options: onnxruntime session options.

    Attributes:
        training: whether calls train.
        state: the checkpoint.
        device: the device of all tensors.
        session_options: also used for the optimizer session.
        values: the trained parameters.
        gradients: their gradients.
        moment_buffers: the optimizer state, keyed by its name in the checkpoint.

    Raises:
        ArtifactError: the checkpoint does not fit the model.
        ModelFileError: a model file is missing or damaged.
        SessionError: onnxruntime cannot load a model.
    """

    @checked
    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: Any = None,
    ) -> None:
        self.training = True
        self.state = state
        self.device = Device.parse(device)
        self.session_options = session_options
        self._train = BoundSession(Path(train_model_uri), self.device, session_options)
        self._eval_path = None if eval_model_uri is None else Path(eval_model_uri)
        self._eval = None if self._eval_path is None else BoundSession(self._eval_path, self.device, session_options)
        self._inputs = self._train.inputs_with_gradient
        self._input_gradients: dict[str, NDArray[np.float32]] = {}
        trained = [name for name in self._train.input_names if buffer_name(name) in self._train.input_names]
        trained = [name for name in trained if name not in self._inputs]
        self._check(trained)
        layout = BufferLayout({name: self._shape(name) for name in trained}, self.device)
        self.values, self.gradients = Buffer(layout, self.device), Buffer(layout, self.device)
        self.moment_buffers: dict[str, Buffer] = {}
        self._frozen = {name: self._frozen_value(name) for name in state.checkpoint.frozen}
        if not state.checkpoint.is_nominal:
            self.values.write(state.checkpoint.trainable)
        self._reset = True
        self._bind()
        state.attach(self)

    def __call__(self, *user_inputs: Any) -> Any:
        """Run a step on arrays or OrtValues, in the order of `input_names`.

        Returns:
            The output, or a tuple if there are several: arrays, or OrtValues if no input is an array.

        Raises:
            InputError: an input is missing or has another dtype or rank.
            ArtifactError: there is no eval model, or the checkpoint is nominal and has no values yet.
        """
        self.state.check_complete()
        session, names = self._session(), self.input_names()
        if len(user_inputs) != len(names):
            raise InputError(
                f"{session.path} takes {', '.join(names)}, but {len(user_inputs)} were given", "pass all of them"
            )
        session.require_sizes(dict(zip(names, user_inputs, strict=True)))
        for name, tensor in zip(names, user_inputs, strict=True):
            session.feed(name, tensor)
            if self.training and name in self._inputs:  # not accumulated: each batch is a new input
                shape = tensor.shape if isinstance(tensor, np.ndarray) else tensor.shape()
                session.feed(buffer_name(name), np.zeros(shape, np.float32))
        if self.training:
            session.feed(LAZY_RESET, np.array([self._reset]))
        arrays = any(isinstance(tensor, np.ndarray) for tensor in user_inputs)
        fetched = [accumulated_name(name) for name in self._inputs] if self.training else []
        outputs = session.run_values([*self.output_names(), *fetched])
        if self.training:
            self._reset = False
            gradients = [outputs.pop() for _ in fetched][::-1]
            self._input_gradients = {name: value.numpy() for name, value in zip(self._inputs, gradients, strict=True)}
        if arrays:
            outputs = [value.numpy() for value in outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @checked
    def train(self, mode: bool = True) -> Module:
        """Make calls train, or evaluate."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Make calls evaluate."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Reset the gradients in the next training step."""
        self._reset = True

    def input_names(self) -> list[str]:
        """Return the input names of a call, in order."""
        session = self._session()
        hidden = {LAZY_RESET, *self.state.names(), *(buffer_name(name) for name in self._with_gradient())}
        return [name for name in session.input_names if name not in hidden]

    def output_names(self) -> list[str]:
        """Return the output names of a call, in order, the loss first."""
        session = self._session()
        hidden = {accumulated_name(name) for name in self._with_gradient()}
        hidden |= {updated_name(name) for name in self._frozen}
        return [name for name in session.output_names if name not in hidden]

    @checked
    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the total number of parameter elements."""
        frozen = [] if trainable_only else [int(math.prod(value.shape())) for value in self._frozen.values()]
        return self.values.layout.size + sum(frozen)

    @checked
    def get_contiguous_parameters(self, trainable_only: bool = False) -> Any:
        """Return an OrtValue with a copy of the parameters, float32 [get_parameters_size], in checkpoint order.

        Raises:
            ArtifactError: a frozen parameter is not float32, or the checkpoint is nominal and has no values yet.
        """
        self.state.check_complete()
        arrays = [array for _, array in self.values.read_all()]
        if not trainable_only:
            arrays += [self._float32(name) for name in self._frozen]
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        return ort.OrtValue.ortvalue_from_numpy(flat, self.device.kind, self.device.number)

    @checked
    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Set the parameters from a buffer of `get_contiguous_parameters`; this completes a nominal checkpoint.

        Raises:
            ArtifactError: the buffer has another size.
        """
        flat = buffer.numpy().reshape(-1)
        if flat.size != (size := self.get_parameters_size(trainable_only)):
            raise ArtifactError(
                f"the buffer has {flat.size} elements, and the parameters {size}", "check trainable_only"
            )
        shapes = dict(self.values.layout.shapes)
        if not trainable_only:
            shapes |= {name: tuple(value.shape()) for name, value in self._frozen.items()}
        parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1])
        arrays = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        self.values.write({name: arrays[name] for name in self.values.layout.shapes})
        for name in set(arrays) - set(self.values.layout.shapes):
            self._frozen[name].update_inplace(arrays[name])
        self.state.checkpoint.is_nominal = False

    @checked
    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Write an inference model with the current parameters; its outputs are the given values of the eval model.

        Raises:
            ArtifactError: there is no eval model, or it has no such value.
            OutputWriteError: the file cannot be written.
        """
        if self._eval_path is None:
            raise ArtifactError("an export needs the eval model", "pass eval_model_uri")
        self.state.check_complete()
        parameters = {name: self.read(name) for name in self.state.names()}
        _export(self._eval_path, parameters, graph_output_names, Path(inference_model_uri))

    @checked
    def read(self, name: str) -> NDArray[Any]:
        """Return a copy of a parameter."""
        if name in self.values.layout.shapes:
            return self.values.read(name)
        array: NDArray[Any] = self._frozen[name].numpy()
        return array.copy()

    @checked
    def write(self, name: str, array: NDArray[Any]) -> None:
        """Set a parameter."""
        if name in self.values.layout.shapes:
            self.values.write({name: array})
        else:
            self._frozen[name].update_inplace(array)

    @checked
    def gradient(self, name: str) -> NDArray[np.float32]:
        """Return a copy of the gradient of a parameter (zeros before the first step), or of an input in the last step.

        Raises:
            ArtifactError: the training model does not compute this gradient, or no step has run with this input.
        """
        if name in self.gradients.layout.shapes:
            return self.gradients.read(name)
        if name in self._input_gradients:
            return self._input_gradients[name].copy()
        if name in self._inputs:
            raise ArtifactError(f"the input {name} has no gradient yet", "run a training step first")
        known = ", ".join(self._with_gradient()[:5]) or "nothing"
        raise ArtifactError(
            f"{self._train.path} computes no gradient for {name}",
            f"it does for {known}; name it in requires_grad when the artifacts are made",
        )

    def moments(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return copies of the optimizer state."""
        return {moment: dict(buffer.read_all()) for moment, buffer in sorted(self.moment_buffers.items())}

    def _with_gradient(self) -> list[str]:
        """Return the parameters and inputs that have a gradient."""
        return [*self.values.layout.shapes, *self._inputs]

    def _session(self) -> BoundSession:
        if self.training:
            return self._train
        if self._eval is None:
            raise ArtifactError("there is no eval model", "pass eval_model_uri")
        return self._eval

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in self._train.shape_of(name) if size is not None)

    def _check(self, trained: Sequence[str]) -> None:
        """Refuse a checkpoint that belongs to another model."""
        checkpoint = self.state.checkpoint
        path, hint = self._train.path, "take the checkpoint and the training model of the same artifacts"
        missing = [name for name in trained if name not in checkpoint.trainable]
        other = [name for name in checkpoint.trainable if name not in trained]
        other += [name for name in checkpoint.frozen if name not in self._train.input_names or name in trained]
        if missing or other or LAZY_RESET not in self._train.input_names:
            problems = _listing({"missing": missing, "unknown to it": other})
            raise ArtifactError(f"the checkpoint does not fit {path}: {problems}", hint)
        for name, array in {**checkpoint.trainable, **checkpoint.frozen}.items():
            if not checkpoint.is_nominal and array.shape != self._shape(name):
                shapes = f"{list(array.shape)}, not {list(self._shape(name))}"
                raise ArtifactError(f"the checkpoint does not fit {path}: {name} is {shapes}", hint)

    def _frozen_value(self, name: str) -> Any:
        """Return a frozen parameter as an OrtValue on the device."""
        if self.state.checkpoint.is_nominal:
            return allocate(self._shape(name), self.device)
        array = self.state.checkpoint.frozen[name]
        value = ort.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), array.dtype.type, self.device.kind, self.device.number
        )
        value.update_inplace(array.copy())
        return value

    def _bind(self) -> None:
        layout = self.values.layout
        for name, shape in layout.shapes.items():
            self._train.bind_input(name, shape, self.values.pointer_of(name))
            self._train.bind_input(buffer_name(name), shape, self.gradients.pointer_of(name))
            self._train.bind_output(accumulated_name(name), shape, self.gradients.pointer_of(name))
            if self._eval is not None and name in self._eval.input_names:
                self._eval.bind_input(name, shape, self.values.pointer_of(name))
        for name, value in self._frozen.items():
            for session in (self._train, self._eval):
                if session is not None and name in session.input_names:
                    session.bind_value(name, value)
            if updated_name(name) in self._train.output_names:
                self._train.bind_output(updated_name(name), tuple(value.shape()), int(value.data_ptr()))

    def _float32(self, name: str) -> NDArray[np.float32]:
        array: NDArray[Any] = self._frozen[name].numpy()
        if array.dtype.name != "float32":
            raise ArtifactError(f"the frozen parameter {name} is {array.dtype.name}", "pass trainable_only=True")
        return array


def _listing(groups: dict[str, list[str]]) -> str:
    parts = [f"{label} {', '.join(names[:5])}" for label, names in groups.items() if names]
    return "; ".join(parts) or "it is not a training model"


def _export(eval_model: Path, parameters: Mapping[str, NDArray[Any]], outputs: Sequence[str], path: Path) -> None:
    """Write a model that computes `outputs` (values of the eval model), with the parameters as initializers."""
    model = load_model(ModelFile.open(eval_model).path)
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    for name in outputs:
        if name not in values:
            close = get_close_matches(name, values, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "look at its values with onnxtool stats"
            raise ArtifactError(f"{eval_model} has no value called {name!r}", hint)
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in outputs)
    common.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        name = str(value.name)
        if name in parameters or not (value.uses() or value.is_graph_output()):
            graph.inputs.remove(value)
        if name in parameters and value.uses():
            value.const_value = ir.tensor(parameters[name], name=name)
            graph.register_initializer(value)
    with staged(path, force=True) as staging:
        save_model(model, staging)
