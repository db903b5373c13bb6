"""An onnxruntime session on bound memory: one device buffer holds many tensors, bound by address once.

All other inputs and outputs are bound by name for each run.
"""

from __future__ import annotations

import bisect
import ctypes
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxtool.errors import InputError, ProviderError, SessionError, first_line
from onnxtool.model_file import ModelFile
from onnxtool.runtime.probation import check_harmless
from onnxtool.runtime.providers import AUTO, CPU, CUDA, PROVIDERS, resolve_provider
from onnxtool.runtime.session import tensor_type
from onnxtool.training.graphs.names import IDS, INPUTS_WITH_GRADIENT, LABELS, description

Float32 = NDArray[np.float32]
# The optimizer's intermediate results for one block stay in the L2 cache of a CPU core.
BLOCK_SIZE = 32768
# GPU kernels load 16 bytes at a time and need aligned tensors.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Device:
    """The device that tensors are on: `cpu` or `cuda`, and its number."""

    kind: str = "cpu"
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse `cpu`, `cuda` or `cuda:1`.

        Raises:
            ProviderError: the device is unknown or not available here.
        """
        kind, _, number = text.partition(":")
        if kind not in (AUTO, CPU, CUDA) or (number and not (number.isascii() and number.isdecimal())):
            raise ProviderError(f"there is no device {text!r}", "use cpu, cuda or cuda:1")
        return cls(resolve_provider(kind), int(number or 0))


class BufferLayout:
    """The positions of tensors in a buffer of blocks, float32 [K, S].

    Attributes:
        shapes: the tensor shapes, in order.
        size: the total number of elements, without padding.
        blocks: the shape [K, S] of the buffer.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: Device) -> None:
        self.shapes = dict(shapes)
        self._positions: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in self.shapes.items():
            count = math.prod(shape)
            self._positions[name] = (end, count)
            end += -(-count // _ALIGNMENT) * _ALIGNMENT
        self.size = sum(count for _, count in self._positions.values())
        block = min(BLOCK_SIZE, end) if device.kind == "cpu" else end
        self.blocks = (-(-end // block) if block else 0, block)

    def slice_of(self, name: str) -> slice:
        """Return the slice of the flat buffer that holds a tensor."""
        start, count = self._positions[name]
        return slice(start, start + count)


class Buffer:
    """A zero-initialized device buffer with a layout."""

    def __init__(self, layout: BufferLayout, device: Device) -> None:
        self.layout = layout
        self.device = device
        self.value = allocate(layout.blocks, device)

    @property
    def pointer(self) -> int:
        """The device address of the first element."""
        return int(self.value.data_ptr())

    def pointer_of(self, name: str) -> int:
        """Return the address of a tensor."""
        return self.pointer + 4 * int(self.layout.slice_of(name).start)

    def read(self, name: str) -> Float32:
        """Return a copy of a tensor."""
        tensor: Float32 = self._flat()[self.layout.slice_of(name)].reshape(self.layout.shapes[name])
        return tensor.copy()

    def write(self, tensors: Mapping[str, Float32]) -> None:
        """Set the given tensors."""
        flat = self._flat()
        for name, tensor in tensors.items():
            flat[self.layout.slice_of(name)] = tensor.reshape(-1)
        if self.device.kind != "cpu":
            self.value.update_inplace(flat.reshape(self.layout.blocks))

    def read_all(self) -> Iterator[tuple[str, Float32]]:
        """Yield the name and a copy of each tensor."""
        flat = self._flat()
        for name, shape in self.layout.shapes.items():
            yield name, flat[self.layout.slice_of(name)].reshape(shape).copy()

    def _flat(self) -> Float32:
        """Return all elements: a view of the buffer on the CPU, a copy elsewhere."""
        return self._view if self.device.kind == "cpu" else self.value.numpy().reshape(-1)

    @cached_property
    def _view(self) -> Float32:
        count = math.prod(self.layout.blocks)
        if not count:
            return np.zeros(0, np.float32)
        pointer = ctypes.cast(self.pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (count,))


def allocate(shape: tuple[int, ...], device: Device) -> Any:
    """Return a float32 OrtValue of zeros with this shape."""
    value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), np.float32, device.kind, device.number)
    value.update_inplace(np.zeros(shape, np.float32))
    return value


class BoundSession:
    """A model loaded on a device.

    Args:
        path: the model file.
        device: the device of the session and all bound memory.
        options: onnxruntime's session options; None for its defaults.

    Attributes:
        input_names: the inputs in graph order.
        output_names: the outputs in graph order.
        inputs_with_gradient: the user inputs whose gradients are among the outputs.

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
            options.log_severity_level = 4  # errors are raised, not logged
            # The memory pattern is allocated in the second run, in addition to the memory of the first.
            options.enable_mem_pattern = False
        provider: Any = PROVIDERS[device.kind]
        if device.kind != "cpu":
            provider = (provider, {"device_id": device.number})
        try:
            self._session = ort.InferenceSession(str(path), options, providers=[provider])
        except Exception as error:  # onnxruntime has no exception class for this
            raise SessionError(
                f"onnxruntime {ort.__version__} cannot load {path}: {first_line(error)}", "make the artifacts again"
            ) from error
        self._binding = self._session.io_binding()
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self.input_names = list(self._inputs)
        self.output_names = [value.name for value in self._session.get_outputs()]
        metadata = self._session.get_modelmeta().custom_metadata_map
        self.inputs_with_gradient: list[str] = list(description(INPUTS_WITH_GRADIENT, metadata))
        self._labels, self._ids = description(LABELS, metadata), description(IDS, metadata)
        self._fed: dict[str, Any] = {}
        self._bound: dict[str, None] = {}  # outputs in the order onnxruntime returns them

    def shape_of(self, name: str) -> tuple[int | str | None, ...]:
        """Return the shape of an input; dynamic axes are names or None."""
        return tuple(self._inputs[name].shape)

    def bind_input(self, name: str, shape: Sequence[int], pointer: int) -> None:
        """Read a float32 input from a device address."""
        self._binding.bind_input(name, self.device.kind, self.device.number, np.float32, list(shape), pointer)

    def bind_output(self, name: str, shape: Sequence[int], pointer: int) -> None:
        """Write a float32 output to a device address."""
        self._bound[name] = None
        self._binding.bind_output(name, self.device.kind, self.device.number, np.float32, list(shape), pointer)

    def bind_value(self, name: str, value: Any) -> None:
        """Read an input of any dtype from an OrtValue."""
        self._fed[name] = value
        self._binding.bind_ortvalue_input(name, value)

    def feed(self, name: str, tensor: Any) -> None:
        """Set an input, an array or an OrtValue, for the next run.

        Raises:
            InputError: it is neither, the dtype or rank differs from the model's, or a label is not a valid class.
        """
        if not isinstance(tensor, np.ndarray | ort.OrtValue):
            raise InputError(
                f"the input {name} of {self.path} is a {type(tensor).__name__}",
                "pass a NumPy array, such as tensor.numpy(), or an OrtValue",
            )
        if name in self._labels:  # not every execution provider checks indices
            self._check_labels(name, tensor if isinstance(tensor, np.ndarray) else tensor.numpy())
        if name in self._ids:
            self._check_ids(name, tensor if isinstance(tensor, np.ndarray) else tensor.numpy())
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

    def require_sizes(self, tensors: Mapping[str, Any]) -> None:
        """Refuse inputs whose axes of one name differ in size, or that have another size than a fixed one.

        Losses would broadcast them, or read only some of them.

        Raises:
            InputError: a size differs; the input is named.
        """
        sizes: dict[str, tuple[str, int]] = {}
        for name, tensor in tensors.items():
            shape = list(tensor.shape() if isinstance(tensor, ort.OrtValue) else getattr(tensor, "shape", ()))
            declared = self._inputs[name].shape
            for axis, (size, known) in enumerate(zip(shape, declared, strict=False)):
                if not known or len(shape) != len(declared):
                    continue
                first, wanted = sizes.setdefault(known, (name, size)) if isinstance(known, str) else ("", known)
                if size != wanted:
                    raise InputError(
                        f"the input {name} of {self.path} has the shape {shape}, and axis {axis} has to be {wanted}"
                        + (f", as {known} is in {first}" if first else ""),
                        f"its shape is {declared}",
                    )

    def _require_length(self) -> None:
        """Refuse inputs that fail and would not if they were shorter, such as texts of more tokens than positions."""
        arrays = {name: fed if isinstance(fed, np.ndarray) else fed.numpy() for name, fed in self._fed.items()}
        lengths: dict[int, dict[str, int]] = defaultdict(dict)  # inputs and their axes, by size
        for name, array in arrays.items():
            for axis, known in enumerate(self._inputs[name].shape):
                if axis and not isinstance(known, int):
                    lengths[array.shape[axis]][name] = axis
        unfed = {name: value.shape for name, value in self._inputs.items() if name not in arrays}
        arrays |= {name: np.zeros(shape, np.float32) for name, shape in unfed.items()}

        def fails(size: int) -> bool:
            cut = {name: arrays[name].swapaxes(0, axis)[:size].swapaxes(0, axis) for name, axis in axes.items()}
            try:
                self._session.run(self.output_names[:1], {**arrays, **cut})
            except Exception:  # noqa: BLE001 - onnxruntime has no exception class for this
                return True
            return False

        for size, axes in lengths.items():
            shorter = next((size >> half for half in range(1, size.bit_length()) if not fails(size >> half)), None)
            if shorter is not None:
                most = bisect.bisect(range(size), False, lo=shorter, key=fails) - 1
                name, axis = next(iter(axes.items()))
                raise InputError(
                    f"the input {name} of {self.path} has the size {size} in axis {axis}, and the model takes {most} "
                    "at most",
                    "cut it, for example with the tokenizer's max_length",
                )

    def _check_ids(self, name: str, ids: NDArray[Any]) -> None:
        """Refuse indices that PyTorch refuses: ONNX counts negative ones from the last row."""
        rows = self._ids[name]
        is_wrong = (ids < 0) | (ids >= rows)
        if is_wrong.any():
            raise InputError(
                f"the input {name} of {self.path} has the index {ids[is_wrong][0]}, and its table has {rows} rows, "
                f"from 0 to {rows - 1}",
                "pass only ids of the table; tokens to ignore are marked in the labels",
            )

    def _check_labels(self, name: str, labels: NDArray[Any]) -> None:
        """Refuse labels that are neither a valid class nor `ignore_index`."""
        classes, first, ignored = (self._labels[name][key] for key in ("classes", "first", "ignore_index"))
        labels = labels[:, first:] if first and labels.ndim > 1 else labels
        if labels.dtype.kind != "i":
            return  # refused because of its dtype
        is_wrong = (labels < 0) | (labels >= (np.iinfo(labels.dtype).max if classes is None else classes))
        if ignored is not None:
            is_wrong &= labels != ignored
        if not is_wrong.any():
            return
        classes_text = "classes from 0 on" if classes is None else f"{classes} classes, from 0 to {classes - 1}"
        raise InputError(
            f"the input {name} of {self.path} has the label {labels[is_wrong][0]}, and the loss has {classes_text}; "
            + ("no ignore_index is set" if ignored is None else f"the ignore_index is {ignored}"),
            "pass only valid classes, or make the artifacts with the ignore_index of these labels (--ignore_index)",
        )

    def run(self, fetch: Sequence[str] = ()) -> list[NDArray[Any]]:
        """Run the model and return the outputs in `fetch`.

        Raises:
            SessionError: onnxruntime fails.
        """
        return [value.numpy() for value in self.run_values(fetch)]

    def run_values(self, fetch: Sequence[str]) -> list[Any]:
        """Run the model and return the outputs in `fetch` as OrtValues in CPU memory."""
        for name in fetch:
            self._bound[name] = None
            self._binding.bind_output(name)  # bind again: onnxruntime would overwrite the last run's outputs
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime has no exception class for this
            self._require_length()
            raise SessionError(
                f"onnxruntime cannot run {self.path}: {first_line(error)}", "look at the shapes of the inputs"
            ) from error
        if not fetch:
            return []
        values = dict(zip(self._bound, self._binding.get_outputs(), strict=True))
        return [values[name] for name in fetch]


def _value_of_strings(name: str, strings: NDArray[Any]) -> Any:
    """Return an OrtValue of strings; onnxruntime cannot make one from an array, so a constant model returns it."""
    elements = strings.ravel().tolist()
    not_strings = [element for element in elements if not isinstance(element, str)]
    if not_strings:
        raise InputError(f"the input {name} takes strings, not {not_strings[0]!r}", "convert it")
    value = helper.make_tensor(name, TensorProto.STRING, strings.shape, [element.encode() for element in elements])
    output = helper.make_tensor_value_info(name, TensorProto.STRING, strings.shape)
    graph = helper.make_graph([helper.make_node("Constant", [], [name], value=value)], "strings", [], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_output(name)
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0]
