"""What machine this is: its processor, and what a benchmark has to name beside its figures."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

_PACKAGES = ("onnxtool", "onnxruntime-gpu", "onnxruntime", "numpy", "tokenizers", "torch", "transformers")


def processor_name() -> str:
    """Return the processor's name as the system gives it, e.g. `Intel(R) Xeon(R) Processor @ 2.10GHz`."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return found or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]))
    # ARM has no name there, but numbers of the maker and of the part.
    arm = " ".join(facts[key] for key in ("CPU implementer", "CPU part") if key in facts)
    return facts.get("model name") or f"{platform.machine()} {arm}".strip()


def installed_versions() -> dict[str, str]:
    """Return package to version of what a figure may depend on, leaving out what is not installed."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
