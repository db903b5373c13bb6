"""Describe this machine: its processor, and details that a benchmark has to state with its figures."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from onnxtool.version import __version__, installed

# Of x86 and of ARM.
_VECTORS = ("amx", "avx", "fma", "asimd", "bf16", "i8mm", "smef", "smei", "sve")
_PACKAGES = ("onnxruntime-gpu", "onnxruntime", "numpy", "tokenizers", "torch", "transformers")


def processor_name() -> str:
    """Return the processor's name from the system, e.g. `Intel(R) Xeon(R) Processor @ 2.10GHz`."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return found or platform.machine()
    lines = _lines_of_cpuinfo()
    if not lines:
        return platform.processor() or platform.machine()
    facts = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]))
    # ARM has no name there, only manufacturer and part numbers.
    arm = " ".join(facts[key] for key in ("CPU implementer", "CPU part") if key in facts)
    return facts.get("model name") or f"{platform.machine()} {arm}".strip()


def release_freed_memory() -> None:
    """Return freed memory to the system, where the C library would keep it, as glibc's.

    After a session of 440 MB was closed, glibc kept 170 to 330 MB of it in pieces.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def processor_features() -> frozenset[str]:
    """Return Linux' names of the instructions that the processor has, e.g. `avx512_bf16`; empty elsewhere."""
    line = next((line for line in _lines_of_cpuinfo() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def vector_instructions() -> tuple[str, ...]:
    """Return the instructions that kernels are chosen by, such as `amx_bf16`; the processor's name outside Linux."""
    return tuple(sorted(name for name in processor_features() if name.startswith(_VECTORS))) or (processor_name(),)


def _lines_of_cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def installed_versions() -> dict[str, str]:
    """Return the versions of installed packages that a figure may depend on."""
    return {"onnxtool": __version__, **{name: version for name in _PACKAGES if (version := installed(name))}}


_NAME_LENGTH = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class DeviceMemory:
    """The device's name, and its bytes in use by all processes together."""

    name: str
    used_bytes: int


def device_memory() -> DeviceMemory | None:
    """Query the first device; None without NVML or device."""
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
