"""Describe this machine: its processor, memory, and details that a benchmark has to state with its figures."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from onnxtool.version import __version__, installed

# Prefixes of vector instructions on x86 and ARM.
_VECTORS = ("amx", "avx", "fma", "asimd", "bf16", "i8mm", "smef", "smei", "sve")
_PACKAGES = ("onnxruntime-gpu", "onnxruntime", "numpy", "tokenizers", "torch", "transformers")
# Limit and usage of a container's memory, by versions 2 and 1 of control groups.
_CONTROL_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def processor_name() -> str:
    """Return the processor's name from the system, e.g. `Intel(R) Xeon(R) Processor @ 2.10GHz`."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return name or platform.machine()
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


def peak_rss_bytes() -> int:
    """Return the peak resident set of this process in bytes; 0 if the system does not report it."""
    try:
        # after exec on Linux, getrusage starts with the parent's peak.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _peak_by_getrusage()
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else _peak_by_getrusage()


def reset_peak_rss() -> bool:
    """Reset `peak_rss_bytes` to the current resident set; return whether the system supports that (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5)
    except OSError:
        return False
    return True


def available_memory_bytes() -> int | None:
    """Return the memory still available to this process, by the system and its control group; None if unknown."""
    kilobytes = _number_in("/proc/meminfo", r"^MemAvailable:\s*(\d+) kB$")
    bounds = [] if kilobytes is None else [kilobytes * 1024]
    for limit_file, usage_file in _CONTROL_GROUPS:
        limit, usage = (_number_in(f"/sys/fs/cgroup/{name}", r"^(\d+)$") for name in (limit_file, usage_file))
        bounds += [] if limit is None or usage is None else [max(0, limit - usage)]
    return min(bounds, default=None)


def _number_in(path: str, pattern: str) -> int | None:
    """Return the number matched by a pattern in a system file; None if there is none."""
    try:
        match = re.search(pattern, Path(path).read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


def _peak_by_getrusage() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such module
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
