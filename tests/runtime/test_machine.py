"""The machine has a name and versions, and nothing is made up of a device that is not there."""

from __future__ import annotations

import numpy as np
import pytest

from onnxtool.runtime import machine
from onnxtool.runtime.machine import device_memory, installed_versions, processor_name, vector_instructions


def test_the_machine_has_a_name_and_versions() -> None:
    """They stand in every report, so that two can be told to be of one machine."""
    assert processor_name()
    assert installed_versions()["numpy"] == np.__version__
    assert "onnxtool" in installed_versions()


def test_without_nvml_there_is_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is invented where no device is."""

    def missing(_name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert device_memory() is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flags : fpu sme smep avx2 amx_bf16", ("amx_bf16", "avx2")),
        ("Features : fp asimd smef16f32 crc32", ("asimd", "smef16f32")),
        ("", (processor_name(),)),
    ],
    ids=["x86", "ARM", "elsewhere"],
)
def test_instructions_that_kernels_are_chosen_by(
    monkeypatch: pytest.MonkeyPatch, line: str, found: tuple[str, ...]
) -> None:
    """Of x86, `sme` is an encryption of memory and `smep` a protection."""
    monkeypatch.setattr(machine, "_lines_of_cpuinfo", lambda: [line] if line else [])
    monkeypatch.setattr(machine, "processor_name", lambda: found[0])
    assert vector_instructions() == found
