"""Run a graph partition: a session on views of PyTorch's tensors, with results in the form that PyTorch expects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnxruntime.capi import _pybind_state as binding
from torch._prims_common import is_contiguous_or_false

from onnxtool.torch_backend.nodes import dims_by_stride, is_static, seen_size
from onnxtool.torch_backend.options import OrtBackendOptions
from onnxtool.torch_backend.partition import Partition
from onnxtool.torch_backend.sessions import RUN_ERRORS, SILENT, denormals_are_zero, end_openmp_threads, flush_denormals
from onnxtool.torch_backend.translator import Translated

Fake = object
"""A value as known to a graph: a fake tensor, or a (symbolic) number."""


@dataclass(frozen=True)
class Expected:
    """The properties that PyTorch expects of a result.

    Attributes:
        dtype: the element type; None if a number is expected.
        order: the dimensions from the largest stride to the smallest; None for their natural order.
        repeated: expanded dimensions, along which memory holds each value once.
        shape: the shape, if known before the call.
        device: the expected device.
    """

    dtype: torch.dtype | None
    order: tuple[int, ...] | None
    repeated: tuple[int, ...]
    shape: tuple[int, ...] | None
    device: torch.device

    @classmethod
    def of(cls, value: Fake) -> Expected:
        """Return the expectations for a result with this fake value."""
        if not isinstance(value, torch.Tensor):
            return cls(None, None, (), None, torch.device("cpu"))
        shape = tuple(value.shape) if is_static(value) else None
        repeated = tuple(
            dim for dim in range(value.dim()) if seen_size(value.stride(dim)) == 0 and seen_size(value.shape[dim]) > 1
        )
        return cls(value.dtype, _order(value), repeated, shape, value.device)

    def allocate(self) -> torch.Tensor:
        """Allocate memory for the result in onnxruntime's layout; its shape must be known."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def restored(self, tensor: torch.Tensor) -> Any:
        """Give an onnxruntime result the expected type and layout."""
        if self.dtype is None:
            return tensor.item()
        if tensor.dtype is not self.dtype:
            tensor = tensor.view(self.dtype)  # booleans returned as bytes
        if self.order is None:
            return tensor
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        shape = tensor.shape
        for dim in self.repeated:
            tensor = tensor.narrow(dim, 0, min(1, shape[dim]))
        return tensor.permute(self.order).contiguous().permute(inverse).expand(shape)


@dataclass
class CallCount:
    """The number of calls of a session, excluding calls that failed and ran in PyTorch; outlives the session."""

    calls: int = 0


