"""Say what machine figures are from: every table names its class of processor."""

from __future__ import annotations

import os
import platform
import subprocess

# What decides how fast matrix products are, the best first; by the names of /proc/cpuinfo.
CLASSES = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "asimddp": "Arm, dot product",
}


def cpu_class() -> str:
    """Return the class of the processor, such as `AVX2`; its architecture where the system does not say more."""
    from onnxtool.runtime.machine import processor_features

    flags = processor_features()
    return next((name for flag, name in CLASSES.items() if flag in flags), platform.machine())


def describe_machine(threads: int = 0) -> str:
    """Return the class of the processor, its cores, the threads of each contender, and how busy the machine is."""
    used = f", {threads} threads each" if threads else ""
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{cpu_class()}, {os.cpu_count()} cores{used}{load}"


def describe_gpu() -> str:
    """Return the name of the first NVIDIA GPU and the version of its driver; empty where there is none."""
    command = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    name, _, driver = printed.splitlines()[0].partition(", ")
    return f"{name}, driver {driver}"
