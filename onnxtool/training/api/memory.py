"""One buffer on a device for many named float32 tensors, which sessions read and write in place."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnxtool.errors import ProviderError
from onnxtool.runtime.providers import resolve_provider

Float32 = NDArray[np.float32]
# The intermediate results of the optimizer for one block stay in the L2 cache of a CPU core.
BLOCK_SIZE = 32768
# GPU kernels load 16 bytes at once and need aligned tensors.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Device:
    """The device of tensors: `cpu` or `cuda`, and its number."""

    kind: str = "cpu"
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse `cpu`, `cuda` or `cuda:1`.

        Raises:
            ProviderError: the device is unknown or cannot be used here.
        """
        kind, _, number = text.partition(":")
        if number and not (number.isascii() and number.isdecimal()):
            raise ProviderError(f"there is no device {text!r}", "use cpu, cuda or cuda:1")
        return cls(resolve_provider(kind), int(number or 0))


class Layout:
    """The position of each tensor in a buffer of blocks, float32 [K, S].

    Attributes:
        shapes: the shapes of the tensors, in their order.
        size: the number of elements of all tensors, without padding.
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
        """Return the elements of a tensor in the flat buffer."""
        start, count = self._positions[name]
        return slice(start, start + count)


class Buffer:
    """A buffer with a layout on a device, initially zeros."""

    def __init__(self, layout: Layout, device: Device) -> None:
        self.layout = layout
        self.device = device
        self.value = allocate(layout.blocks, device)

    @property
    def pointer(self) -> int:
        """The address of the first element, on the device."""
        return int(self.value.data_ptr())

    def pointer_of(self, name: str) -> int:
        """Return the address of a tensor."""
        return self.pointer + 4 * int(self.layout.slice_of(name).start)

    def read(self, name: str) -> Float32:
        """Return a copy of a tensor."""
        tensor: Float32 = self._flat()[self.layout.slice_of(name)].reshape(self.layout.shapes[name])
        return tensor.copy()

    def write(self, tensors: Mapping[str, Float32]) -> None:
        """Set some of the tensors."""
        flat = self._flat()
        for name, tensor in tensors.items():
            flat[self.layout.slice_of(name)] = tensor.reshape(-1)
        if self.device.kind != "cpu":
            self.value.update_inplace(flat.reshape(self.layout.blocks))

    def read_all(self) -> Iterator[tuple[str, Float32]]:
        """Yield names and copies of all tensors."""
        flat = self._flat()
        for name, shape in self.layout.shapes.items():
            yield name, flat[self.layout.slice_of(name)].reshape(shape).copy()

    def _flat(self) -> Float32:
        """Return all elements: on the CPU a view of the buffer, elsewhere a copy."""
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
