"""A session whose tensors stay where they are: bound by address once, fed and fetched by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtool.errors import InputError, SessionError
from onnxtool.runtime.providers import PROVIDERS
from onnxtool.training.api.memory import Device

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Runner:
    """A model on a device.

    Args:
        path: of the model.
        device: where it runs, and where what is bound to it lies.
        options: onnxruntime's; None for its defaults.

    Raises:
        ModelFileError: the file is missing or damaged.
        SessionError: onnxruntime cannot load it.
    """

    def __init__(self, path: Path, device: Device, options: Any = None) -> None:
        import onnxruntime as ort

        from onnxtool.model_file import ModelFile

        self.path = path
        self.device = device
        if path.suffix != ".ort":
            ModelFile.open(path)
        if options is None:
            options = ort.SessionOptions()
            options.log_severity_level = 3
            # The plan of a run's memory is made in the second run, beside what the first one took.
            options.enable_mem_pattern = False
        provider: Any = PROVIDERS[device.kind]
        if device.kind != "cpu":
            provider = (provider, {"device_id": device.number})
        try:
            self._session = ort.InferenceSession(str(path), options, providers=[provider])
        except Exception as error:  # onnxruntime has no error of its own
            raise SessionError(
                f"onnxruntime {ort.__version__} cannot load {path}: {_first_line(error)}", "make the artifacts again"
            ) from error
        self._binding = self._session.io_binding()
        self._inputs = {value.name: value for value in self._session.get_inputs()}
        self._outputs = {value.name: value for value in self._session.get_outputs()}
        self._fed: dict[str, Any] = {}
        self._bound: dict[str, None] = {}  # outputs in the order in which onnxruntime gives them back

    @property
    def input_names(self) -> list[str]:
        """The inputs in the order of the graph."""
        return list(self._inputs)

    @property
    def output_names(self) -> list[str]:
        """The outputs in the order of the graph."""
        return list(self._outputs)

    def shape_of(self, name: str) -> tuple[int | str | None, ...]:
        """Return the shape of an input, dynamic axes by name or None."""
        return tuple(self._inputs[name].shape)

    def bind_input(self, name: str, shape: Sequence[int], pointer: int) -> None:
        """Let a float32 input be read at an address of the device."""
        import numpy as np

        self._binding.bind_input(name, self.device.kind, self.device.number, np.float32, list(shape), pointer)

    def bind_output(self, name: str, shape: Sequence[int], pointer: int) -> None:
        """Let a float32 output be written at an address of the device."""
        import numpy as np

        self._bound[name] = None
        self._binding.bind_output(name, self.device.kind, self.device.number, np.float32, list(shape), pointer)

    def bind_value(self, name: str, value: Any) -> None:
        """Let an input be read from an OrtValue, of any dtype."""
        self._fed[name] = value
        self._binding.bind_ortvalue_input(name, value)

    def feed(self, name: str, tensor: Any) -> None:
        """Give an input for the next run: an array, or an OrtValue.

        Raises:
            InputError: the dtype or rank is not that of the model.
        """
        import numpy as np

        if not isinstance(tensor, np.ndarray):
            self.bind_value(name, tensor)
            return
        declared = self._inputs[name]
        if (kind := _DTYPES.get(tensor.dtype.name, tensor.dtype.name)) != declared.type:
            raise InputError(f"the input {name} of {self.path} is {declared.type}, not {kind}", "convert it")
        if len(tensor.shape) != len(declared.shape) and declared.shape:
            raise InputError(
                f"the input {name} of {self.path} has the shape {declared.shape}, not {list(tensor.shape)}",
                "reshape it",
            )
        array = np.ascontiguousarray(tensor).reshape(tensor.shape)
        self._fed[name] = array  # onnxruntime does not keep what it reads
        self._binding.bind_cpu_input(name, array)

    def run(self, fetch: Sequence[str] = ()) -> list[NDArray[Any]]:
        """Run the model, and return these outputs.

        Raises:
            SessionError: onnxruntime fails.
        """
        return [value.numpy() for value in self.run_values(fetch)]

    def run_values(self, fetch: Sequence[str]) -> list[Any]:
        """Run the model, and return these outputs as OrtValues in the memory of the CPU."""
        for name in fetch:
            self._bound[name] = None
            self._binding.bind_output(name)  # anew each time: onnxruntime would write over what the last run gave
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime has no error of its own
            raise SessionError(
                f"onnxruntime cannot run {self.path}: {_first_line(error)}", "look at the shapes of the inputs"
            ) from error
        if not fetch:
            return []
        values = dict(zip(self._bound, self._binding.get_outputs(), strict=True))
        return [values[name] for name in fetch]


# numpy's names of dtypes in the way onnxruntime writes those of inputs.
_DTYPES = {
    **{name: f"tensor({name})" for name in ("bool", "float16", "bfloat16")},
    **{f"{sign}int{bits}": f"tensor({sign}int{bits})" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": "tensor(float)",
    "float64": "tensor(double)",
}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
