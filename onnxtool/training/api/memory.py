"""Float32 tensors of many names in one buffer on a device, which sessions read and write in place."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]

# What lies between two steps of the optimizer on a block stays in the second-level cache of a CPU core.
BLOCK_SIZE = 32768
# Kernels on a GPU load 16 bytes at once, and expect tensors to begin where they may.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Device:
    """Where tensors are: `cpu` or `cuda`, and which of them."""

    kind: str = "cpu"
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read `cpu`, `cuda` or `cuda:1`.

        Raises:
            ProviderError: it cannot run here.
        """
        from onnxtool.errors import ProviderError
        from onnxtool.runtime.providers import resolve_provider

        kind, _, number = text.partition(":")
        if number and not (number.isascii() and number.isdecimal()):
            raise ProviderError(f"there is no device {text!r}", "use cpu, cuda or cuda:1")
        return cls(resolve_provider(kind), int(number or 0))


class Layout:
    """Where each tensor lies in a buffer of blocks, float32 [K, S].

    Attributes:
        shapes: of the tensors, in their order.
        size: of all together, in elements, without what lies between them.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: Device) -> None:
        self.shapes = dict(shapes)
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in self.shapes.items():
            count = math.prod(shape)
            self._places[name] = (end, count)
            end += -(-count // _ALIGNMENT) * _ALIGNMENT
        self.size = sum(count for _, count in self._places.values())
        block = min(BLOCK_SIZE, end) if device.kind == "cpu" else end
        self.blocks = (-(-end // block) if block else 0, block)

    def place(self, name: str) -> slice:
        """Return which elements of the flat buffer a tensor is."""
        start, count = self._places[name]
        return slice(start, start + count)


class Buffer:
    """A buffer of a layout on a device, at first all zeros."""

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
        return self.pointer + 4 * int(self.layout.place(name).start)

    def read(self, name: str) -> Float32:
        """Return a copy of a tensor."""
        tensor: Float32 = self._flat()[self.layout.place(name)].reshape(self.layout.shapes[name])
        return tensor.copy()

    def write(self, tensors: Mapping[str, Float32]) -> None:
        """Set some of the tensors."""
        flat = self._flat()
        for name, tensor in tensors.items():
            flat[self.layout.place(name)] = tensor.reshape(-1)
        if self.device.kind != "cpu":
            self.value.update_inplace(flat.reshape(self.layout.blocks))

    def read_all(self) -> Iterator[tuple[str, Float32]]:
        """Yield names and copies of all tensors."""
        flat = self._flat()
        for name, shape in self.layout.shapes.items():
            yield name, flat[self.layout.place(name)].reshape(shape).copy()

    def _flat(self) -> Float32:
        """Return all elements; on the CPU the buffer itself, elsewhere a copy."""
        return self._view if self.device.kind == "cpu" else self.value.numpy().reshape(-1)

    @cached_property
    def _view(self) -> Float32:
        return view(self.value, math.prod(self.layout.blocks))


def allocate(shape: tuple[int, ...], device: Device) -> Any:
    """Return an OrtValue of zeros, float32 of this shape."""
    import numpy as np
    import onnxruntime as ort

    value = ort.OrtValue.ortvalue_from_shape_and_type(list(shape), np.float32, device.kind, device.number)
    value.update_inplace(np.zeros(shape, np.float32))
    return value


def view(value: Any, count: int) -> Float32:
    """Return the elements of a float32 OrtValue in the memory of the CPU, without a copy."""
    import numpy as np

    if not count:
        return np.zeros(0, np.float32)
    pointer = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, (count,))
