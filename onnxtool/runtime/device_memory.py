"""How much memory of an NVIDIA device is taken, and what the device is called, from NVIDIA's own library (NVML).

onnxruntime keeps what its arena took until the session ends, so what is taken after the runs is the most there was.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

_NAME_LENGTH = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class DeviceMemory:
    """The device's name, and its bytes in use by all processes together."""

    name: str
    used_bytes: int


def device_memory() -> DeviceMemory | None:
    """Query the first device; None where there is no NVML or no device."""
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        label = ctypes.create_string_buffer(_NAME_LENGTH)
        if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle)) != 0:
            return None
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        library.nvmlDeviceGetName(handle, label, ctypes.c_uint(_NAME_LENGTH))
        return DeviceMemory(label.value.decode("utf-8", errors="replace"), int(memory.used))
    finally:
        library.nvmlShutdown()
