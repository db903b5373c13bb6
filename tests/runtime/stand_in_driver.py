"""A stand-in for NVIDIA's driver, for machines without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onnxtool.runtime.providers import cuda_device_problem, cuda_problem


class Driver:
    """What is used of libcuda.so.1."""

    def __init__(self, status: int, devices: int) -> None:
        self.status, self.devices = status, devices

    def cuInit(self, _flags: int) -> int:  # noqa: N802 - NVIDIA's name
        return self.status

    def cuDeviceGetCount(self, reference: Any) -> int:  # noqa: N802 - NVIDIA's name
        reference._obj.value = self.devices
        return 0


@contextmanager
def nothing_known() -> Iterator[None]:
    """Forget what was found out about this machine, before and after."""
    for function in (cuda_problem, cuda_device_problem):
        function.cache_clear()
    yield
    for function in (cuda_problem, cuda_device_problem):
        function.cache_clear()
