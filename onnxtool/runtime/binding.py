"""Run a session on inputs and outputs that are bound to buffers once (onnxruntime's IOBinding).

A bound run copies nothing between the host and the device, and allocates no output: what is timed is the computation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CachedRun:
    """Runs of a session in which outputs of one run are inputs of the next: these stay where the provider computes.

    Attributes:
        carried: input to the output that becomes it.
    """

    def __init__(self, inference: Any, outputs: Sequence[str], carried: Mapping[str, str], device: str) -> None:
        self.carried = dict(carried)
        self._inference, self._outputs, self._device = inference, tuple(outputs), device
        self._kept: dict[str, Any] = {}
        self._binding = inference.io_binding()

    def keep(self, values: Mapping[str, Any]) -> None:
        """Give every run from now on these inputs: arrays, which are copied to the device here, or another's values."""
        import onnxruntime as ort

        for name, value in values.items():
            is_value = isinstance(value, ort.OrtValue)
            self._kept[name] = value if is_value else ort.OrtValue.ortvalue_from_numpy(value, self._device, 0)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Run on `feeds` and what is kept, and keep what is carried; return the outputs as onnxruntime's values."""
        binding = self._binding
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, value in self._kept.items():
            binding.bind_ortvalue_input(name, value)
        binding.clear_binding_outputs()
        for name in self._outputs:
            binding.bind_output(name, self._device)
        self._inference.run_with_iobinding(binding)
        if self._device != "cpu":
            binding.synchronize_outputs()
        outputs = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        self._kept.update({name: outputs[output] for name, output in self.carried.items()})
        return outputs


class BoundRun:
    """A run of an onnxruntime session on `feeds`, which are copied to the device here and nowhere else.

    Outputs get their buffers in a first run, made here, so their shapes may depend on the values of the inputs.
    """

    def __init__(self, inference: Any, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str], device: str) -> None:
        import onnxruntime as ort

        self._inference, self._device = inference, device
        self._arrays = dict(feeds)
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in self._arrays.items()
        }
        self._binding = inference.io_binding()
        for name, value in self._values.items():
            self._binding.bind_ortvalue_input(name, value)
        for name in outputs:
            self._binding.bind_output(name, device)
        self()
        for name, value in zip(outputs, self._binding.get_outputs(), strict=True):
            self._binding.bind_ortvalue_output(name, value)

    def __call__(self) -> None:
        """Run, and wait until the device is done."""
        self._inference.run_with_iobinding(self._binding)
        if self._device != "cpu":
            self._binding.synchronize_outputs()

    def outputs(self) -> list[NDArray[Any]]:
        """Copy the outputs of the last run to the host."""
        return [value.numpy() for value in self._binding.get_outputs()]

    def time_transfer(self) -> tuple[float, float, float]:
        """Copy the inputs to the device, run and copy the outputs back; return the milliseconds of each part.

        Inputs go into the buffers they have, as an application that serves requests would do it.
        """
        start = time.perf_counter()
        for name, array in self._arrays.items():
            self._values[name].update_inplace(array)
        self._binding.synchronize_inputs()
        copied = time.perf_counter()
        self()
        computed = time.perf_counter()
        self.outputs()
        end = time.perf_counter()
        return (copied - start) * 1e3, (computed - copied) * 1e3, (end - computed) * 1e3