class SessionCall:
    """A callable partition: it takes its inputs and returns a list of its outputs."""

    def __init__(
        self,
        name: str,
        translated: Translated,
        partition: Partition,
        inputs: Sequence[Fake],
        options: OrtBackendOptions,
    ) -> None:
        """Prepare everything that is the same for every call.

        Args:
            name: its name in tracebacks and generated code.
            translated: the session, and which of the partition's inputs it takes.
            partition: the partition that the session was created from.
            inputs: the fake values of all partition inputs.
            options: whether PyTorch allocates results of fixed shapes, and whether denormal numbers count as zero.
        """
        session, used = translated.session, translated.used
        self.__name__ = name
        self.__qualname__ = name
        self.count = CallCount()
        self.expected = tuple(Expected.of(node.meta["val"]) for node in partition.outputs)
        self.failure = ""
        self._eager = partition.module
        self._run = session._sess.run_with_ortvaluevector
        if torch.cuda.is_available():
            self._run = torch.cuda.nvtx.range(NVTX_RANGE)(self._run)
        self.session = session
        self._used = tuple(used)
        self._input_names = [value.name for value in session.get_inputs()]
        self._output_names = [value.name for value in session.get_outputs()]
        self._input_devices = [
            ort_device(value.device) if isinstance(value := inputs[index], torch.Tensor) else CPU for index in used
        ]
        self._output_devices = [ort_device(expected.device) for expected in self.expected]
        self._plain = all(item.dtype not in (None, torch.bool) and item.order is None for item in self.expected)
        tensors = ((index, value) for index, value in enumerate(inputs) if isinstance(value, torch.Tensor))
        self._sized = tuple(index for index, value in tensors if not is_static(value))
        fixed = all(item.dtype and item.shape is not None for item in self.expected)
        self._preallocates = options.preallocate_output and fixed
        self._flushes = options.flush_denormals
        self._uses_threads = partition.is_large
        self._numbers: dict[tuple[type, int | bool], torch.Tensor] = {}
        self._options = binding.RunOptions()
        self._options.log_severity_level = SILENT

    def __call__(self, *arguments: Any) -> list[Any]:
        """Return the partition's results for its inputs, in order.

        If onnxruntime fails, PyTorch runs this call and all later ones, and a warning is logged once; if PyTorch also
        fails, its error is raised. PyTorch also runs calls with empty tensors, on which kernels disagree.
        """
        if self.failure:
            return list(self._eager(*arguments))
        self.count.calls += 1
        if self._sized and not all(arguments[index].numel() for index in self._sized):
            return list(self._eager(*arguments))
        try:
            return self._in_session(arguments)
        except RUN_ERRORS as error:
            results = list(self._eager(*arguments))
            self.count.calls -= 1
            self.failure = " ".join(str(error).split())
            _LOGGER.warning("PyTorch runs a partition of a graph, because onnxruntime fails to: %s", self.failure)
            return results

    def _in_session(self, arguments: Sequence[Any]) -> list[Any]:
        tensors = [
            dense(argument) if isinstance(argument, torch.Tensor) else self._number(argument)
            for argument in map(arguments.__getitem__, self._used)
        ]
        outputs = [item.allocate() for item in self.expected] if self._preallocates else []
        results = wrap(outputs, self._output_devices)
        if self._uses_threads:
            end_openmp_threads()
        with flush_denormals(self._flushes or denormals_are_zero()):
            self._run(
                self._options,
                self._input_names,
                wrap(tensors, self._input_devices),
                self._output_names,
                results,
                self._output_devices,
            )
        outputs = outputs or unwrap(results)
        if self._plain:
            return outputs
        return [expected.restored(output) for expected, output in zip(self.expected, outputs, strict=True)]

    def _number(self, number: int | bool) -> torch.Tensor:
        """Return a size as a tensor; tensors from earlier calls are cached."""
        key = (type(number), number)  # True equals 1
        if key not in self._numbers:
            if len(self._numbers) >= _MOST_NUMBERS:
                self._numbers.clear()
            self._numbers[key] = torch.tensor(number)
        return self._numbers[key]


_LOGGER = logging.getLogger(__name__)
NVTX_RANGE = "run_onnx_session_with_ortvaluevector"
"""The range that profilers of CUDA show for a session's run, as named by PyTorch's former backend."""
_MOST_NUMBERS = 1024


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of a tensor from the largest stride to the smallest; None if it is contiguous."""
    if is_contiguous_or_false(value):
        return None
    order = dims_by_stride(value)
    return None if order == tuple(range(value.dim())) else order


_NAMES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
NUMPY_TYPES: dict[torch.dtype, type] = {
    torch.bool: np.bool_,
    **{getattr(torch, name): getattr(np, name) for name in _NAMES},
}
CPU = binding.OrtDevice(binding.OrtDevice.cpu(), binding.OrtDevice.default_memory(), 0)


def ort_device(device: torch.device) -> Any:
    """Return onnxruntime's device for a PyTorch device."""
    if device.type == "cuda":
        return binding.OrtDevice(binding.OrtDevice.cuda(), binding.OrtDevice.default_memory(), device.index or 0)
    return CPU


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy whose memory holds its values in dimension order."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def wrap(tensors: Sequence[torch.Tensor], devices: Sequence[Any]) -> Any:
    """Return a vector of values that are views of dense `tensors`, which must outlive it."""
    vector = binding.OrtValueVector()
    vector.reserve(len(tensors))
    try:
        vector.push_back_batch(
            tensors,
            [tensor.data_ptr() for tensor in tensors],
            [NUMPY_TYPES[tensor.dtype] for tensor in tensors],
            [tensor.shape for tensor in tensors],
            devices,
        )
    except (KeyError, RuntimeError, ValueError):  # bfloat16 has no NumPy type, and empty tensors have no address
        return _wrap_one_by_one(tensors)
    return vector


def _wrap_one_by_one(tensors: Sequence[torch.Tensor]) -> Any:
    vector = binding.OrtValueVector()
    for tensor in tensors:
        plain = tensor.detach()
        if plain.dtype is torch.bool:
            vector.push_back(binding.OrtValue.from_dlpack(plain.view(torch.uint8).__dlpack__(), True))
        else:
            vector.push_back(binding.OrtValue.from_dlpack(plain.__dlpack__(), False))
    return vector


def unwrap(vector: Any) -> list[torch.Tensor]:
    """Return tensors that own the values of `vector`; some versions return booleans as bytes."""
    tensors: list[torch.Tensor] = vector.to_dlpacks(torch._C._from_dlpack)
    return tensors
