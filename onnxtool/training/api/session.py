"""An onnxruntime session on bound memory: tensors are bound by address once, inputs and outputs by name per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxtool.errors import InputError, SessionError
from onnxtool.model_file import ModelFile
from onnxtool.runtime.probation import check_harmless
from onnxtool.runtime.providers import PROVIDERS
from onnxtool.runtime.session import first_line, tensor_type
from onnxtool.training.api.memory import Device
from onnxtool.training.graphs.names import inputs_with_gradient


class BoundSession:
    """A model on a device.

    Args:
        path: the model file.
        device: the device of the session and of all bound memory.
        options: onnxruntime's session options; None for its defaults.

    Attributes:
        input_names: the inputs in the order of the graph.
        output_names: the outputs in the order of the graph.
        inputs_with_gradient: the user's inputs whose gradients are among the outputs.

    Raises:
        ModelFileError: the file is missing or damaged.
        SessionError: onnxruntime cannot load it.
    """

    def __init__(self, path: Path, device: Device, options: Any = None) -> None:
        self.path = path
        self.device = device
        if path.suffix != ".ort":
            check_harmless(ModelFile.open(path))
        if options is None:
            options = ort.SessionOptions()
            options.log_severity_level = 3
            # The memory pattern is allocated in the second run, in addition to the memory of the first one.
            options.enable_mem_pattern = False
        provider: Any = PROVIDERS[device.kind]
        if device.kind != "cpu":
            provider = (provider, {"device_id": device.number})
        try:
            self._session = ort.InferenceSession(str(path), options, providers=[provider])
        except Exception as error:  # onnxruntime has no error of its own
            raise SessionError(
                f"onnxruntime {ort.__version__} cannot load {path}: {first_line(error)}", "make the artifacts again"
            ) from error
        self._binding = self._session.io_binding()
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self.input_names = list(self._inputs)
        self.output_names = [value.name for value in self._session.get_outputs()]
        self.inputs_with_gradient = inputs_with_gradient(self._session.get_modelmeta().custom_metadata_map)
        self._fed: dict[str, Any] = {}
        self._bound: dict[str, None] = {}  # outputs in the order in which onnxruntime gives them back

    def shape_of(self, name: str) -> tuple[int | str | None, ...]:
        """Return the shape of an input, dynamic axes by name or None."""
        return tuple(self._inputs[name].shape)

    def bind_input(self, name: str, shape: Sequence[int], pointer: int) -> None:
        """Read a float32 input from an address of the device."""
        self._binding.bind_input(name, self.device.kind, self.device.number, np.float32, list(shape), pointer)

    def bind_output(self, name: str, shape: Sequence[int], pointer: int) -> None:
        """Write a float32 output to an address of the device."""
        self._bound[name] = None
        self._binding.bind_output(name, self.device.kind, self.device.number, np.float32, list(shape), pointer)

    def bind_value(self, name: str, value: Any) -> None:
        """Read an input of any dtype from an OrtValue."""
        self._fed[name] = value
        self._binding.bind_ortvalue_input(name, value)

    def feed(self, name: str, tensor: Any) -> None:
        """Set an input of the next run: an array, or an OrtValue.

        Raises:
            InputError: the dtype or rank differs from that of the model.
        """
        if not isinstance(tensor, np.ndarray):
            self.bind_value(name, tensor)
            return
        declared = self._inputs[name]
        has_strings = tensor.dtype.kind in "UOT"
        if (kind := "tensor(string)" if has_strings else tensor_type(tensor.dtype.name)) != declared.type:
            raise InputError(f"the input {name} of {self.path} is {declared.type}, not {kind}", "convert it")
        if len(tensor.shape) != len(declared.shape) and declared.shape:
            raise InputError(
                f"the input {name} of {self.path} has the shape {declared.shape}, not {list(tensor.shape)}",
                "reshape it",
            )
        if has_strings:
            self.bind_value(name, _value_of_strings(name, tensor))
            return
        array = np.ascontiguousarray(tensor).reshape(tensor.shape)
        self._fed[name] = array  # onnxruntime does not keep a reference
        self._binding.bind_cpu_input(name, array)

    def run(self, fetch: Sequence[str] = ()) -> list[NDArray[Any]]:
        """Run the model, and return these outputs.

        Raises:
            SessionError: onnxruntime fails.
        """
        return [value.numpy() for value in self.run_values(fetch)]

    def run_values(self, fetch: Sequence[str]) -> list[Any]:
        """Run the model, and return these outputs as OrtValues in CPU memory."""
        for name in fetch:
            self._bound[name] = None
            self._binding.bind_output(name)  # bound again: onnxruntime would overwrite the outputs of the last run
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime has no error of its own
            raise SessionError(
                f"onnxruntime cannot run {self.path}: {first_line(error)}", "look at the shapes of the inputs"
            ) from error
        if not fetch:
            return []
        values = dict(zip(self._bound, self._binding.get_outputs(), strict=True))
        return [values[name] for name in fetch]


def _value_of_strings(name: str, strings: NDArray[Any]) -> Any:
    """Return an OrtValue of strings, which onnxruntime makes from no array: the result of a constant.

    Raises:
        InputError: an element is not a string.
    """
    elements = strings.ravel().tolist()
    others = [element for element in elements if not isinstance(element, str)]
    if others:
        raise InputError(f"the input {name} takes strings, not {others[0]!r}", "convert it")
    value = helper.make_tensor(name, TensorProto.STRING, strings.shape, [element.encode() for element in elements])
    output = helper.make_tensor_value_info(name, TensorProto.STRING, strings.shape)
    graph = helper.make_graph([helper.make_node("Constant", [], [name], value=value)], "strings", [], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_output(name)
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0]
